// rope_table.cpp: torch.ops.wavepe.rope_table. METHODS 2 [R].
#include "../cuda/cuda.h"
#include "../cuda/launch.h"
#include "common.h"

namespace wavepe {
namespace {

// Pairs begin..end-1, which use the same coordinate of a position: all pairs, or one section.
struct Section {
    int64_t axis, begin, end;
};

std::vector<Section> read_sections(const std::optional<std::vector<int64_t>> &sections,
                                   const Tensor &positions, int64_t pairs) {
    if (!sections) return {{0, 0, pairs}};
    std::vector<Section> runs;
    int64_t begin = 0;
    for (int64_t size : *sections)
        WPE_CHECK(size >= 0, "sections must not be negative, got ", size);
    for (int64_t size : *sections) {
        WPE_CHECK(size <= pairs - begin, "sections sum to more than the ", pairs,
                  " pairs of inv_freq: ", size, " after ", begin);
        runs.push_back({(int64_t)runs.size(), begin, begin + size});
        begin += size;
    }
    WPE_CHECK(begin == pairs, "sections sum to ", begin, ", inv_freq has ", pairs, " pairs");
    WPE_CHECK(positions.dim() > 0 && last_size(positions) == (int64_t)runs.size(),
              "positions of shape ", shape_of(positions), " need a last axis of ", runs.size(),
              ", one coordinate per section");
    return runs;
}

// Positions are not checked, because that would wait for the GPU. Beyond 2^53 they are rounded.
void table_on_cuda(const Tensor &cos, const Tensor &sin, const Tensor &positions,
                   const Tensor &inv_freq, double factor, const std::vector<Section> &runs,
                   int64_t rows, int64_t axes, bool hf) {
    const Tensor m = dense(as_type(positions, ScalarType::Long));
    const Tensor f = dense(as_type(inv_freq, ScalarType::Double));
    for (const Section &run : runs) {
        wpe_cuda_rope_table a{};
        a.cos = cos.mutable_data_ptr();
        a.sin = sin.mutable_data_ptr();
        a.positions = m.const_data_ptr<int64_t>();
        a.inv_freq = f.const_data_ptr<double>();
        a.factor = factor;
        a.rows = rows;
        a.pairs = inv_freq.size(0);
        a.begin = run.begin;
        a.end = run.end;
        a.axes = axes;
        a.axis = run.axis;
        a.hf = hf;
        if (rows * (run.end - run.begin) == 0) continue;
        cuda::launch(std::string("rope_table") + suffix_of(cos.scalar_type()),
                     {rows * (run.end - run.begin)}, &a, positions.get_device_index());
    }
}

// Return the distinct values of inv_freq as double, and check that they are finite.
Tensor finite_double(const Tensor &inv_freq) {
    const Tensor wide = dense(as_type(distinct(inv_freq), ScalarType::Double));
    const double *value = wide.const_data_ptr<double>();
    for (int64_t i = 0; i < wide.numel(); i++)
        WPE_CHECK(std::isfinite(value[i]), "inv_freq must be finite, got ", value[i]);
    return wide;
}

std::tuple<Tensor, Tensor> rope_table(Tensor positions, Tensor inv_freq, double attention_factor,
                                      String precision,
                                      std::optional<std::vector<int64_t>> sections,
                                      std::optional<ScalarType> dtype) {
    check_integer("positions", positions);
    check_same_device("positions", positions, "inv_freq", inv_freq);
    check_float("inv_freq", inv_freq);
    WPE_CHECK(inv_freq.dim() == 1, "inv_freq must be 1-D (pairs,), got shape ", shape_of(inv_freq));
    WPE_CHECK(precision == "exact" || precision == "hf", "unknown precision '", precision,
              "'; known: exact, hf");
    const ScalarType type = dtype.value_or(ScalarType::Float);
    WPE_CHECK(is_float(type), "dtype must be float32, float64, bfloat16 or float16, got ",
              name_of(type));
    const int64_t pairs = inv_freq.size(0);
    const auto runs = read_sections(sections, positions, pairs);
    const int64_t axes = sections ? (int64_t)runs.size() : 1;

    WPE_CHECK(std::isfinite(attention_factor), "attention_factor must be finite, got ",
              attention_factor);
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < positions.dim() - (sections ? 1 : 0); i++)
        sizes.push_back(positions.size(i));
    const int64_t rows = Batch(positions, sections ? 1 : 0).count;
    sizes.push_back(pairs);
    // On the CPU, torch rounds a double result to 16 bits. On a GPU the kernel does it.
    const bool on_gpu = on_cuda(positions);
    const ScalarType computed = on_gpu || type == ScalarType::Float ? type : ScalarType::Double;
    Tensor cos = new_result(positions, sizes, computed),
           sin = new_result(positions, sizes, computed);
    if (on_gpu) {
        table_on_cuda(cos, sin, positions, inv_freq, attention_factor, runs, rows, axes,
                      precision == "hf");
        return {cos, sin};
    }
    Tensor m = exact_double("positions", positions);
    Tensor f = finite_double(inv_freq);
    if (cos.numel() == 0) return {as_type(cos, type), as_type(sin, type)};
    if (m.numel() != positions.numel()) m = dense(as_type(positions, ScalarType::Double));
    if (f.numel() != pairs) f = dense(as_type(inv_freq, ScalarType::Double));
    const double *position = m.const_data_ptr<double>(), *frequency = f.const_data_ptr<double>();
    auto kernel = wpe_current(dispatch)->rope_table[kernel_dtype(computed)];
    const bool exact = precision == "exact";
    torch::stable::parallel_for(0, rows, 1 + 4096 / (pairs + 1), [&](int64_t begin, int64_t end) {
        double angle[256];  // a std::vector may throw, and here an exception loses its text
        const double one = 1;
        for (int64_t r = begin; r < end; r++)
            for (const Section &run : runs) {
                const double *at_position = position + r * axes + run.axis;
                for (int64_t i = run.begin, n; i < run.end; i += n) {
                    n = exact ? run.end - i : std::min<int64_t>(run.end - i, 256);
                    // "hf": the float32 product, as in Hugging Face, and its exact cos and sin
                    for (int64_t k = 0; !exact && k < n; k++)
                        angle[k] = (float)*at_position * (float)frequency[i + k];
                    kernel(at_mutable(cos, r * pairs + i), at_mutable(sin, r * pairs + i),
                           exact ? at_position : &one, exact ? frequency + i : angle,
                           &attention_factor, n, 1, 1, 0, 1, 0);
                }
            }
    });
    return {as_type(cos, type), as_type(sin, type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "rope_table(Tensor positions, Tensor inv_freq, float attention_factor=1.0,"
        " str precision=\"exact\", SymInt[]? sections=None, ScalarType? dtype=None)"
        " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) { WPE_IMPL(m, rope_table); }
STABLE_TORCH_LIBRARY_IMPL(wavepe, CUDA, m) { WPE_IMPL(m, rope_table); }

}  // namespace wavepe
