// attention_call.cpp: check the arguments of attention, and convert them for the kernels.
#include <unordered_set>

#include "attention.h"

namespace wavepe {
namespace {

std::string shapes_of(const Tensor &q, const Tensor &k, const Tensor &v) {
    return text("q ", shape_of(q), ", k ", shape_of(k), ", v ", shape_of(v));
}

// Check that x is (B, n) or (1, n).
void check_over_keys(const char *name, const Tensor &x, int64_t batch, int64_t keys) {
    check_cpu(name, x);
    WPE_CHECK(x.dim() == 2 && (x.size(0) == batch || x.size(0) == 1) && x.size(1) == keys, name,
              " must be (", batch, ", ", keys, ") or (1, ", keys, "), got ", shape_of(x));
}

const uint8_t *bool_data(const char *name, const Tensor &x) {
    WPE_CHECK(x.scalar_type() == ScalarType::Bool, name, " must be bool, got ",
              name_of(x.scalar_type()));
    return static_cast<const uint8_t *>(x.const_data_ptr());
}

// Return the numbers of a float tensor (n). A conversion by torch would take microseconds.
std::vector<double> doubles(const Tensor &given) {
    const bool narrow = given.scalar_type() == ScalarType::Float;
    const Tensor x = narrow ? given : as_type(given, ScalarType::Double);
    std::vector<double> numbers(x.numel());
    for (size_t i = 0; i < numbers.size(); i++) {
        const char *number = at(x, (int64_t)i * x.stride(0));
        numbers[i] = narrow ? *reinterpret_cast<const float *>(number)
                            : *reinterpret_cast<const double *>(number);
    }
    return numbers;
}

}  // namespace

Call::Call(AttentionArguments arguments, bool paged) : given(std::move(arguments)), paged(paged) {
    check_tensors();
    batch = given.q.size(0);
    heads = given.q.size(1);
    queries = given.q.size(2);
    head_size = given.q.size(3);
    key_heads = given.k.size(1);
    keys = given.k.size(2);
    value_size = given.v.size(3);
    table_size = given.p ? last_size(*given.p) : 0;
    group = key_heads ? heads / key_heads : 1;
    storage = kernel_dtype(given.q.scalar_type());
    kernels = &wpe_current(dispatch)->attention[is_double()];
    check_sizes();
    check_bias();
    check_sinks();
    check_options();
}

void Call::set_longest(int64_t most_queries, int64_t most_keys) {
    queries = most_queries;
    keys = most_keys;
    check_sizes();
}

void Call::read() {
    q = HeadMatrices(given.q);
    k = HeadMatrices(given.k);
    v = HeadMatrices(given.v);
    if (given.q_rel) r = HeadMatrices(*given.q_rel);
    if (given.slopes) slope = doubles(*given.slopes);
    if (given.sinks) sink = doubles(*given.sinks);
    if (given.dropout_p > 0) {
        const Tensor wide = dense(as_type(*given.seed, ScalarType::Long));
        seed = (uint64_t)*wide.const_data_ptr<int64_t>();
    }
    read_offsets();
    read_key_mask();
    if (given.segments) read_segments();
    // a bias or a table without elements changes nothing
    if (given.bias && given.bias->numel() > 0 && keys > 0) read_bias();
    if (given.p && given.p->numel() > 0 && keys > 0) read_table();
}

void Call::check_tensors() const {
    const Tensor &q = given.q, &k = given.k, &v = given.v;
    check_cpu("q", q);
    check_float("q", q);
    check_same_dtype(q, "k", k);
    check_same_dtype(q, "v", v);
    WPE_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && (paged || k.size(0) == q.size(0)) &&
                  v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2) &&
                  k.size(3) == q.size(3),
              paged ? "q (1, H, m, d), k (blocks, Hk, page, d) and v (blocks, Hk, page, dv)"
                    : "q (B, H, m, d), k (B, Hk, n, d) and v (B, Hk, n, dv)",
              " needed, got ", shapes_of(q, k, v));
    WPE_CHECK(k.size(1) ? q.size(1) % k.size(1) == 0 : q.size(1) == 0, "q has ", q.size(1),
              " heads, which must be a multiple of the ", k.size(1), " heads of k and v (",
              shapes_of(q, k, v), ")");
    if (given.p) {
        const Tensor &p = *given.p;
        const int64_t columns = p.dim() ? last_size(p) : q.size(3);
        check_same_dtype(q, "p", p);
        WPE_CHECK(p.dim() == 2 || (p.dim() == 3 && p.size(0) == q.size(1)), "p must be (w, ",
                  columns, ") or (", q.size(1), ", w, ", columns, "), got ", shape_of(p));
        WPE_CHECK(given.q_rel || columns == q.size(3), "p of size ", columns,
                  " with q of head size ", q.size(3), " needs q_rel of size ", columns);
        WPE_CHECK(beyond_code(given.beyond) == WPE_ZERO || p.size(p.dim() - 2) > 0,
                  "beyond='edge' needs a table of at least one row");
    }
    beyond_code(given.beyond);
    if (given.q_rel) {
        check_same_dtype(q, "q_rel", *given.q_rel);
        WPE_CHECK(given.p, "q_rel needs a table p");
        const int64_t c = last_size(*given.p);
        WPE_CHECK(has_sizes(*given.q_rel, {q.size(0), q.size(1), q.size(2), c}), "q_rel must be (",
                  q.size(0), ", ", q.size(1), ", ", q.size(2), ", ", c, ") for p of size ", c,
                  ", got ", shape_of(*given.q_rel));
    }
}

