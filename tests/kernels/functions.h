/* functions.h: the functions of simd.h, simd_math.h and angle.h, as functions of arrays.
 * functions.c is compiled once per variant. */
#ifndef WAVEPE_CHECK_FUNCTIONS_H
#define WAVEPE_CHECK_FUNCTIONS_H

#include <stdint.h>

#include "wavepe.h"

/* Requires: n is a multiple of 64. f16 and bf16 are given as their bits. */
typedef struct {
    void (*exp_f64)(double *out, const double *x, int64_t n);
    void (*tanh_f64)(double *out, const double *x, int64_t n);
    void (*exp_f32)(float *out, const float *x, int64_t n);
    void (*tanh_f32)(float *out, const float *x, int64_t n);
    void (*max_f64)(double *out, const double *a, const double *b, int64_t n);
    void (*max_f32)(float *out, const float *a, const float *b, int64_t n);
    void (*sincos)(double *sine, double *cosine, const double *hi, const double *lo, int64_t n);

    /* [0]: in whole vectors; [1]: one by one, as with strides and tails; [2]: in pairs */
    void (*widen_f16[3])(float *out, const uint16_t *x, int64_t n);
    void (*widen_bf16[3])(float *out, const uint16_t *x, int64_t n);
    void (*narrow_f16[3])(uint16_t *out, const float *x, int64_t n);
    void (*narrow_bf16[3])(uint16_t *out, const float *x, int64_t n);
    void (*narrow_double_f16[2])(uint16_t *out, const double *x, int64_t n);
    void (*narrow_double_f32[2])(float *out, const double *x, int64_t n);
} check_functions;

const check_functions *functions_of(const wpe_kernels *k);

#endif
