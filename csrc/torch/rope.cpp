// rope.cpp: torch.ops.wavepe.rope, rope_, rope_qk. METHODS 2 [R].
#include "../cuda/cuda.h"
#include "../cuda/launch.h"
#include "common.h"

namespace wavepe {
namespace {

// A tensor with its sizes and strides. They are read once, because each read goes through torch's C
// interface.
struct View {
    Tensor tensor;
    int64_t dim;
    const int64_t *sizes, *strides;

    explicit View(const Tensor &x)
        : tensor(x), dim(x.dim()), sizes(x.sizes().data()), strides(x.strides().data()) {}

    // Return the size or stride of the dimension `back` places from the end: 1 is the last one.
    int64_t size(int64_t back) const { return back <= dim ? sizes[dim - back] : 1; }
    int64_t stride(int64_t back) const { return back <= dim ? strides[dim - back] : 0; }
};

// A table of cos or sin in the kernel's dtype, and its strides along batch, position and pair.
struct Table : View {
    int64_t batch, position, pair;

    Table(const Tensor &table, ScalarType x_type)
        : View(as_type(table,
                       x_type == ScalarType::Double ? ScalarType::Double : ScalarType::Float)),
          batch(size(3) > 1 ? stride(3) : 0),
          position(stride(2)),
          pair(stride(1)) {}
};

struct Angles {
    Table cos, sin;
    int64_t pairs;

