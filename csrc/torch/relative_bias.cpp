// relative_bias.cpp: torch.ops.wavepe.relative_bias and the two linear maps of its gradient.
// METHODS 1 and 3 [W][S].
#include "../cuda/cuda.h"
#include "../cuda/launch.h"
#include "common.h"

namespace wavepe {
namespace {

void check_real(const char *name, const Tensor &x) {
    const ScalarType type = x.scalar_type();
    WPE_CHECK(type == ScalarType::Float || type == ScalarType::Double, name,
              " must be float32 or float64, got ", name_of(type));
}

void check_rows(const char *name, int64_t rows, int code) {
    WPE_CHECK(rows >= 0, name, " must not be negative, got ", rows);
    WPE_CHECK(rows > 0 || code == WPE_ZERO, "beyond='edge' needs a table of at least one row");
}

// Clamp a delta to +-2^62. No key has a larger delta, and sums with it do not overflow.
int64_t bounded(int64_t first_delta) {
    const int64_t limit = int64_t{1} << 62;
    return std::clamp(first_delta, -limit, limit);
}

std::vector<int64_t> with_last(const Tensor &x, int64_t last) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i + 1 < x.dim(); i++) sizes.push_back(x.size(i));
    sizes.push_back(last);
    return sizes;
}

// Packed tables, one for each head, each aligned to 64 bytes.
struct PackedTables {
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
    int64_t bytes_each;

    // Pack the rows `read` of each table.
    PackedTables(const Tensor &p, wpe_range read, const wpe_kernels *kernels, int dtype) {
        const int64_t n = p.dim(), rows = read.end - read.begin, d = p.size(n - 1),
                      tables = n > 2 ? p.size(0) : 1, item = item_size(p.scalar_type());
        const int64_t padding = 64;  // at least the rows that pad a panel; bytes of alignment
        WPE_CHECK(product({tables, rows + padding, d, item}) < ADDRESS_SPACE &&
                      product({tables, padding}) < ADDRESS_SPACE,
                  current_operator, ": p of shape ", shape_of(p), " is too large");
        bytes_each = kernels->packed_size[dtype](rows, d) * item;
        bytes_each = (bytes_each + padding - 1) / padding * padding;
        memory.reset(
            static_cast<char *>(std::aligned_alloc(padding, tables * bytes_each + padding)));
        WPE_CHECK(memory, current_operator, ": out of memory: ", tables * bytes_each,
                  " bytes for p of shape ", shape_of(p));
        for (int64_t h = 0; h < tables; h++)
            kernels->pack_table[dtype](
                memory.get() + h * bytes_each,
                at(p, (n > 2 ? h * p.stride(0) : 0) + read.begin * p.stride(n - 2)), rows, d,
                p.stride(n - 2), p.stride(n - 1));
    }
    const char *table(int64_t head) const { return memory.get() + head * bytes_each; }
};

// Run skew, or unskew if `transposed`, for each matrix of x, on the GPU.
Tensor skew_on_cuda(const Tensor &x, int64_t rows, int64_t keys, int64_t first_delta, int code,
                    bool transposed) {
    Tensor out = new_result(x, with_last(x, transposed ? rows : keys));
    if (out.numel() == 0) return out;
    const Tensor from = dense(x);
    const ScalarType type = x.scalar_type();
    const int device = x.get_device_index();
    wpe_cuda_skew a{};
    a.out = out.mutable_data_ptr();
    a.in = from.const_data_ptr();
    a.batch = Batch(x, 2).count;
    a.queries = x.size(x.dim() - 2);
    a.from = last_size(x);
    a.to = last_size(out);
    a.shift = keys - a.queries - bounded(first_delta);
    a.beyond = transposed ? WPE_ZERO : code;
    const int64_t elements = 16 / item_size(type);
    const bool wide = a.to % elements == 0;  // an allocation begins at a word
    const int64_t words = wide ? a.to / elements : a.to;
    while (int64_t{1} << a.lanes < std::min<int64_t>(words, WPE_CUDA_BLOCK)) a.lanes++;
    cuda::launch(std::string("skew") + suffix_of(type) + (wide ? "_wide" : ""),
                 {a.queries << a.lanes, a.batch}, &a, device);
    if (!transposed || code == WPE_ZERO) return out;
    Tensor parts = new_result(x, {a.batch, a.queries, WPE_CUDA_LANES, 2});
    a.parts = parts.mutable_data_ptr();
    cuda::launch(std::string("unskew_parts") + suffix_of(type),
                 {a.queries * WPE_CUDA_LANES, a.batch}, &a, device);
    cuda::launch(std::string("unskew_edges") + suffix_of(type), {a.queries, a.batch}, &a, device);
    return out;
}

