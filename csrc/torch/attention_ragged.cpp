// attention_ragged.cpp: torch.ops.wavepe.attention_ragged, attention of several requests, whose
// tokens lie in one row, and whose keys may lie in pages.
//
// Each request is computed as attention_forward computes it alone, so it has the same bits. All
// requests share the threads, and their tables are packed once.
#include "attention.h"

namespace wavepe {
namespace {

// The tokens of a request, whose queries end at its last key, and what its tasks need. With pages
// first_key is 0.
struct Request {
    int64_t first_query, queries, first_key, keys;
    std::vector<int64_t> pages;   // empty: its keys lie in a row
    const Call *call = nullptr;   // of the requests that read the same table
    wpe_decoding decoding{};      // if it decodes
    wpe_attention_sizes sizes{};  // if not
    int64_t memory = 0;           // where its sums or packed keys begin, in bytes
    int64_t done = 0;             // the number of its first key head in Ragged::done

    bool decodes() const { return wpe_decodes(queries, keys); }
    int64_t tiles() const { return ceil_div(keys, WPE_KEY_BLOCK); }
    int64_t blocks() const { return ceil_div(queries, WPE_QUERY_BLOCK); }
    wpe_attention head(int64_t h) const;
};

wpe_matrix from_row(wpe_matrix m, int64_t row, int64_t item) {
    m.data = static_cast<const char *>(m.data) + row * m.row_stride * item;
    return m;
}

// Return a head, whose table is packed.
wpe_attention Request::head(int64_t h) const {
    wpe_attention a = call->head(0, h);
    const int64_t item = a.storage == WPE_F64 ? 8 : a.storage == WPE_F32 ? 4 : 2;
    a.queries = queries;
    a.keys = a.end_key = keys;
    a.offset = keys - queries;
    a.q = from_row(a.q, first_query, item);
    if (a.r.data) a.r = from_row(a.r, first_query, item);
    a.k = from_row(a.k, first_key, item);
    a.v = from_row(a.v, first_key, item);
    return a;
}

// A request as decode reads it, and the keys and values that were gathered from its pages.
struct Source {
    const Request *request;
    wpe_matrix k{nullptr, 0, 0}, v{nullptr, 0, 0};

    wpe_attention head(int64_t h) const {
        wpe_attention a = request->head(h);
        if (k.data) a.k = k;
        if (v.data) a.v = v;
        return a;
    }
};

// The tasks of several requests, counted one behind the other.
class Tasks {
    std::vector<int64_t> ends;

  public:
    void add(int64_t tasks) { ends.push_back(count() + tasks); }
    int64_t count() const { return ends.empty() ? 0 : ends.back(); }
    // Return the request of a task, and the task's number in it.
    std::pair<int64_t, int64_t> find(int64_t task) const {
        const int64_t r = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        return {r, task - (r ? ends[r - 1] : 0)};
    }
};

class Ragged {
    std::vector<Request> requests;  // those that decode are behind the others
    std::vector<Call> calls;
    const Tensor &k, &v;
    HeadMatrices key_pages, value_pages, results;
    char *lse;
    int64_t heads, key_heads, queries;

  public:
    Ragged(std::vector<Request> requests, const Call &call, const Tensor &k, const Tensor &v,
           const Tensor &out, const Tensor &lse);
    void run();

