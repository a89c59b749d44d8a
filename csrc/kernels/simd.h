/* simd.h: vector types, their loads and stores. Only this file and simd_math.h know how many lanes
 * a vector has, and only they name vector instructions.
 *
 * These are the vector extensions of GCC and Clang: + - * / and comparisons work on whole vectors.
 * So one source compiles to SSE2 or NEON (portable), AVX2 and AVX-512. A comparison gives a mask,
 * whose lanes are 0 or -1. */
#ifndef WAVEPE_SIMD_H
#define WAVEPE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef VECTOR_BYTES /* set for the test-only variant, see dispatch.c */
#elif defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define F32_LANES (VECTOR_BYTES / 4)
#define F64_LANES (VECTOR_BYTES / 8)
#define INLINE    static inline __attribute__((always_inline))
#define NOINLINE  __attribute__((noinline))

typedef float f32;
typedef double f64;
typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef double f64v __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t i64v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t u64v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16h __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef float f32h __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef _Float16 f16;
typedef struct {
    uint16_t bits;
} bf16;

/* ---- storage types: a load widens, a store rounds to nearest even -------------------------- */

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
    return (bf16){(uint16_t)(x == x ? rounded : 0xffff)}; /* a NaN stays a NaN */
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

/* The instructions are named, because GCC 12 would convert in halves. */
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
#define WIDEN_U16(h)  ((u32v)_mm512_cvtepu16_epi32((__m256i)(h)))
#define NARROW_U32(v) ((u16h)_mm512_cvtepi32_epi16((__m512i)(v)))
#elif VECTOR_BYTES == 32
#define WIDEN_U16(h)  ((u32v)_mm256_cvtepu16_epi32((__m128i)(h)))
#define NARROW_U32(v) __builtin_convertvector(v, u16h)
#else
#define WIDEN_U16(h)  __builtin_convertvector(h, u32v)
#define NARROW_U32(v) __builtin_convertvector(v, u16h)
#endif
INLINE f32v load_full_bf16(const bf16 *p) {
    u16h half;
    memcpy(&half, p, sizeof half);
    return (f32v)(WIDEN_U16(half) << 16);
}
/* Return the rounded numbers in the high half of each lane. The low half is garbage. */
INLINE u32v round_bf16(f32v v) {
    u32v bits = (u32v)v;
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    /* With masks these are five instructions. The compiler turns the line below into seven. */
    __m512i rounded = (__m512i)(bits + 0x7fff), ones = _mm512_set1_epi32(-1);
    __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
    rounded = _mm512_mask_sub_epi32(rounded, odd, rounded, ones);
    return (u32v)_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), ones);
#else
    return (bits + 0x7fff + (bits >> 16 & 1)) | (u32v)(v != v);
#endif
}
INLINE void store_full_bf16(bf16 *p, f32v v) {
    u16h half = NARROW_U32(round_bf16(v) >> 16);
    memcpy(p, &half, sizeof half);
}

#if defined(__F16C__) && !defined(__clang__) && (VECTOR_BYTES == 32 || defined(__AVX512F__))
/* GCC would convert lane by lane, so the instruction is named. 4: use the current rounding mode. */
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

/* ---- storage types in double lanes --------------------------------------------------------- */
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
    f64v v = {0};
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

/* ---- rows that end within a vector --------------------------------------------------------- */

/* load_part sets the `size` bytes of `to`: `bytes` of `from`, then zeros. store_part writes the
 * first `bytes` of the `size` bytes of `from`. Neither touches memory past `bytes`. The other side
 * is a variable of the caller, which the compiler keeps in a register. */
