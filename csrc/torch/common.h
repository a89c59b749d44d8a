// common.h: checks and strides shared by the torch bindings.
//
// Built on LibTorch's stable ABI: one binary serves every torch from 2.10 on. A binding checks all
// its arguments before it starts a parallel loop (an exception thrown inside loses its text).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "wavepe.h"

namespace wavepe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const wpe_dispatch *dispatch = nullptr;  // the NumPy module's, set when this one is imported

template <typename... Args>
std::string text(const Args &...args) {
    std::ostringstream out;
    (out << ... << args);
    return out.str();
}

// The operator that this thread runs, for messages.
inline thread_local const char *running = "";

// RuntimeError in Python, as torch's own operators raise for shapes and dtypes alike.
#define WPE_CHECK(condition, ...) \
    if (!(condition)) throw std::runtime_error(wavepe::text("wavepe: ", __VA_ARGS__))

inline std::string shape_of(const int64_t *sizes, size_t dim) {
    std::string out = "(";
    for (size_t i = 0; i < dim; i++) out += (i ? ", " : "") + std::to_string(sizes[i]);
    return out + ")";
}
inline std::string shape_of(const Tensor &x) { return shape_of(x.sizes().data(), x.dim()); }

inline const char *name_of(ScalarType type) {
    switch (type) {
        case ScalarType::Half:
            return "float16";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Byte:
            return "uint8";
        case ScalarType::Char:
            return "int8";
        case ScalarType::Short:
            return "int16";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        case ScalarType::UInt16:
            return "uint16";
        case ScalarType::UInt32:
            return "uint32";
        case ScalarType::UInt64:
            return "uint64";
        case ScalarType::Bool:
            return "bool";
        case ScalarType::ComplexHalf:
            return "complex32";
        case ScalarType::ComplexFloat:
            return "complex64";
        case ScalarType::ComplexDouble:
            return "complex128";
        default:
            return "another dtype";
    }
}

inline bool is_float(ScalarType type) {
    return type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float ||
           type == ScalarType::Double;
}

inline bool is_integer(ScalarType type) {
    switch (type) {
        case ScalarType::Byte:
        case ScalarType::Char:
        case ScalarType::Short:
        case ScalarType::Int:
        case ScalarType::Long:
        case ScalarType::UInt16:
        case ScalarType::UInt32:
        case ScalarType::UInt64:
            return true;
        default:
            return false;
    }
}

// The kernel table's index of a float dtype.
inline int kernel_dtype(ScalarType type) {
    switch (type) {
        case ScalarType::Half:
            return WPE_F16;
        case ScalarType::BFloat16:
            return WPE_BF16;
        case ScalarType::Float:
            return WPE_F32;
        default:
            return WPE_F64;
    }
}