Tensor relative_bias(Tensor q, Tensor p, int64_t keys, int64_t first_delta, String beyond) {
    check_real("q", q);
    check_real("p", p);
    check_same_device("q", q, "p", p);
    const int code = beyond_code(beyond);
    WPE_CHECK(q.scalar_type() == p.scalar_type(), "q and p must have one dtype, got ",
              name_of(q.scalar_type()), " and ", name_of(p.scalar_type()));
    WPE_CHECK(q.dim() >= 2 && (p.dim() == 2 || p.dim() == 3),
              "q (..., m, d) and p (w, d) or (H, w, d) needed, got ", shape_of(q), " and ",
              shape_of(p));
    WPE_CHECK(last_size(q) == last_size(p), "q has head size ", last_size(q), ", p has ",
              last_size(p));
    const int64_t heads = p.dim() == 3 ? p.size(0) : 1;
    const int64_t q_heads = q.dim() > 2 ? q.size(q.dim() - 3) : 1;
    WPE_CHECK(p.dim() == 2 || heads == q_heads, "p holds tables for ", heads, " heads, q has ",
              q_heads, " (q ", shape_of(q), ", p ", shape_of(p), ")");
    WPE_CHECK(keys >= 0, "keys must not be negative, got ", keys);
    check_rows("rows of p", p.size(p.dim() - 2), code);

    Tensor out = new_result(q, with_last(q, keys));
    if (out.numel() == 0) return out;
    const int64_t queries = q.size(q.dim() - 2), first_row_delta = bounded(first_delta);
    const wpe_range read =
        wpe_rows_read(p.size(p.dim() - 2), first_row_delta, code, 1 - queries, keys - 1);
    wpe_bias_shape shape{};
    shape.queries = queries;
    shape.keys = keys;
    shape.rows = read.end - read.begin;
    shape.head_size = last_size(q);
    shape.shift = keys - queries - (first_row_delta + read.begin);
    shape.out_row_stride = keys;
    shape.out_col_stride = 1;
    shape.q_row_stride = q.stride(q.dim() - 2);
    shape.q_col_stride = last_stride(q);
    shape.beyond = code;
    const wpe_kernels *kernels = wpe_current(dispatch);
    const int dtype = kernel_dtype(q.scalar_type());
    const PackedTables packed(p, read, kernels, dtype);
    const Batch batch(q, 2);
    const int64_t block = WPE_BIAS_BLOCK, blocks = ceil_div(queries, block);
    const int64_t grain = 1 + (1 << 20) / (block * (shape.rows * shape.head_size + keys));
    torch::stable::parallel_for(0, batch.count * blocks, grain, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / blocks, i = task % blocks * block;
            kernels->relative_bias[dtype](
                at_mutable(out, b * queries * keys), at(q, batch.offset(b)),
                packed.table(heads > 1 ? b % heads : 0), &shape, i, std::min(i + block, queries));
        }
    });
    return out;
}

// Run skew, or unskew if `transposed`, for each matrix of x.
Tensor run_skew(const Tensor &x, int64_t rows, int64_t keys, int64_t first_delta, int code,
                bool transposed) {
    if (on_cuda(x)) return skew_on_cuda(x, rows, keys, first_delta, code, transposed);
    Tensor out = new_result(x, with_last(x, transposed ? rows : keys));
    if (out.numel() == 0) return out;
    const int64_t queries = x.size(x.dim() - 2);
    WPE_CHECK(!transposed || x.numel() < ADDRESS_SPACE, current_operator, ": skewed of shape ",
              shape_of(x),
              " is too large");  // t may be small, so its allocation does not check it
    wpe_skew_shape shape{};
    shape.queries = queries;
    shape.keys = keys;
    shape.rows = rows;
    shape.shift = keys - queries - bounded(first_delta);
    shape.beyond = code;
    const int64_t row_stride = x.stride(x.dim() - 2), col_stride = last_stride(x);
    shape.skewed_row_stride = transposed ? row_stride : keys;
    shape.skewed_col_stride = transposed ? col_stride : 1;
    shape.t_row_stride = transposed ? rows : row_stride;
    shape.t_col_stride = transposed ? 1 : col_stride;
    const Batch batch(x, 2);
    const int64_t out_size = queries * last_size(out);
    const wpe_kernels *kernels = wpe_current(dispatch);
    const int dtype = kernel_dtype(x.scalar_type());
    const int64_t grain = 1 + 32768 / (queries * (transposed ? keys + rows : keys));
    torch::stable::parallel_for(0, batch.count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; b++) {
            char *to = at_mutable(out, b * out_size);
            const char *from = at(x, batch.offset(b));
            if (transposed)
                kernels->unskew[dtype](to, from, &shape);
            else
                kernels->skew[dtype](to, from, &shape);
        }
    });
    return out;
}

Tensor relative_bias_skew(Tensor t, int64_t keys, int64_t first_delta, String beyond) {
    check_real("t", t);
    WPE_CHECK(t.dim() >= 2, "t must be (..., m, w), got shape ", shape_of(t));
    WPE_CHECK(keys >= 0, "keys must not be negative, got ", keys);
    const int code = beyond_code(beyond);
    check_rows("rows of t", last_size(t), code);
    return run_skew(t, last_size(t), keys, first_delta, code, false);
}

Tensor relative_bias_unskew(Tensor skewed, int64_t rows, int64_t first_delta, String beyond) {
    check_real("skewed", skewed);
    WPE_CHECK(skewed.dim() >= 2, "skewed must be (..., m, n), got shape ", shape_of(skewed));
    const int code = beyond_code(beyond);
    check_rows("rows", rows, code);
    return run_skew(skewed, rows, last_size(skewed), first_delta, code, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "relative_bias(Tensor q, Tensor p, SymInt keys, SymInt first=0, str beyond=\"zero\")"
        " -> Tensor");
    m.def(
        "relative_bias_skew(Tensor t, SymInt keys, SymInt first=0, str beyond=\"zero\") -> Tensor");
    m.def(
        "relative_bias_unskew(Tensor skewed, SymInt rows, SymInt first=0, str beyond=\"zero\")"
        " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) {
    WPE_IMPL(m, relative_bias);
    WPE_IMPL(m, relative_bias_skew);
    WPE_IMPL(m, relative_bias_unskew);
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CUDA, m) {  // relative_bias itself: ops/_relative_bias.py
    WPE_IMPL(m, relative_bias_skew);
    WPE_IMPL(m, relative_bias_unskew);
}

}  // namespace wavepe
