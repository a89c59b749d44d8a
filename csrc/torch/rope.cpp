// rope.cpp: torch.ops.wavepe.rope, rope_, rope_qk. METHODS 2 [R].
#include "common.h"

namespace wavepe {
namespace {

// cos and sin in the kernel's dtype, with strides for x's (batch, position).
struct Angles {
    Tensor cos, sin;
    int64_t cos_strides[3], sin_strides[3];  // batch, position, pair

    Angles(const Tensor &x, const Tensor &cos_in, const Tensor &sin_in) {
        bool wide = x.scalar_type() == ScalarType::Double;
        cos = as_type(cos_in, wide ? ScalarType::Double : ScalarType::Float);
        sin = as_type(sin_in, wide ? ScalarType::Double : ScalarType::Float);
        fill(cos, cos_strides);
        fill(sin, sin_strides);
    }
    static void fill(const Tensor &table, int64_t strides[3]) {
        int64_t n = table.dim();
        strides[0] = n == 3 && table.size(0) > 1 ? table.stride(0) : 0;
        strides[1] = table.stride(n - 2);
        strides[2] = table.stride(n - 1);
    }
};

void check_table(const char *name, const Tensor &x, const Tensor &table) {
    check_float(name, table);
    int64_t n = table.dim(), d = last_size(x), length = x.size(x.dim() - 2);
    int64_t batch = x.dim() == 4 ? x.size(0) : 1;
    WPE_CHECK((n == 2 || n == 3) && table.size(n - 2) == length &&
                  (n == 2 || table.size(0) == 1 || table.size(0) == batch),
              name, " must be (L, h) or (1|B, L, h) with L = ", length, ", B = ", batch, "; got ",
              shape_of(table), " for x of shape ", shape_of(x));
    WPE_CHECK(2 * last_size(table) <= d, name, " holds ", last_size(table),
              " pairs, x has head size ", d, ": at most ", d / 2, " pairs fit");
}

void check(const char *name, const Tensor &x, const Tensor &cos, const Tensor &sin) {
    check_float(name, x);
    WPE_CHECK(x.dim() >= 2 && x.dim() <= 4, name,
              " must be (L, d), (H, L, d) or (B, H, L, d), got shape ", shape_of(x));
    check_table("cos", x, cos);
    check_table("sin", x, sin);
    WPE_CHECK(last_size(cos) == last_size(sin), "cos and sin hold ", last_size(cos), " and ",
              last_size(sin), " pairs");
}

// Walks memory in order: positions outside and heads inside where x is stored token by token (a
// row of cos and sin then serves all heads from the first-level cache), else the other way round.
void rotate(const Tensor &out, const Tensor &x, const Angles &angles, bool interleaved,
            bool inverse) {
    int64_t n = x.dim(), d = x.size(n - 1), length = x.size(n - 2);
    int64_t heads = n > 2 ? x.size(n - 3) : 1, batch = n > 3 ? x.size(0) : 1;
    if (!(batch && heads && length && d)) return;
    auto stride = [](const Tensor &t, int64_t back) {
        return t.dim() >= back ? t.stride(t.dim() - back) : 0;
    };
    bool by_token = heads > 1 && std::abs(stride(x, 3)) < std::abs(stride(x, 2));
    const int64_t outer = by_token ? length : heads, inner = by_token ? heads : length;
    const int64_t back_outer = by_token ? 2 : 3, back_inner = by_token ? 3 : 2;
    const int64_t *cs = angles.cos_strides, *sn = angles.sin_strides;
    wpe_rope_shape shape{};
    shape.inner = inner;
    shape.head_size = d;
    shape.pairs = last_size(angles.cos);
    shape.interleaved = interleaved;
    shape.inverse = inverse;
    int64_t *three[4] = {shape.out, shape.x, shape.cos, shape.sin};
    const int64_t values[4][3] = {
        {stride(out, back_outer), stride(out, back_inner), stride(out, 1)},
        {stride(x, back_outer), stride(x, back_inner), stride(x, 1)},
        {by_token ? cs[1] : 0, by_token ? 0 : cs[1], cs[2]},
        {by_token ? sn[1] : 0, by_token ? 0 : sn[1], sn[2]}};
    for (int i = 0; i < 4; i++) std::copy(values[i], values[i] + 3, three[i]);

    auto kernel = dispatch->current->rope[kernel_dtype(x.scalar_type())];
    const int64_t grain = std::max<int64_t>(1, 32768 / (inner * d));
    torch::stable::parallel_for(0, batch * outer, grain, [&](int64_t begin, int64_t end) {
        while (begin < end) {  // one call per batch row
            int64_t b = begin / outer, i = begin % outer;
            wpe_rope_shape part = shape;
            part.outer = std::min(end - begin, outer - i);
            kernel(at_mutable(out, b * stride(out, 4) + i * shape.out[0]),
                   at(x, b * stride(x, 4) + i * shape.x[0]),
                   at(angles.cos, b * cs[0] + i * shape.cos[0]),
                   at(angles.sin, b * sn[0] + i * shape.sin[0]), &part);
            begin += part.outer;
        }
    });
}

Tensor rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
    check("x", x, cos, sin);
    Tensor out = torch::stable::empty_like(x);
    rotate(out, x, Angles(x, cos, sin), interleaved, inverse);
    return out;
}

void rope_(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
    check("x", x, cos, sin);
    for (int64_t i = 0; i < x.dim(); i++)
        WPE_CHECK(x.size(i) < 2 || x.stride(i) != 0,
                  "rope_ cannot write to an expanded x: dimension ", i, " of size ", x.size(i),
                  " has stride 0; use rope, or x.contiguous()");
    rotate(x, x, Angles(x, cos, sin), interleaved, inverse);
}

std::tuple<Tensor, Tensor> rope_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved,
                                   bool inverse) {
    check("q", q, cos, sin);
    check("k", k, cos, sin);
    WPE_CHECK(q.scalar_type() == k.scalar_type(), "q and k must have one dtype, got ",
              name_of(q.scalar_type()), " and ", name_of(k.scalar_type()));
    Angles angles(q, cos, sin);
    Tensor q_out = torch::stable::empty_like(q), k_out = torch::stable::empty_like(k);
    rotate(q_out, q, angles, interleaved, inverse);
    rotate(k_out, k, angles, interleaved, inverse);
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
    m.impl("rope", TORCH_BOX(&rope));
    m.impl("rope_", TORCH_BOX(&rope_));
    m.impl("rope_qk", TORCH_BOX(&rope_qk));
}

}  // namespace wavepe