  private:
    void read_tables(const Call &call);
    int64_t gathered_bytes(const Request &r, int64_t keys) const;
    Source gathered(const Request &r, int64_t kv, wpe_range range, char *memory) const;
    void pack(const Request &r, int64_t kv, int64_t tile, char *packed, char *scratch) const;
    void decode(const Request &r, int64_t kv, int64_t part, char *sums, std::atomic<int64_t> *done,
                char *scratch) const;
    void forward(const Request &r, int64_t h, int64_t block, const char *packed,
                 char *scratch) const;
    wpe_matrix_out out_of(const Request &r, int64_t h) const {
        return results.result(0, h, r.first_query);
    }
    char *lse_of(const Request &r, int64_t h) const {
        return lse + r.call->bytes(h * queries + r.first_query);
    }
};

Ragged::Ragged(std::vector<Request> given, const Call &call, const Tensor &k, const Tensor &v,
               const Tensor &out, const Tensor &lse)
    : requests(std::move(given)),
      k(k),
      v(v),
      key_pages(k),
      value_pages(v),
      results(out),
      lse(at_mutable(lse, 0)),
      heads(call.heads),
      key_heads(call.key_heads),
      queries(call.queries) {
    // The longest tasks run first.
    std::stable_sort(requests.begin(), requests.end(), [](const Request &a, const Request &b) {
        return std::pair(a.decodes(), -a.keys) < std::pair(b.decodes(), -b.keys);
    });
    read_tables(call);
}

// Pack the tables. Requests that read zones and those that read rows of p have a call each.
void Ragged::read_tables(const Call &call) {
    calls.reserve(2);
    for (const bool zones : {false, true}) {
        int64_t most_queries = 0, most_keys = 0;
        for (Request &r : requests) {
            if (call.reads_zones(r.keys) != zones) continue;
            r.call = calls.data() + calls.size();
            most_queries = std::max(most_queries, r.queries);
            most_keys = std::max(most_keys, r.keys);
        }
        if (!most_queries) continue;
        calls.push_back(call);
        calls.back().set_longest(most_queries, most_keys);
        calls.back().read();
        calls.back().pack_tables(WPE_FORWARD);
    }
}

int64_t Ragged::gathered_bytes(const Request &r, int64_t rows) const {
    if (r.pages.empty()) return 0;
    return wpe_round_up(rows * k.size(3) * key_pages.item) +
           wpe_round_up(rows * v.size(3) * value_pages.item);
}

// Copy a range of a request's keys out of its pages. Row j of the result is key j.
wpe_matrix gather(const HeadMatrices &pages, const Request &r, int64_t kv, const Tensor &x,
                  wpe_range range, char *to) {
    const int64_t page = x.size(2), cols = x.size(3), row_bytes = cols * pages.item;
    const wpe_matrix rows{to - range.begin * row_bytes, cols, 1};
    for (int64_t j = range.begin; j < range.end && row_bytes;) {
        const int64_t end = std::min(range.end, (j / page + 1) * page);
        const wpe_matrix from = pages.matrix(r.pages[j / page], kv);
        const int64_t stride = from.row_stride * pages.item;
        const char *row = static_cast<const char *>(from.data) + j % page * stride;
        const int64_t rows_each = stride == row_bytes ? end - j : 1;
        for (; j < end; j += rows_each, row += stride, to += rows_each * row_bytes)
            std::memcpy(to, row, rows_each * row_bytes);
    }
    return rows;
}

// Return a request whose keys can be read in a range. `memory` holds gathered_bytes of it.
Source Ragged::gathered(const Request &r, int64_t kv, wpe_range range, char *memory) const {
    if (r.pages.empty()) return {&r};
    char *values = memory + wpe_round_up((range.end - range.begin) * k.size(3) * key_pages.item);
    return {&r, gather(key_pages, r, kv, k, range, memory),
            gather(value_pages, r, kv, v, range, values)};
}

void Ragged::pack(const Request &r, int64_t kv, int64_t tile, char *packed, char *scratch) const {
    const int64_t begin = tile * WPE_KEY_BLOCK, end = std::min(begin + WPE_KEY_BLOCK, r.keys);
    const wpe_attention a = gathered(r, kv, {begin, end}, scratch).head(kv * r.call->group);
    r.call->kernels->pack(&a, packed + kv * r.call->bytes(r.sizes.packed), WPE_FORWARD, begin, end);
}

void Ragged::forward(const Request &r, int64_t h, int64_t block, const char *packed,
                     char *scratch) const {
    const wpe_attention a = r.head(h);
    const int64_t begin = block * WPE_QUERY_BLOCK;
    const char *keys = packed + h / r.call->group * r.call->bytes(r.sizes.packed);
    r.call->kernels->forward(&a, keys, out_of(r, h), lse_of(r, h), begin,
                             std::min(begin + WPE_QUERY_BLOCK, r.queries), scratch);
}

// Compute one part of the keys of a key head. Only keys that some query sees are gathered.
void Ragged::decode(const Request &r, int64_t kv, int64_t part, char *sums,
                    std::atomic<int64_t> *done, char *scratch) const {
    const wpe_attention a = r.head(kv * r.call->group);
    const wpe_range seen = r.call->kernels->seen_keys(&a, 0, r.queries);
    wpe_range range = wpe_decode_part(r.keys, part);
    char *memory = scratch + gathered_bytes(r, range.end - range.begin);
    range.begin = std::max(range.begin, seen.begin);
    range.end = std::max(range.begin, std::min(range.end, seen.end));
    const Source source = gathered(r, kv, range, scratch);
    wpe_decoding d = r.decoding;
    d.call = &source;
    decode_part(d, part, kv, kv + 1, key_heads, sums, done, memory,
                [&](int64_t h) { return std::pair{out_of(r, h), lse_of(r, h)}; });
}

void Ragged::run() {
    int64_t bytes = 0, decoding = 0, scratch_bytes = 0;
    const auto add = [&](int64_t more) {  // the sum of many requests does not overflow, either
        bytes += (int64_t)wpe_round_up(std::min(more, ADDRESS_SPACE - bytes));
    };
    for (Request &r : requests) {
        const wpe_attention a = r.head(0);
        const Source source{&r};
        r.memory = bytes;
        if (!r.decodes()) {
            r.sizes = r.call->kernels->sizes(&a, WPE_FORWARD);
            add(product({key_heads, r.call->bytes(r.sizes.packed)}));
            scratch_bytes = std::max({scratch_bytes, r.call->bytes(r.sizes.workspace),
                                      gathered_bytes(r, WPE_KEY_BLOCK)});
            continue;
        }
        wpe_decoding &d = r.decoding;
        d.kernels = r.call->kernels;
        d.table = &r.call->table;
        d.group = r.call->group;
        d.call = &source;
        d.head = [](const void *of, int64_t h, int64_t *) {
            return static_cast<const Source *>(of)->head(h);
        };
        wpe_plan_decoding(&d);
        add(product({d.parts, key_heads, d.group, d.head_sums, d.item}));
        const int64_t part = std::min<int64_t>(r.keys, WPE_DECODE_KEYS);
        scratch_bytes = std::max<int64_t>(scratch_bytes, gathered_bytes(r, part) + d.task_bytes);
        r.done = decoding;
        decoding += key_heads;
    }
    const Memory memory(1, bytes);
    std::vector<std::atomic<int64_t>> done(decoding);  // the parts of each key head that are done
    Tasks packing, computing;
    for (const Request &r : requests) {
        packing.add(r.decodes() ? 0 : key_heads * r.tiles());
        computing.add(r.decodes() ? key_heads * r.decoding.parts : heads * r.blocks());
    }
    run_tasks(packing.count(), scratch_bytes, [&](int64_t task, char *scratch) {
        const auto [number, t] = packing.find(task);
        const Request &r = requests[number];
        pack(r, t % key_heads, t / key_heads, memory.at(r.memory), scratch);
    });
    run_tasks(computing.count(), scratch_bytes, [&](int64_t task, char *scratch) {
        const auto [number, t] = computing.find(task);
        const Request &r = requests[number];
        char *of_request = memory.at(r.memory);
        if (r.decodes())
            decode(r, t % key_heads, t / key_heads, of_request, &done[r.done], scratch);
        else  // the last blocks see the most keys
            forward(r, t % heads, r.blocks() - 1 - t / heads, of_request, scratch);
    });
}

// ---- the arguments -----------------------------------------------------------------------------

// An integer tensor, read where it is: a table of pages has many columns that no request uses.
class Integers {
    Tensor x;