#if VECTOR_BYTES == 64 && defined(__AVX512BW__)
INLINE void load_part(void *to, const void *from, size_t size, size_t bytes) {
    const uint64_t mask = _bzhi_u64(-1, (unsigned)bytes);
    if (size == 64)
        _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(mask, from));
    else if (size == 32)
        _mm256_storeu_si256(to, _mm256_maskz_loadu_epi8((__mmask32)mask, from));
    else
        _mm_storeu_si128(to, _mm_maskz_loadu_epi8((__mmask16)mask, from));
}
INLINE void store_part(void *to, const void *from, size_t size, size_t bytes) {
    const uint64_t mask = _bzhi_u64(-1, (unsigned)bytes);
    if (size == 64)
        _mm512_mask_storeu_epi8(to, mask, _mm512_loadu_si512(from));
    else if (size == 32)
        _mm256_mask_storeu_epi8(to, (__mmask32)mask, _mm256_loadu_si256(from));
    else
        _mm_mask_storeu_epi8(to, (__mmask16)mask, _mm_loadu_si128(from));
}
#else
INLINE void store_part(void *to, const void *from, size_t size, size_t bytes) {
    char *next = to;
    const char *rest = from;
#define PIECE(n)                       \
    if ((n) < size && (bytes & (n))) { \
        memcpy(next, rest, n);         \
        next += (n), rest += (n);      \
    }
    PIECE(32) PIECE(16) PIECE(8) PIECE(4) PIECE(2)
#undef PIECE
}
INLINE void load_part(void *to, const void *from, size_t size, size_t bytes) {
#if VECTOR_BYTES == 32 && defined(__AVX2__)
    /* Pieces would be gathered in memory, and reading them back as a whole takes long. */
    if (size == 32) {
        __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)bytes / 4), number);
        _mm256_storeu_si256(to, _mm256_maskload_epi32(from, mask));
        return;
    }
    if (size == 16) {
        __m128i mask = _mm_cmplt_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32((int)bytes / 4));
        __m128i words = _mm_maskload_epi32(from, mask);
        if (bytes & 2) { /* an element is left over */
            uint16_t last;
            memcpy(&last, (const char *)from + bytes - 2, 2);
            __m128i number = _mm_setr_epi16(1, 2, 3, 4, 5, 6, 7, 8);
            mask = _mm_cmpeq_epi16(number, _mm_set1_epi16((short)(bytes / 2)));
            words = _mm_or_si128(words, _mm_and_si128(mask, _mm_set1_epi16((short)last)));
        }
        _mm_storeu_si128(to, words);
        return;
    }
#endif
    memset(to, 0, size);
    store_part(to, from, size, bytes);
}
#endif

/* load_T(p, stride, count) and store_T(p, stride, count, v): `count` lanes at any stride. A load
 * sets the other lanes to 0. A vector of 8 bytes in memory has too few lanes for load_part. */
#define DEFINE_LOAD(name, T, V, LANES, FULL, READ)                      \
    INLINE V name(const T *p, int64_t stride, int count) {              \
        if (stride == 1 && count == (LANES)) return FULL(p);            \
        T part[LANES];                                                  \
        if (stride == 1 && sizeof part > 8) {                           \
            load_part(part, p, sizeof part, (size_t)count * sizeof(T)); \
            return FULL(part);                                          \
        }                                                               \
        V v = {0};                                                      \
        for (int l = 0; l < count; l++) {                               \
            T e = p[l * stride];                                        \
            v[l] = READ;                                                \
        }                                                               \
        return v;                                                       \
    }
#define DEFINE_STORE(name, T, V, LANES, FULL, WRITE)                     \
    INLINE void name(T *p, int64_t stride, int count, V v) {             \
        T part[LANES];                                                   \
        if (stride == 1 && count == (LANES)) {                           \
            FULL(p, v);                                                  \
        } else if (stride == 1 && sizeof part > 8) {                     \
            FULL(part, v);                                               \
            store_part(p, part, sizeof part, (size_t)count * sizeof(T)); \
        } else                                                           \
            for (int l = 0; l < count; l++) p[l * stride] = (WRITE);     \
    }

DEFINE_LOAD(load_f32, float, f32v, F32_LANES, load_full_f32, e)
DEFINE_LOAD(load_f64, double, f64v, F64_LANES, load_full_f64, e)
DEFINE_LOAD(load_bf16, bf16, f32v, F32_LANES, load_full_bf16, bf16_to_f32(e))
DEFINE_LOAD(load_f16, f16, f32v, F32_LANES, load_full_f16, (float)e)
DEFINE_LOAD(load_wide_f64, double, f64v, F64_LANES, load_wide_full_f64, e)
DEFINE_LOAD(load_wide_f32, float, f64v, F64_LANES, load_wide_full_f32, (double)e)
DEFINE_LOAD(load_wide_f16, f16, f64v, F64_LANES, load_wide_full_f16, (double)e)
DEFINE_LOAD(load_wide_i64, int64_t, f64v, F64_LANES, load_wide_full_i64, (double)e)

