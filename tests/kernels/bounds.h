/* bounds.h: the errors that are allowed in addition to the rounding of the result, with reasons.
 *
 * ..._ULPS are the largest errors that check_functions.c finds for a function of simd_math.h or
 * angle.h, rounded up. ..._UNITS count roundings, in unit roundoffs (half an ulp of 1) of the
 * compute type. */
#ifndef WAVEPE_BOUNDS_H
#define WAVEPE_BOUNDS_H

/* ---- functions, in ulp */
#define EXP_F64_ULPS  1.25 /* found: 1.17 without FMA, .90 with it */
#define EXP_F32_ULPS  1.35 /* 1.28; its contract says 2 */
#define TANH_F32_ULPS 1.45 /* 1.35; its contract says 3 */
#define TANH_F64_ULPS 2.5  /* 2.18, of the C library */
#define SINCOS_ULPS   0.85 /* .79, next to zeros of the result, too */

/* ---- kernels, in unit roundoffs; an ulp is at most two unit roundoffs */
#define EXP_UNITS    (2 * EXP_F64_ULPS)
#define SINCOS_UNITS (2 * SINCOS_ULPS)

/* Relative to |a cos| + |b sin|. The two products are rounded, together by one unit of this sum,
 * and their difference by at most one more. */
#define ROPE_UNITS 2.0

/* Relative to |angle|, if position is not an integer within +-2^31. Three products and their sum
 * are rounded. */
#define ANGLE_UNITS 3.0

/* Relative to |result| + |lo|, if |hi| > 2^31. The result is sin hi cos lo + cos hi sin lo: four
 * functions to an ulp each, two products and a sum. */
#define LARGE_ANGLE_UNITS 5.0

/* Relative to (terms + 1) * sum of |q p|, for any order of the sum. */
#define SUM_UNITS 1.0

/* First-order bounds are multiplied by this. It covers products of roundings, and the roundings of
 * the reference itself. */
#define SLACK 1.01

/* Below these arguments exp gives 0, so that no result is subnormal. */
#define EXP_F64_LEAST (-708.0L)
#define EXP_F32_LEAST (-87.0L)

#endif