void Call::check_bias() const {
    const int beyond = beyond_code(given.bias_beyond, "bias_beyond");
    if (!given.bias) return;
    const Tensor &x = *given.bias;
    check_cpu("bias", x);
    WPE_CHECK(x.scalar_type() == compute_type(), "bias must be ", name_of(compute_type()),
              " for q of ", name_of(given.q.scalar_type()), ", got ", name_of(x.scalar_type()));
    WPE_CHECK(x.dim() == 1 || (x.dim() == 2 && x.size(0) == heads), "bias must be (w) or (", heads,
              ", w), got ", shape_of(x));
    WPE_CHECK(beyond == WPE_ZERO || last_size(x) > 0,
              "bias_beyond='edge' needs a bias of at least one number");
}

void Call::check_sinks() const {
    if (!given.sinks) return;
    const Tensor &x = *given.sinks;
    check_cpu("sinks", x);
    WPE_CHECK(x.scalar_type() == compute_type() && has_sizes(x, {heads}), "sinks must be ",
              name_of(compute_type()), " (", heads, "), got ", name_of(x.scalar_type()), " ",
              shape_of(x));
}

// Check that no size of one head's memory overflows. Memory checks the products with a number of
// heads.
void Call::check_sizes() const {
    const int64_t longest = std::max(queries, keys),
                  largest = std::max({head_size, value_size, table_size});
    WPE_CHECK(longest < ADDRESS_SPACE && largest < LARGEST_HEAD &&
                  head_bytes(queries + keys) < ADDRESS_SPACE,
              current_operator, ": q, k or v is too large: ", shapes_of(given.q, given.k, given.v));
}

void Call::check_options() const {
    if (given.slopes) {
        check_cpu("slopes", *given.slopes);
        check_float("slopes", *given.slopes);
        WPE_CHECK(given.slopes->dim() == 1 && given.slopes->size(0) == heads, "slopes must be (",
                  heads, "), got ", shape_of(*given.slopes));
    }
    if (given.offset) {
        const Tensor &by_row = *given.offset;
        check_cpu("offset", by_row);
        check_integer("offset", by_row);
        WPE_CHECK(by_row.dim() == 0 ||
                      (by_row.dim() == 1 && (by_row.size(0) == batch || by_row.size(0) == 1)),
                  "offset must be an int, () or (", batch, "), got ", shape_of(by_row));
    }
    if (given.key_mask) {
        check_over_keys("key_mask", *given.key_mask, batch, keys);
        bool_data("key_mask", *given.key_mask);
    }
    if (given.segments) {
        check_over_keys("segments", *given.segments, batch, keys);
        check_integer("segments", *given.segments);
        WPE_CHECK(queries == keys, "segments need m = n, got ", queries, " queries and ", keys,
                  " keys");
    }
    if (given.mask) {
        const Tensor &m = *given.mask;
        check_cpu("mask", m);
        bool_data("mask", m);
        WPE_CHECK(m.dim() == 4 && (m.size(0) == batch || m.size(0) == 1) &&
                      (m.size(1) == heads || m.size(1) == 1) && m.size(2) == queries &&
                      m.size(3) == keys,
                  "mask must be (", batch, "|1, ", heads, "|1, ", queries, ", ", keys, "), got ",
                  shape_of(m), "; a mask of keys alone is key_mask (", batch, ", ", keys, ")");
    }
    WPE_CHECK(!given.window || *given.window >= 0, "window must not be negative, got ",
              given.window.value_or(0));
    WPE_CHECK(!given.scale || std::isfinite(*given.scale), "scale must be finite, got ",
              given.scale.value_or(0));
    // 1 / softcap must be a normal number, too, in float32 for all but float64. The bounds are
    // those of ops/_attention_checks.py.
    const double most = given.q.scalar_type() == ScalarType::Double ? 1e300 : 1e30;
    const double cap = given.softcap.value_or(1);
    WPE_CHECK(cap >= 1 / most && cap <= most, "softcap must lie in ", 1 / most, "..", most,
              ", got ", cap);
    WPE_CHECK(given.dropout_p >= 0 && given.dropout_p <= 1, "dropout_p must lie in 0..1, got ",
              given.dropout_p);
    if (given.dropout_p > 0) check_seed();
}