DEFINE_STORE(store_f32, float, f32v, F32_LANES, store_full_f32, v[l])
DEFINE_STORE(store_f64, double, f64v, F64_LANES, store_full_f64, v[l])
DEFINE_STORE(store_bf16, bf16, f32v, F32_LANES, store_full_bf16, f32_to_bf16(v[l]))
DEFINE_STORE(store_f16, f16, f32v, F32_LANES, store_full_f16, (f16)v[l])
DEFINE_STORE(store_wide_f64, double, f64v, F64_LANES, store_wide_full_f64, v[l])
DEFINE_STORE(store_wide_f32, float, f64v, F64_LANES, store_wide_full_f32, (float)v[l])
DEFINE_STORE(store_wide_f16, f16, f64v, F64_LANES, store_wide_full_f16, (f16)v[l])

/* ---- squares -------------------------------------------------------------------------------- */

/* Return the blocks of 16 bytes at p, p + stride, p + 2 * stride and so on as one vector. Blocks
 * come into their places while they are loaded, which costs an Intel CPU no shuffle. */
INLINE u32v load_blocks(const char *p, int64_t stride) {
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const void *)(p + stride)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const void *)(p + 2 * stride)));
    v = _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const void *)(p + 3 * stride)));
    return (u32v)v;
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const void *)p));
    return (u32v)_mm256_inserti128_si256(v, _mm_loadu_si128((const void *)(p + stride)), 1);
#else
    u32v v;
    for (int b = 0; b < VECTOR_BYTES / 16; b++) memcpy((char *)&v + 16 * b, p + b * stride, 16);
    return v;
#endif
}

/* ---- interleaved pairs: 2 * LANES elements (a0 b0 a1 b1 ...) as (a0 a1 ...) and (b0 b1 ...) - */

enum { split_pairs_f16, split_pairs_bf16 = 1, split_pairs_f32 = 0, split_pairs_f64 = 0 };

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

/* order(EXCHANGE)(LOWER, s) and order(EXCHANGE)(UPPER, s) of two vectors exchange the blocks of s
 * lanes that are uneven in the first one and even in the second one. s is a power of two below the
 * number of lanes n. */
#define LOWER(lane, s, n) ((lane) & (s) ? (lane) - (s) + (n) : (lane))
#define UPPER(lane, s, n) ((lane) & (s) ? (lane) + (n) : ((lane) + (s)) % (n))
#define EXCHANGE_2(DO, s) DO(0, s, 2), DO(1, s, 2)
#define EXCHANGE_4(DO, s) DO(0, s, 4), DO(1, s, 4), DO(2, s, 4), DO(3, s, 4)
#define EXCHANGE_8(DO, s)                                                                      \
    DO(0, s, 8), DO(1, s, 8), DO(2, s, 8), DO(3, s, 8), DO(4, s, 8), DO(5, s, 8), DO(6, s, 8), \
        DO(7, s, 8)
#define EXCHANGE_16(DO, s)                                                                    \
    DO(0, s, 16), DO(1, s, 16), DO(2, s, 16), DO(3, s, 16), DO(4, s, 16), DO(5, s, 16),       \
        DO(6, s, 16), DO(7, s, 16), DO(8, s, 16), DO(9, s, 16), DO(10, s, 16), DO(11, s, 16), \
        DO(12, s, 16), DO(13, s, 16), DO(14, s, 16), DO(15, s, 16)

#if VECTOR_BYTES == 64
#define order_f32(which) which##_16
#define order_f64(which) which##_8
#elif VECTOR_BYTES == 32
#define order_f32(which) which##_8
#define order_f64(which) which##_4
#else
#define order_f32(which) which##_4
#define order_f64(which) which##_2
#endif

#define DEFINE_LOAD_PAIRS(type, T, V, LANES, ORDER)                                 \
    INLINE void load_pairs_##type(const T *p, int count, V *a, V *b) {              \
        int low = 2 * count < (LANES) ? 2 * count : (LANES);                        \
        V x = load_##type(p, 1, low), y = load_##type(p + low, 1, 2 * count - low); \
        *a = __builtin_shufflevector(x, y, ORDER(EVENS));                           \
        *b = __builtin_shufflevector(x, y, ORDER(ODDS));                            \
    }
#define DEFINE_STORE_PAIRS(type, T, V, LANES, ORDER)                                           \
    INLINE void store_pairs_##type(T *p, int count, V a, V b) {                                \
        int low = 2 * count < (LANES) ? 2 * count : (LANES);                                   \
        store_##type(p, 1, low, __builtin_shufflevector(a, b, ORDER(LOW)));                    \
        store_##type(p + low, 1, 2 * count - low, __builtin_shufflevector(a, b, ORDER(HIGH))); \
    }
