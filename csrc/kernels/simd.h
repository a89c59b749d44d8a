/* simd.h: the only file that knows lanes.
 *
 * GCC/Clang vector extensions: + - * / and comparisons work on whole vectors, so one source gives
 * SSE2 or NEON width (portable), AVX2 and AVX-512. A comparison gives a mask of 0 and -1 lanes. */
#ifndef WAVEPE_SIMD_H
#define WAVEPE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define F32_LANES (VECTOR_BYTES / 4)
#define F64_LANES (VECTOR_BYTES / 8)
#define INLINE    static inline __attribute__((always_inline))

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef double f64v __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t i64v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t u64v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16h __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef float f32h __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef _Float16 f16;
typedef struct {
    uint16_t bits;
} bf16;

/* ---- storage types: widened at load, rounded to nearest even at store ---------------------- */

INLINE float bf16_to_f32(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE bf16 f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bf16){(uint16_t)(x == x ? rounded : 0xffff)}; /* a NaN stays one */
}

INLINE f32v load_full_f32(const float *p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_full_f32(float *p, f32v v) { memcpy(p, &v, sizeof v); }

INLINE f64v load_full_f64(const double *p) {
    f64v v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_full_f64(double *p, f64v v) { memcpy(p, &v, sizeof v); }

INLINE f32v load_full_bf16(const bf16 *p) {
    u16h half;
    memcpy(&half, p, sizeof half);
    u32v bits = __builtin_convertvector(half, u32v) << 16;
    return (f32v)bits;
}
/* The result in the high half of each lane, above bits of no meaning. */
INLINE u32v round_bf16(f32v v) {
    u32v bits = (u32v)v;
    return (bits + 0x7fff + (bits >> 16 & 1)) | (u32v)(v != v);
}
INLINE void store_full_bf16(bf16 *p, f32v v) {
    u16h half = __builtin_convertvector(round_bf16(v) >> 16, u16h);
    memcpy(p, &half, sizeof half);
}

#if defined(__F16C__) && !defined(__clang__)
/* GCC would convert lane by lane: name its instruction. 4: round as the processor is told to. */
typedef short s16h __attribute__((vector_size(VECTOR_BYTES / 2)));
#if VECTOR_BYTES == 64
#define WIDEN_F16(h)  __builtin_ia32_vcvtph2ps512_mask(h, (f32v){0}, -1, 4)
#define NARROW_F16(v) __builtin_ia32_vcvtps2ph512_mask(v, 4, (s16h){0}, -1)
#else
#define WIDEN_F16(h)  __builtin_ia32_vcvtph2ps256(h)
#define NARROW_F16(v) __builtin_ia32_vcvtps2ph256(v, 4)
#endif
#else
typedef f16 s16h __attribute__((vector_size(VECTOR_BYTES / 2)));
#define WIDEN_F16(h)  __builtin_convertvector(h, f32v)
#define NARROW_F16(v) __builtin_convertvector(v, s16h)
#endif
INLINE f32v load_full_f16(const f16 *p) {
    s16h half;
    memcpy(&half, p, sizeof half);
    return WIDEN_F16(half);
}
INLINE void store_full_f16(f16 *p, f32v v) {
    s16h half = NARROW_F16(v);
    memcpy(p, &half, sizeof half);
}

/* float storage widened to double lanes */
INLINE f64v load_wide_full_f64(const double *p) { return load_full_f64(p); }
INLINE void store_wide_full_f64(double *p, f64v v) { store_full_f64(p, v); }

INLINE f64v load_wide_full_f32(const float *p) {
    f32h half;
    memcpy(&half, p, sizeof half);
    return __builtin_convertvector(half, f64v);
}
INLINE void store_wide_full_f32(float *p, f64v v) {
    f32h half = __builtin_convertvector(v, f32h);
    memcpy(p, &half, sizeof half);
}

INLINE f64v load_wide_full_f16(const f16 *p) {
    f64v v;
    for (int l = 0; l < F64_LANES; l++) v[l] = (double)p[l];
    return v;
}
INLINE void store_wide_full_f16(f16 *p, f64v v) {
    for (int l = 0; l < F64_LANES; l++) p[l] = (f16)v[l];
}

INLINE f64v load_wide_full_i64(const int64_t *p) {
    i64v v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, f64v);
}

/* load_T(p, stride, count), store_T(...): count lanes at any stride; missing lanes are zero. */
#define DEFINE_LOAD(name, T, V, LANES, FULL, READ)         \
    INLINE V name(const T *p, int64_t stride, int count) { \
        if (stride == 1 && count == (LANES)) return FULL;  \
        V v = {0};                                         \
        for (int l = 0; l < count; l++) {                  \
            T e = p[l * stride];                           \
            v[l] = READ;                                   \
        }                                                  \
        return v;                                          \
    }
#define DEFINE_STORE(name, T, V, LANES, FULL, WRITE)                 \
    INLINE void name(T *p, int64_t stride, int count, V v) {         \
        if (stride == 1 && count == (LANES))                         \
            FULL(p, v);                                              \
        else                                                         \
            for (int l = 0; l < count; l++) p[l * stride] = (WRITE); \
    }

DEFINE_LOAD(load_f32, float, f32v, F32_LANES, load_full_f32(p), e)
DEFINE_LOAD(load_f64, double, f64v, F64_LANES, load_full_f64(p), e)
DEFINE_LOAD(load_bf16, bf16, f32v, F32_LANES, load_full_bf16(p), bf16_to_f32(e))
DEFINE_LOAD(load_f16, f16, f32v, F32_LANES, load_full_f16(p), (float)e)
DEFINE_LOAD(load_wide_f64, double, f64v, F64_LANES, load_wide_full_f64(p), e)
DEFINE_LOAD(load_wide_f32, float, f64v, F64_LANES, load_wide_full_f32(p), (double)e)
DEFINE_LOAD(load_wide_f16, f16, f64v, F64_LANES, load_wide_full_f16(p), (double)e)
DEFINE_LOAD(load_wide_i64, int64_t, f64v, F64_LANES, load_wide_full_i64(p), (double)e)

DEFINE_STORE(store_f32, float, f32v, F32_LANES, store_full_f32, v[l])
DEFINE_STORE(store_f64, double, f64v, F64_LANES, store_full_f64, v[l])
DEFINE_STORE(store_bf16, bf16, f32v, F32_LANES, store_full_bf16, f32_to_bf16(v[l]))
DEFINE_STORE(store_f16, f16, f32v, F32_LANES, store_full_f16, (f16)v[l])
DEFINE_STORE(store_wide_f64, double, f64v, F64_LANES, store_wide_full_f64, v[l])
DEFINE_STORE(store_wide_f32, float, f64v, F64_LANES, store_wide_full_f32, (float)v[l])
DEFINE_STORE(store_wide_f16, f16, f64v, F64_LANES, store_wide_full_f16, (f16)v[l])

/* ---- interleaved pairs: (a0 b0 a1 b1 ...) of 2 * LANES elements as (a0 a1 ...), (b0 b1 ...) -- */

#if VECTOR_BYTES == 64
#define EVENS_16 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS_16  1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW_16   0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_16  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#define EVENS_8 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS_8  1, 3, 5, 7, 9, 11, 13, 15
#define LOW_8   0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_8  4, 12, 5, 13, 6, 14, 7, 15
#define EVENS_4 0, 2, 4, 6
#define ODDS_4  1, 3, 5, 7
#define LOW_4   0, 4, 1, 5
#define HIGH_4  2, 6, 3, 7
#define EVENS_2 0, 2
#define ODDS_2  1, 3
#define LOW_2   0, 2
#define HIGH_2  1, 3

#if VECTOR_BYTES == 64
#define F32_ORDER(which) which##_16
#define F64_ORDER(which) which##_8
#elif VECTOR_BYTES == 32
#define F32_ORDER(which) which##_8
#define F64_ORDER(which) which##_4
#else
#define F32_ORDER(which) which##_4
#define F64_ORDER(which) which##_2
#endif

#define DEFINE_LOAD_PAIRS(type, T, V, LANES, ORDER)                   \
    INLINE void load_pairs_##type(const T *p, V *a, V *b) {           \
        V x = load_full_##type(p), y = load_full_##type(p + (LANES)); \
        *a = __builtin_shufflevector(x, y, ORDER(EVENS));             \
        *b = __builtin_shufflevector(x, y, ORDER(ODDS));              \
    }