inline int64_t item_size(ScalarType type) {
    return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

inline std::string device_of(const Tensor &x) {
    return x.is_cuda()  ? "cuda:" + std::to_string(x.get_device_index())
           : x.is_cpu() ? "the CPU"
                        : "another device";
}

inline void check_cpu(const char *name, const Tensor &x) {
    WPE_CHECK(x.is_cpu(), name, " must be on the CPU like the other arguments, got ", device_of(x));
}

// A call's tensors lie together: on the CPU or on one GPU.
inline void check_together(const char *first_name, const Tensor &first, const char *name,
                           const Tensor &x) {
    WPE_CHECK((x.is_cpu() && first.is_cpu()) || (x.is_cuda() && first.is_cuda() &&
                                                 x.get_device_index() == first.get_device_index()),
              "all tensors must be on one device, got ", first_name, " on ", device_of(first),
              " and ", name, " on ", device_of(x));
}

// Whether the kernels of csrc/cuda do the work.
#ifdef WPE_EMULATE_CUDA
inline bool emulating = false;
inline bool on_cuda(const Tensor &x) {
    WPE_CHECK(!x.is_cuda(), "this build emulates CUDA, for tensors on the CPU");
    return emulating;
}
#else
inline bool on_cuda(const Tensor &x) { return x.is_cuda(); }
#endif

inline void check_float(const char *name, const Tensor &x) {
    WPE_CHECK(is_float(x.scalar_type()), name,
              " must be float32, float64, bfloat16 or float16, got ", name_of(x.scalar_type()));
}

inline void check_integer(const char *name, const Tensor &x) {
    WPE_CHECK(is_integer(x.scalar_type()), name, " must hold integers, got ",
              name_of(x.scalar_type()));
}

// Expanded tensors have strides of 0, and sizes up to 2^63: a binding allocates its results before
// it reads what else is given, and no product of sizes may wrap.

// No process has so many bytes of memory.
constexpr int64_t ADDRESS_SPACE = int64_t{1} << 48;

// The product of sizes, or the largest number where it does not fit.
template <typename Sizes>
int64_t product_of(const Sizes &sizes) {
    int64_t result = 1;
    for (int64_t size : sizes)
        if (size == 0) return 0;
    for (int64_t size : sizes)
        if (__builtin_mul_overflow(result, size, &result)) return INT64_MAX;
    return result;
}
inline int64_t product(std::initializer_list<int64_t> sizes) { return product_of(sizes); }

// Return make(), which allocates a tensor. Of torch's own errors its stable ABI keeps the place
// alone.
template <typename Make>
Tensor allocate(const int64_t *sizes, size_t dim, ScalarType type, const Make &make) {
    try {
        return make();
    } catch (const std::exception &) {
        throw std::runtime_error(text("wavepe: ", running, ": out of memory: a tensor of shape ",
                                      shape_of(sizes, dim), ", ", name_of(type)));
    }
}

inline Tensor new_result(const Tensor &like, const std::vector<int64_t> &sizes, ScalarType type) {
    return allocate(sizes.data(), sizes.size(), type,
                    [&] { return torch::stable::new_empty(like, sizes, type); });
}
inline Tensor new_result(const Tensor &like, const std::vector<int64_t> &sizes) {
    return new_result(like, sizes, like.scalar_type());
}

inline Tensor as_type(const Tensor &x, ScalarType type) {
    if (x.scalar_type() == type) return x;
    return allocate(x.sizes().data(), x.dim(), type, [&] { return torch::stable::to(x, type); });
}

inline Tensor dense(const Tensor &x) {
    return allocate(x.sizes().data(), x.dim(), x.scalar_type(),
                    [&] { return torch::stable::contiguous(x); });
}

// x without the repeats along dimensions of stride 0: all values that it holds.
inline Tensor distinct(Tensor x) {
    for (int64_t i = x.dim(); i-- > 0;)
        if (x.size(i) > 1 && x.stride(i) == 0) x = torch::stable::select(x, i, 0);
    return x;
}

// The distinct values of a tensor of integers as double, which holds them exactly within +-2^53;
// 2^53 + 1 has become 2^53 already.
inline Tensor exact_double(const char *name, const Tensor &given) {
    const Tensor x = distinct(given);
    const Tensor wide = dense(as_type(x, ScalarType::Double));
    const double *value = wide.const_data_ptr<double>();
    const int64_t count = wide.numel();
    bool at_the_edge = false;
    for (int64_t i = 0; i < count; i++) {
        WPE_CHECK(std::abs(value[i]) <= 0x1p53, name, " must lie within +-2^53, got about ",
                  value[i]);
        at_the_edge |= std::abs(value[i]) == 0x1p53;
    }
    if (!at_the_edge) return wide;
    const Tensor integers = dense(as_type(x, ScalarType::Long));
    const int64_t *integer = integers.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < count; i++)
        WPE_CHECK(integer[i] == (int64_t)value[i], name, " must lie within +-2^53, got ",
                  integer[i]);
    return wide;
}

