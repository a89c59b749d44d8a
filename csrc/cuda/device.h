/* device.h: the types, conversions, indices and 16-byte accesses that the CUDA kernels use. */
#ifndef WAVEPE_CUDA_DEVICE_H
#define WAVEPE_CUDA_DEVICE_H

#include <math.h>
#include <string.h>

#include "../wavepe.h"
#include "cuda.h"

#ifdef WPE_EMULATE_CUDA /* the same sources under a C++ compiler, see emulation.h */
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define KERNEL(name, Params)                                     \
    extern "C" __global__ void __launch_bounds__(WPE_CUDA_BLOCK) \
        name(const __grid_constant__ Params a)
typedef __nv_bfloat16 bf16;
typedef __half f16;
/* Written in assembly, because nvcc turns some copies of a 16-byte struct into four accesses of 4
 * bytes. The load is neither volatile nor a barrier, so nvcc may move it across stores. That is
 * safe for in-place calls, too: each store depends on the loads of the elements that it overwrites
 * (rope.cu). */
typedef uint4 Word16;
DEVICE Word16 load_word(const Word16 *from) {
    Word16 w;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
        : "l"(__cvta_generic_to_global(from)));
    return w;
}
DEVICE void store_word(Word16 *to, Word16 w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}
DEVICE float widened(bf16 x) { return __bfloat162float(x); }
DEVICE float widened(f16 x) { return __half2float(x); }
DEVICE void narrow(float x, bf16 *to) { *to = __float2bfloat16_rn(x); }
DEVICE void narrow(float x, f16 *to) { *to = __float2half_rn(x); }
#endif

DEVICE float widened(float x) { return x; }
DEVICE double widened(double x) { return x; }
DEVICE void narrow(float x, float *to) { *to = x; }
DEVICE void narrow(double x, double *to) { *to = x; }

/* The compute type of the storage type T. */
template <typename T>
struct Real {
    typedef float type;
};
template <>
struct Real<double> {
    typedef double type;
};

/* Round a double to T once. For 16-bit types the way leads through a float that is rounded to odd:
 * its last bit is 1 if anything was cut off, so the second rounding gives the right result. */
DEVICE void round_once(double x, double *to) { *to = x; }
DEVICE void round_once(double x, float *to) { *to = (float)x; }
template <typename T>
DEVICE void round_once(double x, T *to) {
    float nearest = (float)x;
    uint32_t bits;
    memcpy(&bits, &nearest, sizeof bits);
    if ((double)nearest != x && fabs(x) < 3e38) {
        if (fabs((double)nearest) > fabs(x)) bits--;
        bits |= 1;
    }
    memcpy(&nearest, &bits, sizeof bits);
    narrow(nearest, to);
}

/* The number of this thread along x, and how many there are. */
DEVICE int64_t thread_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE int64_t thread_count() { return (int64_t)gridDim.x * blockDim.x; }

/* Load or store COUNT elements with stride 1. Requires: COUNT is 1, or the elements are whole words
 * of 16 bytes, aligned to 16 bytes. */
template <int COUNT, typename T>
DEVICE void load(T *to, const T *from) {
    if constexpr (COUNT == 1) {
        *to = *from;
    } else {
        UNROLL
        for (int i = 0; i < (int)(COUNT * sizeof(T) / 16); i++) {
            Word16 word = load_word(reinterpret_cast<const Word16 *>(from) + i);
            memcpy(to + i * 16 / sizeof(T), &word, 16);
        }
    }
}
template <int COUNT, typename T>
DEVICE void store(T *to, const T *from) {
    if constexpr (COUNT == 1) {
        *to = *from;
    } else {
        UNROLL
        for (int i = 0; i < (int)(COUNT * sizeof(T) / 16); i++) {
            Word16 word;
            memcpy(&word, from + i * 16 / sizeof(T), 16);
            store_word(reinterpret_cast<Word16 *>(to) + i, word);
        }
    }
}

/* ---- the formulas of csrc/kernels, with one double in each thread ---------------------------- */

#define INLINE               DEVICE
#define REAL                 double
#define REAL_CONST(c)        (c)
#define REAL_SELECT(m, a, b) ((m) ? (a) : (b))
#define REAL_ALL(m)          (m)
#define REAL_ABS             fabs
#define REAL_EXP             exp
#define REAL_NARROW(x)       ((double)(float)(x))
#define REAL_BITS            bits_of
#define REAL_OF_BITS         of_bits
#define REAL_SINCOS_LARGE    sincos_one_large

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE double of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#include "../kernels/angle.h"
#include "../kernels/psi.h"

#endif