#define DEFINE_STORE_PAIRS(type, T, V, LANES, ORDER)                                \
    INLINE void store_pairs_##type(T *p, V a, V b) {                                \
        store_full_##type(p, __builtin_shufflevector(a, b, ORDER(LOW)));            \
        store_full_##type(p + (LANES), __builtin_shufflevector(a, b, ORDER(HIGH))); \
    }
#if VECTOR_BYTES == 32
/* As above; the compiler's own shuffles cross the halves of a register twice as often. */
typedef float f32q __attribute__((vector_size(16)));
INLINE f32v load_halves_f32(const float *low, const float *high) {
    f32q x, y;
    memcpy(&x, low, sizeof x);
    memcpy(&y, high, sizeof y);
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7);
}
INLINE void load_pairs_f32(const float *p, f32v *a, f32v *b) {
    f32v x = load_halves_f32(p, p + 8), y = load_halves_f32(p + 4, p + 12);
    *a = __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14);
    *b = __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}
#else
DEFINE_LOAD_PAIRS(f32, float, f32v, F32_LANES, F32_ORDER)
#endif
DEFINE_STORE_PAIRS(f32, float, f32v, F32_LANES, F32_ORDER)
DEFINE_LOAD_PAIRS(f64, double, f64v, F64_LANES, F64_ORDER)
DEFINE_STORE_PAIRS(f64, double, f64v, F64_LANES, F64_ORDER)
DEFINE_LOAD_PAIRS(f16, f16, f32v, F32_LANES, F32_ORDER)
DEFINE_STORE_PAIRS(f16, f16, f32v, F32_LANES, F32_ORDER)