// As torch.empty_like. Where x fills its memory without holes or overlaps, in whatever order of its
// dimensions, it goes straight to the allocator: half a microsecond instead of one and a half,
// which is what counts for one token.
inline Tensor new_like(const Tensor &x) {
    const auto sizes = x.sizes(), strides = x.strides();
    int64_t filled = 1;
    for (size_t found = 0; found < sizes.size(); found++)
        for (size_t i = 0; i < sizes.size(); i++)
            if (sizes[i] != 1 && strides[i] == filled) {
                filled *= sizes[i];
                break;
            }
    return allocate(sizes.data(), sizes.size(), x.scalar_type(), [&] {
        if (filled != x.numel()) return torch::stable::empty_like(x);
        int32_t dtype, device = aoti_torch_device_type_cpu(), index = 0;
        AtenTensorHandle handle;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
        if (!x.is_cpu()) {
            STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device));
            STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
        }
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
            (int64_t)sizes.size(), sizes.data(), strides.data(), dtype, device, index, &handle));
        return Tensor(handle);
    });
}

// The kernels' names end with the dtype.
inline const char *suffix_of(ScalarType type) {
    static const char *const names[WPE_DTYPES] = {"_f16", "_bf16", "_f32", "_f64"};
    return names[kernel_dtype(type)];
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t last_size(const Tensor &x) { return x.size(x.dim() - 1); }
inline int64_t last_stride(const Tensor &x) { return x.stride(x.dim() - 1); }

// The rows of a table, the first of them that of delta = first, which the deltas nearest..farthest
// read. With beyond="edge" it holds rows, and one at least is read.
inline wpe_range reached_rows(int64_t rows, int64_t first, int64_t nearest, int64_t farthest,
                              int beyond) {
    wpe_range read = {std::clamp<int64_t>(nearest - first, 0, rows),
                      std::clamp<int64_t>(farthest + 1 - first, 0, rows)};
    if (beyond == WPE_EDGE) {  // the nearest row of what is out of reach stays
        read.begin = std::min(read.begin, rows - 1);
        read.end = std::max(read.end, read.begin + 1);
    }
    return read;
}

inline int beyond_code(const std::string &beyond, const char *name = "beyond") {
    WPE_CHECK(beyond == "zero" || beyond == "edge", "unknown ", name, " '", beyond,
              "'; known: zero, edge");
    return beyond == "edge" ? WPE_EDGE : WPE_ZERO;
}

inline const char *at(const Tensor &x, int64_t elements) {
    return static_cast<const char *>(x.const_data_ptr()) + elements * (int64_t)x.element_size();
}
inline char *at_mutable(const Tensor &x, int64_t elements) {
    return static_cast<char *>(x.mutable_data_ptr()) + elements * (int64_t)x.element_size();
}

// Sizes and strides of all but the last `core` dimensions; offset(b) of the b-th of their product.
struct Batch {
    std::vector<int64_t> sizes, strides;
    int64_t count;

    Batch(const Tensor &x, int64_t core) {
        for (int64_t i = 0; i < x.dim() - core; i++) {
            sizes.push_back(x.size(i));
            strides.push_back(x.stride(i));
        }
        count = product_of(sizes);
    }
    int64_t offset(int64_t b) const {
        int64_t sum = 0;
        for (size_t i = sizes.size(); i-- > 0; b /= sizes[i]) sum += b % sizes[i] * strides[i];
        return sum;
    }
};

// An operator, after a check that torch does not make: None for a Tensor arrives as an undefined
// one.
template <auto function>
struct Checked;
template <typename Result, typename... Args, Result (*function)(Args...)>
struct Checked<function> {
    static void check(int, ...) {}
    static void check(int place, const Tensor &x) {
        WPE_CHECK(x.defined(), running, ": argument ", place, " must be a Tensor, got None");
    }
    static Result call(Args... args) {
        int place = 0;
        (check(++place, args), ...);
        return function(args...);
    }
};

#define WPE_IMPL(library, name)                                                      \
    library.impl(#name, [](StableIValue *stack, uint64_t inputs, uint64_t outputs) { \
        wavepe::running = #name;                                                     \
        TORCH_BOX((&wavepe::Checked<&name>::call))(stack, inputs, outputs);          \
    })

}  // namespace wavepe
