/* simd_math.h: functions that work on each lane of a vector: select, max, exp, tanh, sincos. */
#ifndef WAVEPE_SIMD_MATH_H
#define WAVEPE_SIMD_MATH_H

#include "simd.h"

/* ---- functions of double lanes ------------------------------------------------------------- */

/* In C, a ? b : c does not work on vectors, so the mask selects the bits. */
INLINE f64v select_f64(i64v mask, f64v yes, f64v no) {
    return (f64v)((mask & (i64v)yes) | (~mask & (i64v)no));
}
INLINE f64v narrow_f64(f64v x) { /* rounded to float32 */
    return __builtin_convertvector(__builtin_convertvector(x, f32h), f64v);
}
INLINE f64v splat_f64(double x) { return x - (f64v){0}; }
INLINE f64v abs_f64(f64v x) { return (f64v)((i64v)x & INT64_MAX); }

/* The larger one; b where either is NaN. */
INLINE f64v max_f64(f64v a, f64v b) { return select_f64(a > b, a, b); }

/* Return whether all lanes of a mask are -1. The instruction is named, because compilers would
 * test one lane after the other. */
INLINE int all_lanes(i64v mask) {
#if VECTOR_BYTES == 64 && defined(__AVX512DQ__)
    typedef long long word __attribute__((vector_size(VECTOR_BYTES)));
    return (uint8_t)__builtin_ia32_cvtq2mask512((word)mask) == 0xff;
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    return __builtin_ia32_movmskpd256((f64v)mask) == 0xf;
#elif VECTOR_BYTES == 16 && defined(__SSE2__)
    return __builtin_ia32_movmskpd((f64v)mask) == 0x3;
#else
    int64_t all = -1;
    for (int l = 0; l < F64_LANES; l++) all &= mask[l];
    return all != 0;
#endif
}

/* Return a mask of the lanes that are a power of two 2^k whose inverse is a normal number. For
 * these, dividing by 2^k and multiplying by 2^-k give the same bits. */
INLINE i64v is_power_of_two_f64(f64v x) {
    f64v size = abs_f64(x);
    return (((i64v)x & 0xfffffffffffff) == 0) & (size >= 0x1p-1022) & (size <= 0x1p1022);
}

/* angle.h and psi.h compute on vectors of double lanes. */
#define REAL              f64v
#define REAL_CONST(c)     splat_f64(c)
#define REAL_SELECT       select_f64
#define REAL_ALL          all_lanes
#define REAL_ABS          abs_f64
#define REAL_EXP          exp_f64
#define REAL_NARROW       narrow_f64
#define REAL_BITS(x)      ((u64v)(x))
#define REAL_OF_BITS(b)   ((f64v)(b))
#define REAL_SINCOS_LARGE sincos_large

static void sincos_large(f64v hi, f64v lo, f64v *s, f64v *c);

#include "angle.h"

static NOINLINE void sincos_large(f64v hi, f64v lo, f64v *s, f64v *c) {
    for (int l = 0; l < F64_LANES; l++) {
        if (fabs(hi[l]) <= 0x1p31) continue;
        double sine, cosine;
        sincos_one_large(hi[l], lo[l], &sine, &cosine);
        (*s)[l] = sine;
        (*c)[l] = cosine;
    }
}

/* exp(x) within 1.2 ulp (0.9 with FMA). Exactly 0 below -708, where the result would be subnormal.
 * Requires: x <= 0 or NaN. */
INLINE f64v exp_f64(f64v x) {
    const double ln2_high = 0x1.62e42fefp-1, ln2_low = 0x1.473de6af278edp-34;
    f64v shifted = x * 0x1.71547652b82fep+0 + ROUNDER; /* log2(e) */
    f64v n = shifted - ROUNDER;
    f64v r = (x - n * ln2_high) - n * ln2_low; /* |r| <= ln(2)/2 */
    /* Taylor series to r^13: the next term is below 2^-57 */
    f64v e = splat_f64(1.0 / 6227020800);
    e = e * r + 1.0 / 479001600;
    e = e * r + 1.0 / 39916800;
    e = e * r + 1.0 / 3628800;
    e = e * r + 1.0 / 362880;
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    f64v scaled = (f64v)((u64v)e + ((u64v)shifted << 52));
    f64v result = select_f64(x < -708.0, splat_f64(0.0), scaled);
    return select_f64(x != x, x, result);
}

#include "psi.h"
#undef REAL

/* ---- functions of float lanes ------------------------------------------------------------- */

INLINE f32v select_f32(i32v mask, f32v yes, f32v no) {
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}
INLINE f32v splat_f32(float x) { return x - (f32v){0}; }
INLINE f32v abs_f32(f32v x) { return (f32v)((i32v)x & INT32_MAX); }

/* The larger one; b where either is NaN. The instruction is named: compilers do not find it. */
INLINE f32v max_f32(f32v a, f32v b) {
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#elif VECTOR_BYTES == 16 && defined(__SSE2__)
    return __builtin_ia32_maxps(a, b);
#else
    return select_f32(a > b, a, b);
#endif
}

/* exp(x) within 2 ulp. Exactly 1 at 0; exactly 0 below -87, where the result would be subnormal.
 * The coefficients are those of Cephes' expf.
 * Requires: x <= 80 or NaN. */
INLINE f32v exp_f32(f32v x) {
    f32v shifted = x * 0x1.715476p+0f + 12582912.0f; /* log2(e); 1.5 * 2^23 rounds to an integer */
    f32v n = shifted - 12582912.0f;
    f32v r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* |r| <= ln(2)/2 */
    f32v e = splat_f32(1.9875691500e-4f);
    e = e * r + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * (r * r) + (r + 1.0f);
    f32v power = (f32v)(((u32v)shifted + 127) << 23);
    return (f32v)((i32v)(e * power) & ~(x < -87.0f));
}

/* tanh(x) within 3 ulp. For small |x| the formula 1 - 2 / (exp(2x) + 1) would lose digits, so
 * Cephes' polynomial is used there. */
INLINE f32v tanh_f32(f32v x) {
    f32v size = abs_f32(x), z = x * x;
    f32v small = splat_f32(-5.70498872745e-3f);
    small = small * z + 2.06390887954e-2f;
    small = small * z - 5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z - 3.33332819422e-1f;
    small = small * z * x + x;
    f32v bounded = select_f32(size > 20.0f, splat_f32(20.0f), size); /* a NaN stays a NaN */
    f32v large = 1.0f - 2.0f / (exp_f32(2.0f * bounded) + 1.0f);
    large = (f32v)((i32v)large | ((i32v)x & INT32_MIN));
    return select_f32(size < 0.625f, small, large);
}

INLINE f64v tanh_f64(f64v x) {
    for (int l = 0; l < F64_LANES; l++) x[l] = tanh(x[l]);
    return x;
}

#endif
