// common.h: checks, allocation and strides, which all torch bindings share.
//
// The bindings use LibTorch's stable ABI, so one binary works with every torch from 2.10 on. A
// binding checks all its arguments before it starts a parallel loop, because an exception that is
// thrown inside such a loop loses its text.
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

// A string argument of an operator. For std::string, torch::stable (2.13) leaks a copy in each
// call.
struct String : std::string {
    using std::string::string;
};

}  // namespace wavepe

template <>
struct torch::stable::detail::ToImpl<wavepe::String> {
    static wavepe::String call(StableIValue value, uint64_t, bool) {
        const StringHandle handle = to<StringHandle>(value);
        size_t length;
        const char *data;
        STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
        STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
        wavepe::String copy(data, length);
        STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
        return copy;
    }
};

namespace wavepe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const wpe_dispatch *dispatch = nullptr;  // module.cpp gets it from the NumPy module

template <typename... Args>
std::string text(const Args &...args) {
    std::ostringstream out;
    (out << ... << args);
    return out.str();
}

// The name of the operator that this thread runs, for messages.
inline thread_local const char *current_operator = "";

// Raise RuntimeError in Python if the condition is false. torch's own operators raise it, too, for
// wrong shapes and wrong dtypes.
#define WPE_CHECK(condition, ...) \
    if (!(condition)) throw std::runtime_error(wavepe::text("wavepe: ", __VA_ARGS__))

inline std::string shape_of(const int64_t *sizes, size_t dim) {
    std::string out = "(";
    for (size_t i = 0; i < dim; i++) out += (i ? ", " : "") + std::to_string(sizes[i]);
    return out + ")";
}
inline std::string shape_of(const Tensor &x) { return shape_of(x.sizes().data(), x.dim()); }
inline bool has_sizes(const Tensor &x, std::initializer_list<int64_t> sizes) {
    const auto found = x.sizes();
    return std::equal(sizes.begin(), sizes.end(), found.begin(), found.end());
}

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
        case ScalarType::Float8_e5m2:
            return "float8_e5m2";
        case ScalarType::Float8_e4m3fn:
            return "float8_e4m3fn";
        case ScalarType::Float8_e5m2fnuz:
            return "float8_e5m2fnuz";
        case ScalarType::Float8_e4m3fnuz:
            return "float8_e4m3fnuz";
        case ScalarType::Float8_e8m0fnu:
            return "float8_e8m0fnu";
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

// Return the wpe_dtype of a float dtype. It is the index into the arrays of wpe_kernels.
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

// Check that both tensors are on the CPU, or on the same GPU.
inline void check_same_device(const char *name, const Tensor &x, const char *other_name,
                              const Tensor &other) {
    WPE_CHECK((other.is_cpu() && x.is_cpu()) || (other.is_cuda() && x.is_cuda() &&
                                                 other.get_device_index() == x.get_device_index()),
              "all tensors must be on one device, got ", name, " on ", device_of(x), " and ",
              other_name, " on ", device_of(other));
}

// Return whether the kernels of csrc/cuda handle this tensor.
#ifdef WPE_EMULATE_CUDA
inline bool emulating = false;
inline bool on_cuda(const Tensor &x) {
    WPE_CHECK(!x.is_cuda(),
              "this build emulates CUDA with tensors on the CPU, and takes no CUDA tensors");
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

// An expanded tensor has strides of 0 and may have sizes up to 2^63. So products of sizes are
// checked for overflow, and a binding allocates its results before it reads the values of its
// arguments.

// No process has so many bytes of memory.
constexpr int64_t ADDRESS_SPACE = int64_t{1} << 48;

// Return the product of sizes, or INT64_MAX if it is larger.
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

// Return make(), which allocates a tensor. The stable ABI drops the text of torch's own error, so
// this function raises one with the shape.
template <typename Make>
Tensor allocate(const int64_t *sizes, size_t dim, ScalarType type, const Make &make) {
    try {
        return make();
    } catch (const std::exception &) {
        throw std::runtime_error(text("wavepe: ", current_operator,
                                      ": out of memory: a tensor of shape ", shape_of(sizes, dim),
                                      ", ", name_of(type)));
    }
}

// Return an uninitialised tensor of a float dtype on the device of `like`. This calls the allocator
// directly. torch::stable::new_empty takes a microsecond more, which matters for calls with one
// token.
inline Tensor new_strided(const Tensor &like, int64_t dim, const int64_t *sizes,
                          const int64_t *strides, ScalarType type) {
    int32_t (*const dtypes[WPE_DTYPES])() = {aoti_torch_dtype_float16, aoti_torch_dtype_bfloat16,
                                             aoti_torch_dtype_float32, aoti_torch_dtype_float64};
    int32_t device = aoti_torch_device_type_cpu(), index = 0;
    if (!like.is_cpu()) {
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
    }
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        dim, sizes, strides, dtypes[kernel_dtype(type)](), device, index, &handle));
    return Tensor(handle);
}