    Angles(ScalarType x_type, const Tensor &cos_in, const Tensor &sin_in)
        : cos(cos_in, x_type), sin(sin_in, x_type), pairs(cos.size(1)) {}
};

void check_x(const char *name, const View &x) {
    check_float(name, x.tensor);
    WPE_CHECK(x.dim >= 2 && x.dim <= 4, name,
              " must be (L, d), (H, L, d) or (B, H, L, d), got shape ", shape_of(x.tensor));
}

void check_table(const char *name, const char *x_name, const View &x, const Tensor &tensor) {
    check_same_device(x_name, x.tensor, name, tensor);
    check_float(name, tensor);
    const View table(tensor);
    const int64_t d = x.size(1), length = x.size(2), batch = x.size(4), n = table.dim;
    WPE_CHECK((n == 2 || n == 3) && table.size(2) == length &&
                  (table.size(3) == 1 || table.size(3) == batch),
              name, " must be (L, h) or (1|B, L, h) with L = ", length, ", B = ", batch, "; got ",
              shape_of(tensor), " for ", x_name, " of shape ", shape_of(x.tensor));
    WPE_CHECK(table.size(1) <= d / 2, name, " holds ", table.size(1), " pairs, ", x_name,
              " has head size ", d, ": at most ", d / 2, " pairs fit");
}

void check_tables(const char *x_name, const View &x, const Tensor &cos, const Tensor &sin) {
    check_table("cos", x_name, x, cos);
    check_table("sin", x_name, x, sin);
    WPE_CHECK(last_size(cos) == last_size(sin), "cos and sin hold ", last_size(cos), " and ",
              last_size(sin), " pairs");
}

// Set `to` to the strides along batch, head, position and element. Dimensions of size 1, but for
// the last, get 0.
void strides_of(const View &x, int64_t (&to)[4]) {
    for (int64_t back = 4; back > 0; back--) to[4 - back] = x.size(back) > 1 ? x.stride(back) : 0;
    to[3] = x.stride(1);
}

bool aligned(const void *data, const int64_t *strides, int count, int64_t words) {
    bool whole = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int i = 0; i < count; i++) whole &= strides[i] % words == 0;
    return whole;
}

// Return whether all accesses can be made in words of 16 bytes (see wpe_cuda_rope).
bool is_wide(const wpe_cuda_rope &a, ScalarType type) {
    const int64_t item = item_size(type), elements = 16 / item;
    const int64_t table_elements = type == ScalarType::Double ? 2 : 4;
    bool wide = a.pairs % elements == 0 && a.head_size % elements == 0;
    for (const auto &tensor : a.tensors)
        wide &= !tensor.heads || (tensor.x_stride[3] == 1 && tensor.out_stride[3] == 1 &&
                                  aligned(tensor.x, tensor.x_stride, 3, elements) &&
                                  aligned(tensor.out, tensor.out_stride, 3, elements));
    return wide && a.cos_stride[2] == 1 && a.sin_stride[2] == 1 &&
           aligned(a.cos, a.cos_stride, 2, table_elements) &&
           aligned(a.sin, a.sin_stride, 2, table_elements);
}

wpe_cuda_rope_tensor for_cuda(const View &out, const View &x) {
    wpe_cuda_rope_tensor tensor{
        out.tensor.mutable_data_ptr(), x.tensor.const_data_ptr(), x.size(3), {}, {}};
    strides_of(out, tensor.out_stride);
    strides_of(x, tensor.x_stride);
    return tensor;
}

// Rotate x, or q and k, in one launch. The sizes are those of x (or q). k may differ from q only in
// the number of heads.
void rotate_on_cuda(const wpe_cuda_rope_tensor &x_or_q, const wpe_cuda_rope_tensor &k,
                    const View &x, const Angles &angles, bool interleaved, bool inverse) {
    const Table &cos = angles.cos, &sin = angles.sin;
    const bool many = x.size(2) > 1;
    const wpe_cuda_rope a = {
        .tensors = {x_or_q, k},
        .batch = x.size(4),
        .length = x.size(2),
        .head_size = x.size(1),
        .pairs = angles.pairs,
        .cos = cos.tensor.const_data_ptr(),
        .sin = sin.tensor.const_data_ptr(),
        .cos_stride = {cos.batch, many ? cos.position : 0, cos.pair},
        .sin_stride = {sin.batch, many ? sin.position : 0, sin.pair},
        .interleaved = interleaved,
        .inverse = inverse,
    };
    const ScalarType type = x.tensor.scalar_type();
    const bool wide = is_wide(a, type);
    const int64_t elements = wide ? 16 / item_size(type) : 1;
    const int64_t groups =
        ceil_div(x_or_q.heads, WPE_CUDA_HEADS) + ceil_div(k.heads, WPE_CUDA_HEADS);
    cuda::launch(std::string("rope") + suffix_of(type) + (wide ? "_wide" : ""),
                 {a.length * (a.head_size - a.pairs) / elements, groups, a.batch}, &a,
                 x.tensor.get_device_index());
}

// Rotate x into out. Positions are the outer loop and a group of heads the inner one, so a row of
// cos and sin is read from memory once for the group. If x is stored token by token, the group is
// all heads. Otherwise it is two heads: each head is a stream of memory of its own, and the
// processor fetches few streams ahead.
void rotate(const View &out, const View &x, const Angles &angles, bool interleaved, bool inverse,
            const wpe_kernels *kernels) {
    const int64_t d = x.size(1), length = x.size(2), heads = x.size(3), batch = x.size(4);
    if (!(batch && heads && length && d)) return;
    if (on_cuda(x.tensor))
        return rotate_on_cuda(for_cuda(out, x), {}, x, angles, interleaved, inverse);
    const bool by_token = std::abs(x.stride(3)) < std::abs(x.stride(2));
    const int64_t group = by_token ? heads : std::min<int64_t>(heads, 2);
    const int64_t groups = ceil_div(heads, group);
    const Table &cos = angles.cos, &sin = angles.sin;
    const wpe_rope_shape shape = {
        .outer = length,
        .inner = group,
        .head_size = d,
        .pairs = angles.pairs,
        .out_stride = {out.stride(2), out.stride(3), out.stride(1)},
        .x_stride = {x.stride(2), x.stride(3), x.stride(1)},
        .cos_stride = {cos.position, 0, cos.pair},
        .sin_stride = {sin.position, 0, sin.pair},
        .interleaved = interleaved,
        .inverse = inverse,
    };
    const ScalarType type = x.tensor.scalar_type();
    auto kernel = kernels->rope[kernel_dtype(type)];
    const int64_t item = item_size(type), real = type == ScalarType::Double ? 8 : 4;
    char *const to = static_cast<char *>(out.tensor.mutable_data_ptr());
    const char *const from = static_cast<const char *>(x.tensor.const_data_ptr());
    const char *const c = static_cast<const char *>(cos.tensor.const_data_ptr());
    const char *const s = static_cast<const char *>(sin.tensor.const_data_ptr());
    auto rows = [&](int64_t begin, int64_t end) {
        while (begin < end) {  // one call for each batch element and group of heads
            const int64_t i = begin % length, head = begin / length % groups * group;
            const int64_t b = begin / length / groups;
            wpe_rope_shape part = shape;
            part.outer = std::min(end - begin, length - i);
            part.inner = std::min(group, heads - head);
            kernel(to + (b * out.stride(4) + head * out.stride(3) + i * out.stride(2)) * item,
                   from + (b * x.stride(4) + head * x.stride(3) + i * x.stride(2)) * item,
                   c + (b * cos.batch + i * cos.position) * real,
                   s + (b * sin.batch + i * sin.position) * real, &part);
            begin += part.outer;
        }
    };
    const int64_t count = batch * groups * length;
    const int64_t grain = std::max<int64_t>(1, 32768 / (group * d));
    if (count <= grain)
        rows(0, count);
    else
        torch::stable::parallel_for(0, count, grain, rows);
}

Tensor rope(Tensor x_in, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
    const View x(x_in);
    check_x("x", x);
    check_tables("x", x, cos, sin);
    Tensor out = new_like(x_in);
    rotate(View(out), x, Angles(x_in.scalar_type(), cos, sin), interleaved, inverse,
           wpe_current(dispatch));
    return out;
}

void rope_(Tensor x_in, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
    const View x(x_in);
    check_x("x", x);
    check_tables("x", x, cos, sin);
    for (int64_t i = 0; i < x.dim; i++)
        WPE_CHECK(x.sizes[i] < 2 || x.strides[i] != 0,
                  "rope_ cannot write to an expanded x: dimension ", i, " of size ", x.sizes[i],
                  " has stride 0; use rope, or x.contiguous()");
    rotate(x, x, Angles(x_in.scalar_type(), cos, sin), interleaved, inverse, wpe_current(dispatch));
}

std::tuple<Tensor, Tensor> rope_qk(Tensor q_in, Tensor k_in, Tensor cos, Tensor sin,
                                   bool interleaved, bool inverse) {
    const View q(q_in), k(k_in);
    check_x("q", q);
    check_x("k", k);
    WPE_CHECK(q_in.scalar_type() == k_in.scalar_type(), "q and k must have one dtype, got ",
              name_of(q_in.scalar_type()), " and ", name_of(k_in.scalar_type()));
    check_tables("q", q, cos, sin);
    check_same_device("q", q_in, "k", k_in);
    const bool alike = k.size(1) == q.size(1) && k.size(2) == q.size(2) && k.size(4) == q.size(4);
    if (!alike) check_tables("k", k, cos, sin);
    Tensor q_out = new_like(q_in), k_out = new_like(k_in);
    const Angles angles(q_in.scalar_type(), cos, sin);
    if (on_cuda(q_in) && alike && q_in.numel() && k_in.numel()) {
        rotate_on_cuda(for_cuda(View(q_out), q), for_cuda(View(k_out), k), q, angles, interleaved,
                       inverse);
        return {q_out, k_out};
    }
    const wpe_kernels *kernels = wpe_current(dispatch);
    rotate(View(q_out), q, angles, interleaved, inverse, kernels);
    rotate(View(k_out), k, angles, interleaved, inverse, kernels);
    return {q_out, k_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, bool inverse=False)"
        " -> Tensor");
    m.def(
        "rope_(Tensor(a!) x, Tensor cos, Tensor sin, bool interleaved=False, bool inverse=False)"
        " -> ()");
    m.def(
        "rope_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False,"
        " bool inverse=False) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) {
    WPE_IMPL(m, rope);
    WPE_IMPL(m, rope_);
    WPE_IMPL(m, rope_qk);
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CUDA, m) {
    WPE_IMPL(m, rope);
    WPE_IMPL(m, rope_);
    WPE_IMPL(m, rope_qk);
}

}  // namespace wavepe
