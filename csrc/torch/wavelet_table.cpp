// wavelet_table.cpp: torch.ops.wavepe.wavelet_table. METHODS 1 [W].
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

Tensor wavelet_table(Tensor offsets, Tensor scale, Tensor shift, std::string kind,
                     std::optional<bool> mirrored) {
    check_integer("offsets", offsets);
    check_float("scale", scale);
    check_float("shift", shift);
    WPE_CHECK(offsets.dim() == 1, "offsets must be 1-D, got shape ", shape_of(offsets));
    WPE_CHECK(scale.dim() == 1 && shift.dim() == 1 && scale.size(0) == shift.size(0),
              "scale and shift must be 1-D and of one size, got ", shape_of(scale), " and ",
              shape_of(shift));
    const int code = kind_code(kind);
    const int sign = mirrored.value_or(code == WPE_HAAR) ? -1 : 1;
    const ScalarType type = scale.scalar_type();
    const ScalarType made = type == ScalarType::BFloat16 ? ScalarType::Double : type;

    Tensor t = as_type(offsets, ScalarType::Long);
    Tensor a = as_type(scale, ScalarType::Double), b = as_type(shift, ScalarType::Double);
    const int64_t rows = offsets.size(0), cols = scale.size(0);
    Tensor out = torch::stable::new_empty(scale, {rows, cols}, made);
    wpe_wavelet_shape shape{rows, cols, cols, 1, t.stride(0), a.stride(0), b.stride(0)};
    auto kernel = dispatch->current->wavelet_table[kernel_dtype(made)];
    torch::stable::parallel_for(0, rows, 1 + 8192 / (cols + 1), [&](int64_t begin, int64_t end) {
        wpe_wavelet_shape part = shape;
        part.rows = end - begin;
        kernel(code, sign, at_mutable(out, begin * cols),
               reinterpret_cast<const int64_t *>(at(t, begin * shape.offsets)),
               a.const_data_ptr<double>(), b.const_data_ptr<double>(), &part);
    });
    return as_type(out, type);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "wavelet_table(Tensor offsets, Tensor scale, Tensor shift, str kind=\"ricker\","
        " bool? mirrored=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) { m.impl("wavelet_table", TORCH_BOX(&wavelet_table)); }

}  // namespace wavepe
