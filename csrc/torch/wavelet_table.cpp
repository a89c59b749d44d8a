// wavelet_table.cpp: torch.ops.wavepe.wavelet_table. METHODS 1 [W].
#include "../cuda/cuda.h"
#include "../cuda/launch.h"
#include "common.h"

namespace wavepe {
namespace {

int kind_code(const std::string &kind) {
    std::string known;
    for (int i = 0; i < WPE_KINDS; i++) {
        if (kind == dispatch->kind_names[i]) return i;
        known += (i ? ", " : "") + std::string(dispatch->kind_names[i]);
    }
    WPE_CHECK(false, "unknown kind '", kind, "'; known: ", known);
    return 0;
}

// The arguments, checked and converted to the kernel's types.
struct Wavelets {
    Tensor offsets, scale, shift;
    int kind, sign;
    wpe_wavelet_shape shape;

    Wavelets(const Tensor &offsets_in, const Tensor &scale_in, const Tensor &shift_in,
             const std::string &kind_name, std::optional<bool> mirrored) {
        check_same_device("scale", scale_in, "offsets", offsets_in);
        check_same_device("scale", scale_in, "shift", shift_in);
        check_integer("offsets", offsets_in);
        check_float("scale", scale_in);
        check_float("shift", shift_in);
        WPE_CHECK(offsets_in.dim() == 1, "offsets must be 1-D, got shape ", shape_of(offsets_in));
        WPE_CHECK(
            scale_in.dim() == 1 && shift_in.dim() == 1 && scale_in.size(0) == shift_in.size(0),
            "scale and shift must be 1-D and of one size, got ", shape_of(scale_in), " and ",
            shape_of(shift_in));
        // Offsets on a GPU are not checked, because that would wait for the GPU.
        if (!on_cuda(offsets_in)) exact_double("offsets", offsets_in);
        kind = kind_code(kind_name);
        sign = mirrored.value_or(kind == WPE_HAAR) ? -1 : 1;
        offsets = as_type(offsets_in, ScalarType::Long);
        scale = as_type(scale_in, ScalarType::Double);
        shift = as_type(shift_in, ScalarType::Double);
        shape = {offsets.size(0),   scale.size(0),   scale.size(0),  1,
                 offsets.stride(0), scale.stride(0), shift.stride(0)};
    }
    wpe_cuda_wavelet for_cuda() const {
        wpe_cuda_wavelet a{};
        a.offsets = offsets.const_data_ptr<int64_t>();
        a.scale = scale.const_data_ptr<double>();
        a.shift = shift.const_data_ptr<double>();
        a.rows = shape.rows;
        a.cols = shape.cols;
        a.offsets_stride = shape.offsets_stride;
        a.scale_stride = shape.scale_stride;
        a.shift_stride = shape.shift_stride;
        a.kind = kind;
        a.sign = sign;
        return a;
    }
    const int64_t *offset(int64_t row) const {
        return reinterpret_cast<const int64_t *>(at(offsets, row * shape.offsets_stride));
    }
};

Tensor wavelet_table(Tensor offsets, Tensor scale, Tensor shift, String kind,
                     std::optional<bool> mirrored) {
    const Wavelets w(offsets, scale, shift, kind, mirrored);
    const ScalarType type = scale.scalar_type();
    if (on_cuda(scale)) {
        Tensor out = new_result(scale, {w.shape.rows, w.shape.cols});
        wpe_cuda_wavelet a = w.for_cuda();
        a.out = out.mutable_data_ptr();
        cuda::launch(std::string("wavelet_table") + suffix_of(type), {a.rows * a.cols}, &a,
                     scale.get_device_index());
        return out;
    }
    const ScalarType computed = type == ScalarType::BFloat16 ? ScalarType::Double : type;
    const int64_t rows = w.shape.rows, cols = w.shape.cols;
    Tensor out = new_result(scale, {rows, cols}, computed);
    auto kernel = wpe_current(dispatch)->wavelet_table[kernel_dtype(computed)];
    torch::stable::parallel_for(0, rows, 1 + 8192 / (cols + 1), [&](int64_t begin, int64_t end) {
        wpe_wavelet_shape part = w.shape;
        part.rows = end - begin;
        kernel(w.kind, w.sign, at_mutable(out, begin * cols), w.offset(begin),
               w.scale.const_data_ptr<double>(), w.shift.const_data_ptr<double>(), &part);
    });
    return as_type(out, type);
}

std::tuple<Tensor, Tensor> gradients_on_cuda(const Wavelets &w, const Tensor &grad,
                                             const Tensor &scale, const Tensor &shift) {
    const int64_t parts = ceil_div(w.shape.rows, WPE_CUDA_ROWS), cols = w.shape.cols;
    Tensor by_scale = new_result(grad, {std::max<int64_t>(parts, 1), cols});
    Tensor by_shift = new_result(grad, {std::max<int64_t>(parts, 1), cols});
    torch::stable::zero_(by_scale);
    torch::stable::zero_(by_shift);
    wpe_cuda_wavelet a = w.for_cuda();
    a.grad = grad.const_data_ptr<double>();
    a.grad_row_stride = grad.stride(0);
    a.grad_col_stride = grad.stride(1);
    a.grad_scale = by_scale.mutable_data_ptr<double>();
    a.grad_shift = by_shift.mutable_data_ptr<double>();
    const int device = scale.get_device_index();
    cuda::launch("wavelet_backward", {parts * cols}, &a, device);
    cuda::launch("wavelet_sum", {parts ? cols : 0}, &a, device);
    // a copy of row 0, because a view would keep the memory of all parts
    auto sum = [](const Tensor &parts, ScalarType type) {
        return as_type(torch::stable::clone(torch::stable::select(parts, 0, 0)), type);
    };
    return {sum(by_scale, scale.scalar_type()), sum(by_shift, shift.scalar_type())};
}

// Return the gradients, in the dtypes of scale and shift. This runs on one thread, as each column
// sums its rows in order.
std::tuple<Tensor, Tensor> wavelet_table_backward(Tensor grad, Tensor offsets, Tensor scale,
                                                  Tensor shift, String kind,
                                                  std::optional<bool> mirrored) {
    Wavelets w(offsets, scale, shift, kind, mirrored);
    check_same_device("scale", scale, "grad", grad);
    check_float("grad", grad);
    WPE_CHECK(grad.dim() == 2 && grad.size(0) == w.shape.rows && grad.size(1) == w.shape.cols,
              "grad must be (", w.shape.rows, ", ", w.shape.cols, "), got ", shape_of(grad));
    WPE_CHECK(grad.numel() < ADDRESS_SPACE, current_operator, ": grad of shape ", shape_of(grad),
              " is too large");
    Tensor g = as_type(grad, ScalarType::Double);
    if (on_cuda(scale)) return gradients_on_cuda(w, g, scale, shift);
    w.shape.out_row_stride = g.stride(0);
    w.shape.out_col_stride = g.stride(1);
    Tensor by_scale = new_result(scale, {w.shape.cols}, ScalarType::Double);
    Tensor by_shift = new_result(scale, {w.shape.cols}, ScalarType::Double);
    wpe_current(dispatch)->wavelet_backward(
        w.kind, w.sign, by_scale.mutable_data_ptr<double>(), by_shift.mutable_data_ptr<double>(),
        g.const_data_ptr<double>(), w.offset(0), w.scale.const_data_ptr<double>(),
        w.shift.const_data_ptr<double>(), &w.shape);
    return {as_type(by_scale, scale.scalar_type()), as_type(by_shift, shift.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "wavelet_table(Tensor offsets, Tensor scale, Tensor shift, str kind=\"ricker\","
        " bool? mirrored=None) -> Tensor");
    m.def(
        "wavelet_table_backward(Tensor grad, Tensor offsets, Tensor scale, Tensor shift, str kind,"
        " bool? mirrored) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) {
    WPE_IMPL(m, wavelet_table);
    WPE_IMPL(m, wavelet_table_backward);
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CUDA, m) {
    WPE_IMPL(m, wavelet_table);
    WPE_IMPL(m, wavelet_table_backward);
}

}  // namespace wavepe
