// attention.cpp: torch.ops.wavepe.attention_forward and attention_backward [W][S][X][A].
//
// Work is dealt to threads by shapes alone where it changes a sum's order, so that results do not
// depend on the number of threads.
#include "attention.h"

namespace wavepe {
namespace {

// ---- forward: nothing is summed across tasks, so they are cut as the threads need it ------------

void decode(const Problem &x, const Heads &out, char *lse) {
    run_tasks(x.batch * x.heads, x.bytes(x.sizes(0).workspace), [&](int64_t task, char *scratch) {
        const int64_t b = task / x.heads, h = task % x.heads;
        const wpe_attention a = x.head(b, h);
        x.kernels->decode(&a, x.table(h), out.result(b, h), lse + x.bytes(task), scratch);
    });
}

void forward_blocks(const Problem &x, const Heads &out, char *lse, int64_t b, int64_t h,
                    const void *packed, int64_t begin, int64_t end, char *scratch) {
    const wpe_attention a = x.head(b, h);
    x.kernels->forward(&a, packed, out.result(b, h), x.row(lse, b, h), begin, end, scratch);
}

// Enough key heads: each is packed and used by one thread.
void forward_by_key_head(const Problem &x, const Heads &out, char *lse) {
    const wpe_attention_sizes sizes = x.sizes(0);
    const int64_t packed_bytes = x.bytes(sizes.packed);
    run_tasks(x.pairs(), packed_bytes + x.bytes(sizes.workspace), [&](int64_t t, char *scratch) {
        const int64_t b = t / x.key_heads, kv = t % x.key_heads;
        const wpe_attention a = x.head(b, kv * x.group);
        if (x.keys) x.kernels->pack(&a, scratch, 0, 0, x.keys);
        for (int64_t h = kv * x.group; h < (kv + 1) * x.group; h++)
            forward_blocks(x, out, lse, b, h, scratch, 0, x.queries, scratch + packed_bytes);
    });
}

// Few: all are packed first, then blocks of queries are dealt out, the longest first.
void forward_by_block(const Problem &x, const Heads &out, char *lse) {
    const wpe_attention_sizes sizes = x.sizes(0);
    const int64_t packed_bytes = x.bytes(sizes.packed), tiles = ceil_div(x.keys, WPE_KEY_BLOCK);
    const Memory packed(x.pairs() * packed_bytes);
    run_tasks(x.pairs() * tiles, 0, [&](int64_t t, char *) {
        const int64_t pair = t / tiles, begin = t % tiles * WPE_KEY_BLOCK;
        const wpe_attention a = x.head(pair / x.key_heads, pair % x.key_heads * x.group);
        x.kernels->pack(&a, packed.at(pair * packed_bytes), 0, begin,
                        std::min(begin + WPE_KEY_BLOCK, x.keys));
    });
    const int64_t blocks = ceil_div(x.queries, WPE_QUERY_BLOCK), heads = x.batch * x.heads;
    run_tasks(blocks * heads, x.bytes(sizes.workspace), [&](int64_t t, char *scratch) {
        const int64_t begin = (blocks - 1 - t / heads) * WPE_QUERY_BLOCK;
        const int64_t b = t % heads / x.heads, h = t % x.heads;
        forward_blocks(x, out, lse, b, h, packed.at((b * x.key_heads + h / x.group) * packed_bytes),
                       begin, std::min(begin + WPE_QUERY_BLOCK, x.queries), scratch);
    });
}

std::tuple<Tensor, Tensor> attention_forward(
    Tensor q, Tensor k, Tensor v, std::optional<Tensor> p, int64_t first, std::string beyond,
    std::optional<Tensor> q_rel, std::optional<Tensor> slopes, bool causal,
    std::optional<int64_t> window, std::optional<double> softcap, std::optional<double> scale,
    std::optional<Tensor> offset, std::optional<Tensor> key_mask, std::optional<Tensor> segments,
    std::optional<Tensor> mask, double dropout_p, std::optional<Tensor> seed,
    std::optional<std::vector<Tensor>> zones) {
    const bool decodes = q.dim() == 4 && q.size(2) == 1;
    const Problem x(
        {q, k, v, p, first, beyond, q_rel, slopes, causal, window, softcap, scale, offset, key_mask,
         segments, mask, dropout_p, seed, zones.value_or(std::vector<Tensor>{})},
        /*pack=*/!decodes);
    Tensor out = torch::stable::new_empty(q, {x.batch, x.heads, x.queries, x.value_size});
    Tensor lse = torch::stable::new_empty(q, {x.batch, x.heads, x.queries}, x.own_type());
    if (x.batch * x.heads * x.queries == 0) return {out, lse};
    const int64_t threads = torch::stable::get_num_threads();
    char *rows = at_mutable(lse, 0);
    if (decodes)
        decode(x, Heads(out), rows);
    else if (threads == 1 || x.pairs() >= 4 * threads)
        forward_by_key_head(x, Heads(out), rows);
    else
        forward_by_block(x, Heads(out), rows);
    return {out, lse};
}

// ---- backward ----------------------------------------------------------------------------------

struct Gradients {
    Tensor dq, dk, dv, dp, dq_rel;
};

// What one task adds up: dk and dv of a key head, dp of the table, or of a key head's tables.
struct Sums {
    int64_t dk, dv, dp;  // bytes
    int64_t tables;