// Return torch.empty(sizes) of a float dtype on the device of `like`.
inline Tensor new_result(const Tensor &like, const std::vector<int64_t> &sizes, ScalarType type) {
    return allocate(sizes.data(), sizes.size(), type, [&] {
        std::vector<int64_t> strides(sizes.size());
        int64_t next = 1;
        for (size_t i = sizes.size(); i-- > 0;) {
            strides[i] = next;
            if (__builtin_mul_overflow(next, std::max<int64_t>(sizes[i], 1), &next))
                return torch::stable::new_empty(like, sizes, type);  // which refuses the sizes
        }
        return new_strided(like, (int64_t)sizes.size(), sizes.data(), strides.data(), type);
    });
}
inline Tensor new_result(const Tensor &like, const std::vector<int64_t> &sizes) {
    return new_result(like, sizes, like.scalar_type());
}

inline Tensor as_type(const Tensor &x, ScalarType type) {
    if (x.scalar_type() == type) return x;
    return allocate(x.sizes().data(), x.dim(), type, [&] { return torch::stable::to(x, type); });
}

inline Tensor dense(const Tensor &x) {
    if (x.is_contiguous()) return x;
    return allocate(x.sizes().data(), x.dim(), x.scalar_type(),
                    [&] { return torch::stable::contiguous(x); });
}

// Return x without the dimensions of stride 0, along which values only repeat.
inline Tensor distinct(Tensor x) {
    for (int64_t i = x.dim(); i-- > 0;)
        if (x.size(i) > 1 && x.stride(i) == 0) x = torch::stable::select(x, i, 0);
    return x;
}

// Return the distinct values of an integer tensor as double, and check that they lie within +-2^53.
// Double holds these exactly. But 2^53 + 1 becomes 2^53, so values of 2^53 are compared as
// integers.
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

// Return torch.empty_like(x). If x fills its memory without holes and overlaps, in any order of its
// dimensions, the result has its strides.
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
        return new_strided(x, (int64_t)sizes.size(), sizes.data(), strides.data(), x.scalar_type());
    });
}

// Return the end of a CUDA kernel's name: its dtype.
inline const char *suffix_of(ScalarType type) {
    static const char *const names[WPE_DTYPES] = {"_f16", "_bf16", "_f32", "_f64"};
    return names[kernel_dtype(type)];
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t last_size(const Tensor &x) { return x.size(x.dim() - 1); }
inline int64_t last_stride(const Tensor &x) { return x.stride(x.dim() - 1); }

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

// The batch dimensions of a tensor: all but the last `core` ones. `count` is the product of their
// sizes, and offset(b) the place of batch element b, in elements.
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

// Call an operator after a check that torch does not make: None for a Tensor arrives as an
// undefined tensor.
template <auto function>
struct Checked;
template <typename Result, typename... Args, Result (*function)(Args...)>
struct Checked<function> {
    template <typename T>
    static void check(int, const T &) {}
    static void check(int place, const Tensor &x) {
        WPE_CHECK(x.defined(), current_operator, ": argument ", place,
                  " must be a Tensor, got None");
    }
    static Result call(Args... args) {
        int place = 0;
        (check(++place, args), ...);
        return function(std::move(args)...);
    }
};

#define WPE_IMPL(library, name)                                                      \
    library.impl(#name, [](StableIValue *stack, uint64_t inputs, uint64_t outputs) { \
        wavepe::current_operator = #name;                                            \
        TORCH_BOX((&wavepe::Checked<&name>::call))(stack, inputs, outputs);          \
    })

}  // namespace wavepe