  public:
    explicit Integers(const Tensor &given)
        : x(given.scalar_type() == ScalarType::Int ? given : as_type(given, ScalarType::Long)) {}
    int64_t at(int64_t element) const {
        const char *data = wavepe::at(x, element);
        return x.element_size() == 4 ? *reinterpret_cast<const int32_t *>(data)
                                     : *reinterpret_cast<const int64_t *>(data);
    }
    int64_t stride(int64_t dim) const { return x.stride(dim); }
};

void check_ints(const char *name, const Tensor &x, int64_t dim, const char *shape) {
    check_cpu(name, x);
    check_integer(name, x);
    WPE_CHECK(x.dim() == dim, name, " must be ", shape, ", got ", shape_of(x));
}

// Return the numbers of cu_seqlens. A tensor of stride 0 has one.
std::vector<int64_t> read_starts(const char *name, const Tensor &x) {
    const Integers from(x);
    std::vector<int64_t> starts(x.stride(0) ? x.size(0) : 1);
    for (size_t r = 0; r < starts.size(); r++) starts[r] = from.at((int64_t)r * from.stride(0));
    WPE_CHECK(starts[0] == 0, name, " must begin with 0, got ", starts[0]);
    for (size_t r = 1; r < starts.size(); r++)
        WPE_CHECK(starts[r - 1] <= starts[r], name, " must not decrease, got ", starts[r],
                  " after ", starts[r - 1]);
    return starts;
}

// Return the pages of a request, whose numbers a table (R, P) holds.
std::vector<int64_t> read_pages(const Integers &table, const Tensor &block_table, const Tensor &k,
                                int64_t r, int64_t keys) {
    if (!keys) return {};
    const int64_t page = k.size(2), most = block_table.size(1);
    WPE_CHECK(page > 0 && (keys - 1) / page < most, "request ", r, " has ", keys,
              " keys, but block_table ", shape_of(block_table), " names ", most, " pages of ", page,
              " keys for it");
    const int64_t count = (keys - 1) / page + 1;
    std::vector<int64_t> pages;
    try {
        pages.resize(count);
    } catch (const std::exception &) {
        WPE_CHECK(false, current_operator, ": out of memory: request ", r, " has ", count,
                  " pages");
    }
    for (size_t i = 0; i < pages.size(); i++) {
        pages[i] = table.at(r * table.stride(0) + (int64_t)i * table.stride(1));
        WPE_CHECK(pages[i] >= 0 && pages[i] < k.size(0), "block_table must hold numbers of the ",
                  k.size(0), " pages, got ", pages[i], " for page ", i, " of request ", r);
    }
    return pages;
}

// Return the requests that have queries.
std::vector<Request> read_requests(const Tensor &q, const Tensor &k, const Tensor &cu_seqlens_q,
                                   const Tensor &cu_seqlens_k,
                                   const std::optional<Tensor> &block_table) {
    const std::vector<int64_t> queries = read_starts("cu_seqlens_q", cu_seqlens_q),
                               keys = read_starts("cu_seqlens_k", cu_seqlens_k);
    WPE_CHECK(queries.back() == q.size(2), "cu_seqlens_q must end with the ", q.size(2),
              " queries of q, got ", queries.back());
    WPE_CHECK(block_table || keys.back() == k.size(2), "cu_seqlens_k must end with the ", k.size(2),
              " keys of k, got ", keys.back());
    const Integers table(block_table ? *block_table : cu_seqlens_k);
    const auto start = [](const std::vector<int64_t> &x, size_t r) {
        return x[std::min(r, x.size() - 1)];
    };
    std::vector<Request> requests;
    for (size_t r = 0; r + 1 < std::max(queries.size(), keys.size()); r++) {
        Request request{};
        request.first_query = start(queries, r);
        request.queries = start(queries, r + 1) - request.first_query;
        const int64_t first_key = start(keys, r);
        request.keys = start(keys, r + 1) - first_key;
        if (block_table)
            request.pages = read_pages(table, *block_table, k, (int64_t)r, request.keys);
        else
            request.first_key = first_key;
        if (request.queries) requests.push_back(std::move(request));
    }
    return requests;
}

std::tuple<Tensor, Tensor> attention_ragged(Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                            std::optional<Tensor> block_table,
                                            WPE_ATTENTION_PARAMETERS) {
    const Call call({WPE_ATTENTION_NAMES}, block_table.has_value());
    call.check_ragged();
    check_ints("cu_seqlens_q", cu_seqlens_q, 1, "(R + 1)");
    check_ints("cu_seqlens_k", cu_seqlens_k, 1, "(R + 1)");
    WPE_CHECK(cu_seqlens_q.size(0) > 0 && cu_seqlens_k.size(0) == cu_seqlens_q.size(0),
              "cu_seqlens_q and cu_seqlens_k must be (R + 1) for R requests, got ",
              shape_of(cu_seqlens_q), " and ", shape_of(cu_seqlens_k));
    WPE_CHECK(call.batch == 1, "with cu_seqlens all requests lie in one row: q must be (1, H, ",
              "total, d), got ", shape_of(q));
    if (block_table) {
        const Tensor &table = *block_table;
        check_ints("block_table", table, 2, "(R, P)");
        WPE_CHECK(table.size(0) == cu_seqlens_q.size(0) - 1,
                  "block_table must be (R, P) for R requests, here ", cu_seqlens_q.size(0) - 1,
                  ", got ", shape_of(table));
        for (const auto &[name, x] : {std::pair{"k", &k}, std::pair{"v", &v}})
            WPE_CHECK(last_size(*x) < 2 || last_stride(*x) == 1, "pages of ", name,
                      " must have a last stride of 1, got ", last_stride(*x));
    }
    Tensor out = new_result(q, {1, call.heads, call.queries, call.value_size});
    Tensor lse = new_result(q, {1, call.heads, call.queries}, call.compute_type());
    std::vector<Request> requests = read_requests(q, k, cu_seqlens_q, cu_seqlens_k, block_table);
    if (!call.empty()) Ragged(std::move(requests), call, k, v, out, lse).run();
    return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "attention_ragged(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? "
        "block_table, " WPE_ATTENTION_SCHEMA ") -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) { WPE_IMPL(m, attention_ragged); }

}  // namespace wavepe
