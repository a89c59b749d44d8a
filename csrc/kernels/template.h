/* template.h: what the kernels, templates in plain C, are written in.
 *
 * variant.c includes each template once per type. It defines
 *     VARIANT     the instruction set's name
 *     TYPE        f16, bf16, f32 or f64: the type of a template's inputs and results; of attention
 *                 and relative_bias, which work on one own type, f32 or f64
 *     REAL_TYPE   f32 or f64: what is computed in
 * and everything below follows from these three where it is used. A template's own macros do so,
 * too, hence none is ever undefined. To find a kernel by its name, search for NAME(rope). */
#ifndef WAVEPE_TEMPLATE_H
#define WAVEPE_TEMPLATE_H

/* Asserts say what a contract requires: on in the checker's and the sanitizers' builds. */
#ifdef WPE_ASSERT
#undef NDEBUG
#elif !defined(NDEBUG)
#define NDEBUG
#endif
#include <assert.h>

#include "../wavepe.h"
#include "flush.h"
#include "simd_math.h"

#define PASTE2_(a, b)    a##b
#define PASTE2(a, b)     PASTE2_(a, b)
#define PASTE3_(a, b, c) a##_##b##_##c
#define PASTE3(a, b, c)  PASTE3_(a, b, c)
#define NAME(op)         PASTE3(op, TYPE, VARIANT) /* rope_f32_avx2 */

/* ---- the storage type: elements in memory */
#define T           TYPE
#define LOAD        PASTE2(load_, TYPE)        /* (p, stride, count): V, missing lanes 0 */
#define STORE       PASTE2(store_, TYPE)       /* (p, stride, count, V) */
#define LOAD_PAIRS  PASTE2(load_pairs_, TYPE)  /* (p, V *evens, V *odds), of 2 * LANES elements */
#define STORE_PAIRS PASTE2(store_pairs_, TYPE) /* (p, evens, odds) */
#define TWO_A_LANE  PASTE2(two_a_lane_, TYPE)  /* whether two elements fill a lane of V */
#define LOAD_WIDE   PASTE2(load_wide_, TYPE)   /* as LOAD and STORE, of double lanes */
#define STORE_WIDE  PASTE2(store_wide_, TYPE)

/* ---- what is computed in */
#define REAL            REAL_TYPE            /* one element */
#define V               PASTE2(REAL_TYPE, v) /* a vector of LANES of them */
#define LANES           ((int)(sizeof(V) / sizeof(REAL)))
#define LOAD_REAL       PASTE2(load_, REAL_TYPE)
#define STORE_REAL      PASTE2(store_, REAL_TYPE)
#define LOAD_REAL_PAIRS PASTE2(load_pairs_, REAL_TYPE)
#define REAL_ORDER      PASTE2(order_, REAL_TYPE) /* the lanes EVENS, ODDS, LOW, HIGH of two V */
#define SPLAT           PASTE2(splat_, REAL_TYPE)
#define EXP             PASTE2(exp_, REAL_TYPE)
#define TANH            PASTE2(tanh_, REAL_TYPE)
#define MAX             PASTE2(max_, REAL_TYPE)
#define ABS             PASTE2(abs_, REAL_TYPE)

/* DO(wpe_dtype, type) for each storage type that is computed in REAL */
#define EACH_STORAGE         PASTE2(EACH_STORAGE_, REAL_TYPE)
#define EACH_STORAGE_f32(DO) DO(WPE_F32, f32) DO(WPE_BF16, bf16) DO(WPE_F16, f16)
#define EACH_STORAGE_f64(DO) DO(WPE_F64, f64)
#define OWN_STORAGE          PASTE2(OWN_STORAGE_, REAL_TYPE) /* of REAL itself */
enum { OWN_STORAGE_f32 = WPE_F32, OWN_STORAGE_f64 = WPE_F64 };

INLINE int is_aligned(const void *p, uintptr_t bytes) { return (uintptr_t)p % bytes == 0; }

/* ---- sizes */
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
INLINE int64_t round_down(int64_t x, int64_t step) { return x / step * step; }

#endif