#if VECTOR_BYTES == 32
/* Written by hand: the compiler's shuffles would move data between the halves of a register twice
 * as often. */
typedef float f32q __attribute__((vector_size(16)));
INLINE f32v load_halves_f32(const float *low, const float *high) {
    f32q x, y;
    memcpy(&x, low, sizeof x);
    memcpy(&y, high, sizeof y);
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7);
}
INLINE void load_pairs_f32(const float *p, int count, f32v *a, f32v *b) {
    float part[2 * F32_LANES];
    if (count < F32_LANES) {
        int low = 2 * count < F32_LANES ? 2 * count : F32_LANES;
        store_full_f32(part, load_f32(p, 1, low));
        store_full_f32(part + F32_LANES, load_f32(p + low, 1, 2 * count - low));
        p = part;
    }
    f32v x = load_halves_f32(p, p + 8), y = load_halves_f32(p + 4, p + 12);
    *a = __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14);
    *b = __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}
#else
DEFINE_LOAD_PAIRS(f32, float, f32v, F32_LANES, order_f32)
#endif
DEFINE_STORE_PAIRS(f32, float, f32v, F32_LANES, order_f32)
DEFINE_LOAD_PAIRS(f64, double, f64v, F64_LANES, order_f64)
DEFINE_STORE_PAIRS(f64, double, f64v, F64_LANES, order_f64)
DEFINE_LOAD_PAIRS(f16, f16, f32v, F32_LANES, order_f32)
DEFINE_STORE_PAIRS(f16, f16, f32v, F32_LANES, order_f32)

/* A pair of bf16 fills a 32-bit lane, so nothing has to be shuffled (little endian). */
INLINE void load_pairs_bf16(const bf16 *p, int count, f32v *a, f32v *b) {
    u32v both;
    if (count == F32_LANES)
        memcpy(&both, p, sizeof both);
    else
        load_part(&both, p, sizeof both, (size_t)count * 4);
    *a = (f32v)(both << 16);
    *b = (f32v)(both & 0xffff0000);
}
/* Requires: NaNs are quiet, as the results of arithmetic are. */
INLINE void store_pairs_bf16(bf16 *p, int count, f32v a, f32v b) {
#if VECTOR_BYTES == 32 && defined(__AVX2__)
    /* Both are rounded at once, in 16-bit lanes: up if the dropped bits are more than half, or half
     * and the kept bits are odd. AVX-512 gains nothing by it. */
    const __m256i half = _mm256_set1_epi16((short)0x8000);
    const __m256i even = (__m256i)a, odd = (__m256i)b; /* the lanes of the pair */
    __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    __m256i dropped = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    __m256i sticky = _mm256_or_si256(dropped, _mm256_and_si256(kept, _mm256_set1_epi16(1)));
    __m256i up = _mm256_cmpgt_epi16(_mm256_xor_si256(sticky, half), _mm256_setzero_si256());
    __m256i is_nan = _mm256_cmpgt_epi16(_mm256_andnot_si256(half, kept), _mm256_set1_epi16(0x7f80));
    u32v both = (u32v)_mm256_or_si256(_mm256_sub_epi16(kept, up), is_nan);
#else
    u32v both = round_bf16(a) >> 16 | (round_bf16(b) & 0xffff0000);
#endif
    if (count == F32_LANES)
        memcpy(p, &both, sizeof both);
    else
        store_part(p, &both, sizeof both, (size_t)count * 4);
}

/* The compiler moves no arithmetic on these four values across a fence, and contracts no product
 * from before the fence into an FMA after it. A fence costs nothing: each value stays in its
 * register. */
#if VECTOR_BYTES == 64 && !defined(__AVX512F__) /* the test-only variant: no such register */
#define FENCE4(a, b, c, d) __asm__("" : "+m"(a), "+m"(b), "+m"(c), "+m"(d))
#elif defined(__x86_64__)
#define FENCE4(a, b, c, d) __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d))
#elif defined(__aarch64__)
#define FENCE4(a, b, c, d) __asm__("" : "+w"(a), "+w"(b), "+w"(c), "+w"(d))
#else
#define FENCE4(a, b, c, d) (void)0
#endif

#endif