void Call::check_ragged() const {
    const bool fits = !given.offset && !given.key_mask && !given.segments && !given.mask;
    WPE_CHECK(
        fits && given.dropout_p == 0,
        "with cu_seqlens each request sees its own keys up to its last one: leave out offset, "
        "key_mask, segments, mask and dropout_p");
}

void Call::check_seed() const {
    WPE_CHECK(given.seed, "dropout needs a seed");
    check_cpu("seed", *given.seed);
    check_integer("seed", *given.seed);
    WPE_CHECK(given.seed->numel() == 1, "seed must hold one element, got ", shape_of(*given.seed));
}

void Call::read_offsets() {
    offset.assign(batch, keys - queries);
    if (!given.offset) return;
    const Tensor values = exact_double("offset", *given.offset);
    const double *data = values.const_data_ptr<double>();
    for (int64_t b = 0; b < batch; b++) offset[b] = (int64_t)data[values.numel() > 1 ? b : 0];
}

// Read one row of a key mask.
KeyMask read_keys(const uint8_t *seen, int64_t stride, int64_t keys) {
    KeyMask mask{nullptr, 0, 0, keys};
    const int64_t given = stride ? keys : std::min<int64_t>(keys, 1);  // stride 0: all are equal
    int64_t count = 0;
    for (int64_t j = 0; j < given; j++) count += seen[j * stride] != 0;
    if (given && !count) mask.first_key = keys;
    if (!stride || !count) return mask;
    while (!seen[mask.first_key * stride]) mask.first_key++;
    while (!seen[(mask.end_key - 1) * stride]) mask.end_key--;
    if (count == mask.end_key - mask.first_key) return mask;  // only the ends are hidden
    mask.data = seen;
    mask.stride = stride;
    return mask;
}

void Call::read_key_mask() {
    key_mask.assign(batch, KeyMask{nullptr, 0, 0, keys});
    if (!given.key_mask) return;
    const Tensor &m = *given.key_mask;
    const uint8_t *data = bool_data("key_mask", m);
    const int64_t stride = m.size(0) > 1 ? m.stride(0) : 0;
    for (int64_t b = 0; b < batch; b++)
        key_mask[b] = b && !stride ? key_mask[0] : read_keys(data + b * stride, m.stride(1), keys);
}

// Read the segments. If each segment is one run of keys, the kernels get ranges instead.
void Call::read_segments() {
    segments = dense(as_type(*given.segments, ScalarType::Long));
    const int64_t *id = segments.const_data_ptr<int64_t>();
    const int64_t rows = segments.size(0);
    run_begin.resize(rows * keys);
    run_end.resize(rows * keys);
    runs = true;
    for (int64_t b = 0; b < rows && runs; b++) {
        std::unordered_set<int64_t> met;
        for (int64_t j = 0, end; j < keys && runs; j = end) {
            const int64_t *row = id + b * keys;
            for (end = j; end < keys && row[end] == row[j]; end++) {
            }
            runs = met.insert(row[j]).second;
            std::fill(&run_begin[b * keys + j], &run_begin[b * keys + end - 1] + 1, j);
            std::fill(&run_end[b * keys + j], &run_end[b * keys + end - 1] + 1, end);
        }
    }
}