    Sums(const Problem &x, const wpe_attention_sizes &sizes, bool p_grad)
        : dk(x.bytes(sizes.keys * sizes.head_size)),
          dv(x.bytes(sizes.keys * sizes.value_size)),
          dp(p_grad ? x.bytes(sizes.table * sizes.head_size) : 0),
          tables(x.table_per_head() ? x.group : 1) {}
    int64_t keys_bytes() const { return dk + dv; }
    int64_t table_bytes() const { return dp * tables; }
};

// Blocks of queries begin..end-1, and the keys that they see, to whole tiles.
struct Chunk {
    int64_t begin = 0, end = 0;
    wpe_range keys{0, 0};
};

class Backward {
    const Problem &x;
    const Heads grad_out, out;
    const char *const lse, *const grad_lse;
    const Heads dq, dk, dv, dr;
    const Tensor &dp;
    const bool p_grad;
    const wpe_attention_sizes sizes;
    const Sums sums;
    const int64_t blocks;

  public:
    Backward(const Problem &x, const Tensor &grad_out, const Tensor &out, const Tensor &lse,
             const std::optional<Tensor> &grad_lse, const Gradients &to, bool p_grad)
        : x(x),
          grad_out(grad_out),
          out(out),
          lse(at(lse, 0)),
          grad_lse(grad_lse ? at(*grad_lse, 0) : nullptr),
          dq(to.dq),
          dk(to.dk),
          dv(to.dv),
          dr(x.has_q_rel() ? Heads(to.dq_rel) : Heads()),
          dp(to.dp),
          p_grad(p_grad),
          sizes(x.sizes(1)),
          sums(x, sizes, p_grad),
          blocks(ceil_div(x.queries, WPE_QUERY_BLOCK)) {}

    // Chunks of a key head's blocks of queries, each with sums of its own.
    int64_t chunk_count() const {
        return std::clamp<int64_t>(std::min(32 / x.pairs(), blocks / 4), 1, 4);
    }

    // Consecutive blocks that see about as many keys in each chunk.
    std::vector<Chunk> chunks(int64_t b, int64_t count) const {
        const wpe_attention a = x.head(b, 0);
        std::vector<int64_t> cost(blocks + 1);
        std::vector<wpe_range> seen(blocks);
        for (int64_t i = 0; i < blocks; i++) {
            seen[i] = x.kernels->keys(&a, i * WPE_QUERY_BLOCK,
                                      std::min((i + 1) * WPE_QUERY_BLOCK, x.queries));
            cost[i + 1] = cost[i] + seen[i].end - seen[i].begin + WPE_QUERY_BLOCK;
        }
        std::vector<Chunk> result;
        for (int64_t c = 0, i = 0; c < count; c++) {
            const int64_t begin = i;
            while (i < blocks && cost[i + 1] * count <= cost[blocks] * (c + 1)) i++;
            if (begin == i) continue;
            const int64_t first = seen[begin].begin / WPE_KEY_BLOCK * WPE_KEY_BLOCK;
            const int64_t end = ceil_div(seen[i - 1].end, WPE_KEY_BLOCK) * WPE_KEY_BLOCK;
            // a tile at least, so that neither bound ever falls
            const int64_t last = std::max(end, first + WPE_KEY_BLOCK);
            result.push_back({begin, i, {first, std::min(last, sizes.keys)}});
        }
        return result;
    }