/* A pair of bf16 fills a 32-bit lane: nothing to shuffle (little endian). */
INLINE void load_pairs_bf16(const bf16 *p, f32v *a, f32v *b) {
    u32v both;
    memcpy(&both, p, sizeof both);
    *a = (f32v)(both << 16);
    *b = (f32v)(both & 0xffff0000);
}
INLINE void store_pairs_bf16(bf16 *p, f32v a, f32v b) {
    u32v both = round_bf16(a) >> 16 | (round_bf16(b) & 0xffff0000);
    memcpy(p, &both, sizeof both);
}

/* A point that the compiler moves no arithmetic on these four across, and where it contracts no
 * product into an FMA. Costs nothing: each stays in its register. */
#if defined(__x86_64__)
#define FENCE4(a, b, c, d) __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d))
#elif defined(__aarch64__)
#define FENCE4(a, b, c, d) __asm__("" : "+w"(a), "+w"(b), "+w"(c), "+w"(d))
#else
#define FENCE4(a, b, c, d) (void)0
#endif

/* ---- functions of double lanes ------------------------------------------------------------- */

/* C has no a ? b : c on vectors: take the bits by mask. */
INLINE f64v select_f64(i64v mask, f64v yes, f64v no) {
    return (f64v)((mask & (i64v)yes) | (~mask & (i64v)no));
}
INLINE f64v narrow_f64(f64v x) { /* rounded to float32 */
    return __builtin_convertvector(__builtin_convertvector(x, f32h), f64v);
}
INLINE f64v splat_f64(double x) { return x - (f64v){0}; }
INLINE f64v abs_f64(f64v x) { return (f64v)((i64v)x & INT64_MAX); }

/* Whether all lanes of a mask are -1; compilers read lane after lane if not told. */
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

/* Then x / 2^k and x * 2^-k are the same, which 2^-k in the normal range keeps true. */
INLINE i64v is_power_of_two_f64(f64v x) {
    f64v size = abs_f64(x);
    return (((i64v)x & 0xfffffffffffff) == 0) & (size >= 0x1p-1022) & (size <= 0x1p1022);
}

/* Adding 1.5 * 2^52 rounds to an integer, which then stands in the low bits. */
#define ROUNDER 6755399441055744.0