wpe_attention Call::head(int64_t b, int64_t h) const {
    wpe_attention a{};
    const int64_t kv = h / group;
    a.queries = queries;
    a.keys = keys;
    a.head_size = head_size;
    a.value_size = value_size;
    a.group = group;
    a.table_size = table_size;
    a.offset = offset[b];
    a.scale = given.scale ? *given.scale : 1 / std::sqrt((double)std::max<int64_t>(head_size, 1));
    a.slope = slope.empty() ? 0 : slope[h];
    a.softcap = given.softcap.value_or(0);
    a.sink = sink.empty() ? -INFINITY : sink[h];
    a.storage = storage;
    a.q = q.matrix(b, h);
    a.k = k.matrix(b, kv);
    a.v = v.matrix(b, kv);
    if (has_q_rel()) a.r = r.matrix(b, h);
    if (table.relative.rows)
        a.relative = tables.empty() ? &table.relative : &tables[tables.size() > 1 ? h : 0];
    a.bias = bias;
    if (bias.rows)
        a.bias.values = at(*given.bias, (bias_per_head() ? h * given.bias->stride(0) : 0) +
                                            first_value * bias.stride);
    a.causal = given.causal;
    a.window = std::min<int64_t>(given.window.value_or(INT64_MAX), int64_t{1} << 60);
    const KeyMask &seen = key_mask[b];
    a.first_key = seen.first_key;
    a.end_key = seen.end_key;
    a.key_mask = seen.data;
    a.key_mask_stride = seen.stride;
    if (given.segments) {
        const int64_t start = segments.size(0) > 1 ? b * keys : 0;
        if (!runs) a.segments = segments.const_data_ptr<int64_t>() + start;
        if (runs) a.run_begin = run_begin.data() + start;
        if (runs) a.run_end = run_end.data() + start;
    }
    if (given.mask) {
        const Tensor &m = *given.mask;
        a.mask = static_cast<const uint8_t *>(m.const_data_ptr()) +
                 (m.size(0) > 1 ? b * m.stride(0) : 0) + (m.size(1) > 1 ? h * m.stride(1) : 0);
        a.mask_row_stride = m.stride(2);
        a.mask_col_stride = m.stride(3);
    }
    if (given.dropout_p > 0) {
        a.seed = seed;
        a.drop_row = (uint64_t)((b * heads + h) * queries);
        a.drop_below = (uint64_t)std::floor(given.dropout_p * 0x1p32);
        a.keep_scale = given.dropout_p < 1 ? 1 / (1 - given.dropout_p) : 0;
    }
    return a;
}

void Call::pack_keys(int64_t b, int64_t kv, void *packed, wpe_pass pass) const {
    const wpe_attention a = head(b, kv * group);
    kernels->pack(&a, packed, pass, 0, keys);
}

void Call::pack_tile(int64_t b, int64_t kv, int64_t tile, void *packed, wpe_pass pass) const {
    const wpe_attention a = head(b, kv * group);
    const int64_t begin = tile * WPE_KEY_BLOCK;
    kernels->pack(&a, packed, pass, begin, std::min(begin + WPE_KEY_BLOCK, keys));
}

// ---- the arguments that only backward has -----------------------------------------------------

void Call::check_gradients(const Tensor &grad_out, const std::optional<Tensor> &grad_lse,
                           const Tensor &out, const Tensor &lse) const {
    for (const auto &[name, t] : {std::pair{"grad_out", &grad_out}, std::pair{"out", &out}}) {
        check_same_dtype(given.q, name, *t);
        WPE_CHECK(has_sizes(*t, {batch, heads, queries, value_size}), name, " must be (", batch,
                  ", ", heads, ", ", queries, ", ", value_size, "), got ", shape_of(*t));
    }
    for (const auto &[name, t] :
         {std::pair{"lse", &lse}, std::pair{"grad_lse", grad_lse ? &*grad_lse : &lse}}) {
        check_cpu(name, *t);
        WPE_CHECK(t->scalar_type() == compute_type() && has_sizes(*t, {batch, heads, queries}),
                  name, " must be ", name_of(compute_type()), " (", batch, ", ", heads, ", ",
                  queries, "), got ", name_of(t->scalar_type()), " ", shape_of(*t));
    }
}

}  // namespace wavepe