    void run_chunk(int64_t b, int64_t kv, const Chunk &chunk, const void *packed, char *keys,
                   char *tables, char *scratch) const {
        const int64_t first = chunk.keys.begin, rows = chunk.keys.end - first;
        std::memset(keys + x.bytes(first * sizes.head_size), 0, x.bytes(rows * sizes.head_size));
        std::memset(keys + sums.dk + x.bytes(first * sizes.value_size), 0,
                    x.bytes(rows * sizes.value_size));
        for (int64_t i = chunk.begin; i < chunk.end; i++)
            for (int64_t g = 0; g < x.group; g++) {
                const int64_t h = kv * x.group + g, begin = i * WPE_QUERY_BLOCK;
                const wpe_attention a = x.head(b, h);
                wpe_attention_gradients to{};
                to.out = out.matrix(b, h);
                to.grad_out = grad_out.matrix(b, h);
                to.lse = x.row(lse, b, h);
                to.grad_lse = grad_lse ? x.row(grad_lse, b, h) : nullptr;
                to.dq = dq.result(b, h);
                if (x.has_q_rel()) to.dr = dr.result(b, h);
                to.sums.dk = keys;
                to.sums.dv = keys + sums.dk;
                if (p_grad) to.sums.dp = tables + (sums.tables > 1 ? g * sums.dp : 0);
                x.kernels->backward(&a, packed, &to, begin,
                                    std::min(begin + WPE_QUERY_BLOCK, x.queries), scratch);
            }
    }

    // Keys begin..end-1: sums over the chunks that saw them.
    void store_keys(int64_t b, int64_t kv, const char *keys, const std::vector<Chunk> &chunks,
                    int64_t begin, int64_t end) const {
        int64_t first = 0, last, count = (int64_t)chunks.size();
        while (first < count && chunks[first].keys.end <= begin) first++;
        last = first;
        while (last < count && chunks[last].keys.begin < end) last++;
        const int64_t part = x.elements(sums.keys_bytes()), rows = end - begin;
        keys += first * sums.keys_bytes();
        x.kernels->store(dk.result(b, kv, begin), x.storage,
                         keys + x.bytes(begin * sizes.head_size), rows, x.head_size,
                         sizes.head_size, last - first, part);
        x.kernels->store(dv.result(b, kv, begin), x.storage,
                         keys + sums.dk + x.bytes(begin * sizes.value_size), rows, x.value_size,
                         sizes.value_size, last - first, part);
    }

    // The tables of key head kv, or the one of all: sums over `parts` buffers `part` bytes apart.
    void store_tables(int64_t kv, const char *tables, int64_t parts, int64_t part) const {
        for (int64_t g = 0; g < sums.tables; g++)
            x.kernels->store(x.table_result(dp, kv * x.group + g), x.storage, tables + g * sums.dp,
                             x.relative.rows, x.head_size, sizes.head_size, parts,
                             x.elements(part));
    }

    // One key head after the other, its chunks side by side.
    void by_chunk(int64_t count) const {
        const int64_t tiles = ceil_div(x.keys, WPE_KEY_BLOCK), table = sums.table_bytes();
        const Memory keys(count * sums.keys_bytes()), tables(count * table, true);
        for (int64_t pair = 0; pair < x.pairs(); pair++) {
            const int64_t kv = pair / x.batch, b = pair % x.batch;
            const std::vector<Chunk> parts = chunks(b, count);
            if (x.table_per_head() && b == 0 && pair) std::memset(tables.at(0), 0, count * table);
            run_chunks(b, kv, parts, keys, tables);
            run_tasks(tiles, 0, [&](int64_t t, char *) {
                store_keys(b, kv, keys.at(0), parts, t * WPE_KEY_BLOCK,
                           std::min((t + 1) * WPE_KEY_BLOCK, x.keys));
            });
            const bool last = x.table_per_head() ? b == x.batch - 1 : pair == x.pairs() - 1;
            if (p_grad && last) store_tables(kv, tables.at(0), count, table);
        }
    }

    // Packs the keys, which are not needed any more when results are stored.
    void run_chunks(int64_t b, int64_t kv, const std::vector<Chunk> &parts, const Memory &keys,
                    const Memory &tables) const {
        const Memory packed(x.bytes(sizes.packed));
        run_tasks(ceil_div(x.keys, WPE_KEY_BLOCK), 0, [&](int64_t t, char *) {
            const wpe_attention a = x.head(b, kv * x.group);
            x.kernels->pack(&a, packed.at(0), 1, t * WPE_KEY_BLOCK,
                            std::min((t + 1) * WPE_KEY_BLOCK, x.keys));
        });
        run_tasks((int64_t)parts.size(), x.bytes(sizes.workspace), [&](int64_t c, char *scratch) {
            run_chunk(b, kv, parts[c], packed.at(0), keys.at(c * sums.keys_bytes()),
                      tables.at(c * sums.table_bytes()), scratch);
        });
    }

