/* bounds.h: errors that are allowed beside the rounding of the result, each with its reason.
 *
 * ULPS of a function of simd_math.h or angle.h are what check_functions.c finds at most, rounded
 * up; all other bounds count roundings, in unit roundoffs (half an ulp of 1) of what is computed
 * in. */
#ifndef WAVEPE_BOUNDS_H
#define WAVEPE_BOUNDS_H

/* ---- functions, in ulp */
#define EXP_F64_ULPS  1.25 /* found: 1.17 without FMA, .90 with it */
#define EXP_F32_ULPS  1.35 /* 1.28; its contract says 2 */
#define TANH_F32_ULPS 1.45 /* 1.35; its contract says 3 */
#define TANH_F64_ULPS 2.5  /* 2.18, of the C library */
#define SINCOS_ULPS   0.85 /* .79, next to zeros of the result, too */

/* ---- kernels, in unit roundoffs; an ulp is at most two */
#define EXP_UNITS    (2 * EXP_F64_ULPS)
#define SINCOS_UNITS (2 * SINCOS_ULPS)

/* of |a cos| + |b sin|: two products and their difference round once each, and the first product's
 * rounding is the difference's, too, or smaller */
#define ROPE_UNITS 2.0

/* of |angle|, where position is no integer to 2^31: three products and their sum round */
#define ANGLE_UNITS 3.0

/* of |result| + |lo|, where |hi| > 2^31: sin hi cos lo + cos hi sin lo, each to an ulp, two
 * products and a sum */
#define FAR_UNITS 5.0

/* of (terms + 1) sum |q p|: any order of adding products */
#define SUM_UNITS 1.0

/* Bounds of the first order are taken that much larger, for products of roundings and for the
 * reference's own. */
#define SLACK 1.01

/* exp is 0 below, so that nothing is subnormal */
#define EXP_F64_LEAST (-708.0L)
#define EXP_F32_LEAST (-87.0L)

#endif