/* exp(x) for x <= 0, within 1 ulp; exactly 0 below -708, where the result would be subnormal. */
INLINE f64v exp_f64(f64v x) {
    const double ln2_high = 0x1.62e42fefp-1, ln2_low = 0x1.473de6af278edp-34;
    f64v shifted = x * 0x1.71547652b82fep+0 + ROUNDER; /* log2(e) */
    f64v n = shifted - ROUNDER;
    f64v r = (x - n * ln2_high) - n * ln2_low; /* |r| <= ln(2)/2 */
    /* Taylor to r^13: the next term is below 2^-57 */
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

/* a + b = sum + error exactly (Knuth). No product is involved, so contraction cannot hurt; where
 * b is a product below, that product is exact. */
INLINE f64v two_sum(f64v a, f64v b, f64v *error) {
    f64v sum = a + b;
    f64v b_part = sum - a;
    *error = (a - (sum - b_part)) + (b - b_part);
    return sum;
}

/* x with the low 31 of its 53 bits cleared: times a 31-bit integer it is exact. */
INLINE f64v high_bits(f64v x) { return (f64v)((i64v)x & ~(int64_t)0x7fffffff); }

/* hi + lo = position * f without rounding error, for integers |position| <= 2^31. */
INLINE void product_f64(f64v position, f64v f, f64v *hi, f64v *lo) {
    f64v f1 = high_bits(f), f2 = high_bits(f - f1), f3 = (f - f1) - f2;
    f64v e1, e2;
    f64v sum = two_sum(position * f1, position * f2, &e1);
    *hi = two_sum(sum, position * f3, &e2);
    *lo = e1 + e2;
}

/* pi/2 in four parts of 22 bits or less, whose products with a 31-bit integer are exact, and a
 * rest */
#define PIO2_1 0x1.921fbp+0
#define PIO2_2 0x1.5110bp-22
#define PIO2_3 0x1.184698p-44
#define PIO2_4 0x1.3198ap-69
#define PIO2_5 0x1.701b839a25205p-92

/* sin and cos of lane values outside the reduction's range: far more than any position needs, but
 * morlet is right for every finite argument. */
static __attribute__((noinline)) void sincos_far(f64v hi, f64v lo, f64v *s, f64v *c) {
    for (int l = 0; l < F64_LANES; l++) {
        if (fabs(hi[l]) <= 0x1p31) continue;
        double sh = sin(hi[l]), ch = cos(hi[l]), sl = sin(lo[l]), cl = cos(lo[l]);
        (*s)[l] = sh * cl + ch * sl;
        (*c)[l] = ch * cl - sh * sl;
    }
}

/* sin and cos of hi + lo. Cody-Waite: k = round((hi + lo) / (pi/2)), r = hi + lo - k pi/2 as an
 * unevaluated sum with absolute error below 2^-104, and below 2^-113 where |r| < 2^-14, so that
 * results next to a zero keep their relative precision (docs/rope.md derives both); then fdlibm's
 * kernels on |r| <= pi/4. */
INLINE void sincos_f64(f64v hi, f64v lo, f64v *sine, f64v *cosine) {
    f64v shifted = hi * 0x1.45f306dc9c883p-1 + ROUNDER; /* 2/pi */
    f64v k = shifted - ROUNDER;
    f64v e1, e2, e3, tail;
    f64v r = (hi - k * PIO2_1) - k * PIO2_2; /* both exact */
    r = two_sum(r, lo, &e1);
    r = two_sum(r, -k * PIO2_3, &e2);
    r = two_sum(r, -k * PIO2_4, &e3);
    r = two_sum(r, ((e1 + e2) + e3) - k * PIO2_5, &tail);

    f64v z = r * r;
    f64v s = splat_f64(1.58969099521155010221e-10);
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = r - ((z * (0.5 * tail - z * r * s) - tail) + z * r * 1.66666666666666324348e-01);

    f64v c = splat_f64(-1.13596475577881948265e-11);
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    f64v half = 0.5 * z, w = 1.0 - half;
    c = w + (((1.0 - w) - half) + (z * z * c - r * tail));

    u64v quadrant = (u64v)shifted;
    i64v swap = (quadrant & 1) != 0;
    u64v sine_sign = (quadrant & 2) << 62, cosine_sign = ((quadrant + 1) & 2) << 62;
    *sine = (f64v)((u64v)select_f64(swap, c, s) ^ sine_sign);
    *cosine = (f64v)((u64v)select_f64(swap, s, c) ^ cosine_sign);

    int near = all_lanes(abs_f64(hi) <= 0x1p31);
    if (__builtin_expect(!near, 0)) sincos_far(hi, lo, sine, cosine);
}

#endif