    // Bins of whole key heads side by side, each bin with tables of its own.
    void by_key_head() const {
        const int64_t packed = x.bytes(sizes.packed), keys = sums.keys_bytes();
        int64_t bins = x.pairs();
        if (p_grad && x.table_per_head()) bins = x.key_heads;
        if (p_grad && !x.table_per_head()) {  // no more memory than q takes
            const int64_t table = sizes.table * std::max<int64_t>(sizes.head_size, 1);
            bins = std::clamp<int64_t>(x.batch * x.heads * x.queries * x.head_size / table, 1,
                                       std::min<int64_t>(bins, 32));
        }
        const Memory tables(p_grad ? bins * sums.table_bytes() : 0, true);
        run_tasks(bins, packed + keys + x.bytes(sizes.workspace), [&](int64_t bin, char *scratch) {
            char *own = tables.at(p_grad ? bin * sums.table_bytes() : 0);
            for (int64_t t = x.pairs() * bin / bins; t < x.pairs() * (bin + 1) / bins; t++) {
                const int64_t kv = t / x.batch, b = t % x.batch;
                const wpe_attention a = x.head(b, kv * x.group);
                if (x.keys) x.kernels->pack(&a, scratch, 1, 0, x.keys);
                const std::vector<Chunk> all{{0, blocks, {0, sizes.keys}}};
                run_chunk(b, kv, all[0], scratch, scratch + packed, own, scratch + packed + keys);
                store_keys(b, kv, scratch + packed, all, 0, x.keys);
            }
        });
        if (!p_grad) return;
        for (int64_t kv = 0; kv < (x.table_per_head() ? x.key_heads : 1); kv++)
            store_tables(kv, tables.at(kv * sums.table_bytes()), x.table_per_head() ? 1 : bins,
                         sums.table_bytes());
    }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor out, Tensor lse, Tensor q, Tensor k,
    Tensor v, std::optional<Tensor> p, int64_t first, std::string beyond,
    std::optional<Tensor> q_rel, std::optional<Tensor> slopes, bool causal,
    std::optional<int64_t> window, std::optional<double> softcap, std::optional<double> scale,
    std::optional<Tensor> offset, std::optional<Tensor> key_mask, std::optional<Tensor> segments,
    std::optional<Tensor> mask, double dropout_p, std::optional<Tensor> seed,
    std::optional<std::vector<Tensor>> zones, bool p_grad) {
    WPE_CHECK(!p_grad || p, "the gradient of p is asked for, and there is no p");
    if (p_grad) zones.reset();
    const Problem x(
        {q, k, v, p, first, beyond, q_rel, slopes, causal, window, softcap, scale, offset, key_mask,
         segments, mask, dropout_p, seed, zones.value_or(std::vector<Tensor>{})},
        /*pack=*/true);
    x.check_gradients(grad_out, grad_lse, out, lse);
    if (grad_lse) grad_lse = torch::stable::contiguous(*grad_lse);
    Gradients result{new_like(q), new_like(k), new_like(v),
                     p_grad ? new_like(*p) : torch::stable::new_empty(q, {0}),
                     q_rel ? new_like(*q_rel) : torch::stable::new_empty(q, {0})};
    if (p_grad) torch::stable::zero_(result.dp);
    if (x.batch * x.heads * x.queries == 0 || x.keys == 0) {
        for (Tensor *t : {&result.dq, &result.dk, &result.dv, &result.dq_rel})
            torch::stable::zero_(*t);
    } else {
        lse = torch::stable::contiguous(lse);
        const Backward backward(x, grad_out, out, lse, grad_lse, result,
                                p_grad && x.relative.rows > 0);
        // a table that no query reaches leaves q_rel without a gradient
        if (q_rel && !x.has_q_rel()) torch::stable::zero_(result.dq_rel);
        const int64_t chunks = backward.chunk_count();
        if (chunks > 1)
            backward.by_chunk(chunks);
        else
            backward.by_key_head();
    }
    return {result.dq, result.dk, result.dv, result.dp, result.dq_rel};
}

}  // namespace

#define ATTENTION_ARGUMENTS                                                                \
    "Tensor q, Tensor k, Tensor v, Tensor? p=None, SymInt first=0, str beyond=\"zero\","   \
    " Tensor? q_rel=None, Tensor? slopes=None, bool causal=True, SymInt? window=None,"     \
    " float? softcap=None, float? scale=None, Tensor? offset=None, Tensor? key_mask=None," \
    " Tensor? segments=None, Tensor? mask=None, float dropout_p=0.0, Tensor? seed=None,"   \
    " Tensor[]? zones=None"

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def("attention_forward(" ATTENTION_ARGUMENTS ") -> (Tensor out, Tensor lse)");
    m.def(
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse,"
        " " ATTENTION_ARGUMENTS
        ", bool p_grad=False)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dp, Tensor dq_rel)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace wavepe
