/* template.h: the types and macros that the kernels are written in.
 *
 * Each kernel file is a template in plain C. variant.c includes it once per type, and defines
 *     VARIANT     the instruction set's name
 *     TYPE        f16, bf16, f32 or f64: the storage type, which is the type of inputs and results;
 *                 for attention and relative_bias it is the compute type
 *     REAL_TYPE   f32 or f64: the compute type, in which arithmetic is done
 * The macros below, and those of a template, expand to names made of these three. They are expanded
 * where they are used, so no macro has to be undefined between two types. To find the kernel rope,
 * search for NAME(rope). */
#ifndef WAVEPE_TEMPLATE_H
#define WAVEPE_TEMPLATE_H

/* Asserts check what a contract requires. They are on in the builds of the checker and of the
 * sanitizers. */
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

/* ---- the storage type: the elements in memory */
#define T           TYPE
#define LOAD        PASTE2(load_, TYPE)        /* (p, stride, count): a V, lanes past count are 0 */
#define STORE       PASTE2(store_, TYPE)       /* (p, stride, count, V) */
#define LOAD_PAIRS  PASTE2(load_pairs_, TYPE)  /* (p, V *evens, V *odds) from 2 * LANES elements */
#define STORE_PAIRS PASTE2(store_pairs_, TYPE) /* (p, evens, odds) */
#define SPLIT_PAIRS PASTE2(split_pairs_, TYPE) /* whether two elements fill a lane of V */
#define LOAD_WIDE   PASTE2(load_wide_, TYPE)   /* LOAD and STORE with double lanes */
#define STORE_WIDE  PASTE2(store_wide_, TYPE)

/* ---- the compute type */
#define REAL            REAL_TYPE            /* one element */
#define V               PASTE2(REAL_TYPE, v) /* a vector of LANES elements */
#define LANES           ((int)(sizeof(V) / sizeof(REAL)))
#define LOAD_REAL       PASTE2(load_, REAL_TYPE)
#define STORE_REAL      PASTE2(store_, REAL_TYPE)
#define LOAD_REAL_PAIRS PASTE2(load_pairs_, REAL_TYPE)
#define REAL_ORDER      PASTE2(order_, REAL_TYPE) /* (EVENS, LOW, EXCHANGE ...): lanes of two V */
#define SPLAT           PASTE2(splat_, REAL_TYPE)
#define EXP             PASTE2(exp_, REAL_TYPE)
#define TANH            PASTE2(tanh_, REAL_TYPE)
#define MAX             PASTE2(max_, REAL_TYPE)
#define ABS             PASTE2(abs_, REAL_TYPE)

/* DO(wpe_dtype, type) for each storage type whose compute type is REAL */
#define EACH_STORAGE         PASTE2(EACH_STORAGE_, REAL_TYPE)
#define EACH_STORAGE_f32(DO) DO(WPE_F32, f32) DO(WPE_BF16, bf16) DO(WPE_F16, f16)
#define EACH_STORAGE_f64(DO) DO(WPE_F64, f64)
#define REAL_STORAGE         PASTE2(REAL_STORAGE_, REAL_TYPE) /* the wpe_dtype of REAL */
enum { REAL_STORAGE_f32 = WPE_F32, REAL_STORAGE_f64 = WPE_F64 };

INLINE int is_aligned(const void *p, uintptr_t bytes) { return (uintptr_t)p % bytes == 0; }

/* Ask for the cache lines of bytes begin..end-1 after p, which are needed soon. They may lie past
 * the end of the array. */
INLINE void prefetch(const void *p, int64_t begin, int64_t end) {
    for (; begin < end; begin += 64) __builtin_prefetch((void *)((uintptr_t)p + (uintptr_t)begin));
}

/* ---- sizes */
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
INLINE int64_t round_down(int64_t x, int64_t step) { return x / step * step; }

#endif
