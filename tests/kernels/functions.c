/* functions.c: the functions inside the kernels of one VARIANT, as functions of arrays. */
#include "functions.h"
#include "kernels/simd_math.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b)  PASTE_(a, b)

#define FUNCTION(name, type, LANES)                                    \
    static void array_##name(type *out, const type *x, int64_t n) {    \
        for (int64_t i = 0; i < n; i += LANES)                         \
            store_full_##type(out + i, name(load_full_##type(x + i))); \
    }
FUNCTION(exp_f64, f64, F64_LANES)
FUNCTION(tanh_f64, f64, F64_LANES)
FUNCTION(exp_f32, f32, F32_LANES)
FUNCTION(tanh_f32, f32, F32_LANES)

#define OF_TWO(name, type, LANES)                                                               \
    static void array_##name(type *out, const type *a, const type *b, int64_t n) {              \
        for (int64_t i = 0; i < n; i += LANES)                                                  \
            store_full_##type(out + i, name(load_full_##type(a + i), load_full_##type(b + i))); \
    }
OF_TWO(max_f64, f64, F64_LANES)
OF_TWO(max_f32, f32, F32_LANES)

static void array_sincos(double *sine, double *cosine, const double *hi, const double *lo,
                         int64_t n) {
    for (int64_t i = 0; i < n; i += F64_LANES) {
        f64v s, c;
        sincos_sum(load_full_f64(hi + i), load_full_f64(lo + i), &s, &c);
        store_full_f64(sine + i, s);
        store_full_f64(cosine + i, c);
    }
}

/* full: whole vectors; rest: one by one, as with strides and tails; pairs: even and odd elements
 * apart. */
#define CONVERSIONS(type)                                                       \
    static void widen_full_##type(float *out, const uint16_t *x, int64_t n) {   \
        for (int64_t i = 0; i < n; i += F32_LANES)                              \
            store_full_f32(out + i, load_full_##type((const type *)x + i));     \
    }                                                                           \
    static void widen_rest_##type(float *out, const uint16_t *x, int64_t n) {   \
        for (int64_t i = 0; i < n; i++)                                         \
            store_f32(out + i, 1, 1, load_##type((const type *)x + i, 1, 1));   \
    }                                                                           \
    static void widen_pairs_##type(float *out, const uint16_t *x, int64_t n) {  \
        for (int64_t i = 0; i < n; i += 2 * F32_LANES) {                        \
            f32v a, b;                                                          \
            load_pairs_##type((const type *)x + i, F32_LANES, &a, &b);          \
            for (int l = 0; l < F32_LANES; l++) {                               \
                out[i + 2 * l] = a[l];                                          \
                out[i + 2 * l + 1] = b[l];                                      \
            }                                                                   \
        }                                                                       \
    }                                                                           \
    static void narrow_full_##type(uint16_t *out, const float *x, int64_t n) {  \
        for (int64_t i = 0; i < n; i += F32_LANES)                              \
            store_full_##type((type *)out + i, load_full_f32(x + i));           \
    }                                                                           \
    static void narrow_rest_##type(uint16_t *out, const float *x, int64_t n) {  \
        for (int64_t i = 0; i < n; i++)                                         \
            store_##type((type *)out + i, 1, 1, load_f32(x + i, 1, 1));         \
    }                                                                           \
    static void narrow_pairs_##type(uint16_t *out, const float *x, int64_t n) { \
        for (int64_t i = 0; i < n; i += 2 * F32_LANES) {                        \
            f32v a, b;                                                          \
            load_pairs_f32(x + i, F32_LANES, &a, &b);                           \
            store_pairs_##type((type *)out + i, F32_LANES, a, b);               \
        }                                                                       \
    }
CONVERSIONS(f16)
CONVERSIONS(bf16)

#define FROM_DOUBLE(type, bits)                                                    \
    static void narrow_double_full_##type(bits *out, const double *x, int64_t n) { \
        for (int64_t i = 0; i < n; i += F64_LANES)                                 \
            store_wide_full_##type((type *)out + i, load_full_f64(x + i));         \
    }                                                                              \
    static void narrow_double_rest_##type(bits *out, const double *x, int64_t n) { \
        for (int64_t i = 0; i < n; i++)                                            \
            store_wide_##type((type *)out + i, 1, 1, load_f64(x + i, 1, 1));       \
    }
FROM_DOUBLE(f16, uint16_t)
FROM_DOUBLE(f32, float)

const check_functions PASTE(check_functions_, VARIANT) = {
    .exp_f64 = array_exp_f64,
    .tanh_f64 = array_tanh_f64,
    .exp_f32 = array_exp_f32,
    .tanh_f32 = array_tanh_f32,
    .max_f64 = array_max_f64,
    .max_f32 = array_max_f32,
    .sincos = array_sincos,
    .widen_f16 = {widen_full_f16, widen_rest_f16, widen_pairs_f16},
    .widen_bf16 = {widen_full_bf16, widen_rest_bf16, widen_pairs_bf16},
    .narrow_f16 = {narrow_full_f16, narrow_rest_f16, narrow_pairs_f16},
    .narrow_bf16 = {narrow_full_bf16, narrow_rest_bf16, narrow_pairs_bf16},
    .narrow_double_f16 = {narrow_double_full_f16, narrow_double_rest_f16},
    .narrow_double_f32 = {narrow_double_full_f32, narrow_double_rest_f32},
};
