/* angle.h: an angle as the exact product position * frequency, and its sine and cosine. METHODS 2
 * [R]; docs/internals/rope-exactness.md derives the bounds.
 *
 * CPU and GPU compile this same file. Before they include it they define REAL (CPU: a vector of
 * double lanes, GPU: a double), REAL_CONST(c), REAL_SELECT(mask, yes, no), REAL_ALL(mask),
 * REAL_ABS, REAL_BITS and REAL_OF_BITS (to and from unsigned integers of the same bits), and
 * REAL_SINCOS_LARGE(hi, lo, &s, &c), which calls sincos_one_large for each |hi| > 2^31. */
#ifndef WAVEPE_ANGLE_H
#define WAVEPE_ANGLE_H

/* Adding 1.5 * 2^52 rounds a number to an integer, and puts that integer into the low bits. */
#define ROUNDER 6755399441055744.0

/* Return sum and error with a + b = sum + error exactly (Knuth). FMA contraction cannot change it:
 * it has no products, and where a caller passes a product as b, that product is exact. */
INLINE REAL two_sum(REAL a, REAL b, REAL *error) {
    REAL sum = a + b;
    REAL b_part = sum - a;
    *error = (a - (sum - b_part)) + (b - b_part);
    return sum;
}

/* Return x with the low 31 of its 53 bits cleared. Its product with a 31-bit integer is exact. */
INLINE REAL high_bits(REAL x) { return REAL_OF_BITS(REAL_BITS(x) & ~(uint64_t)0x7fffffff); }

/* hi + lo = position * f. There is no rounding error if position is an integer and |position| <=
 * 2^31. */
INLINE void exact_product(REAL position, REAL f, REAL *hi, REAL *lo) {
    REAL f1 = high_bits(f), f2 = high_bits(f - f1), f3 = (f - f1) - f2;
    REAL e1, e2;
    REAL sum = two_sum(position * f1, position * f2, &e1);
    *hi = two_sum(sum, position * f3, &e2);
    *lo = e1 + e2;
}

/* sin and cos of hi + lo for |hi| > 2^31, where the reduction of sincos_sum does not work. No
 * position of a text needs it, but the morlet wavelet takes every finite argument. */
INLINE void sincos_one_large(double hi, double lo, double *s, double *c) {
    double sh = sin(hi), ch = cos(hi), sl = sin(lo), cl = cos(lo);
    *s = sh * cl + ch * sl;
    *c = ch * cl - sh * sl;
}

/* pi/2 as a sum of five parts. The first four have at most 22 bits, so their products with a 31-bit
 * integer are exact. */
#define PIO2_1 0x1.921fbp+0
#define PIO2_2 0x1.5110bp-22
#define PIO2_3 0x1.184698p-44
#define PIO2_4 0x1.3198ap-69
#define PIO2_5 0x1.701b839a25205p-92

/* sin and cos of hi + lo. The reduction is Cody-Waite's: k = round((hi + lo) / (pi/2)) and r = hi +
 * lo - k pi/2. r is kept as the sum r + tail. Its absolute error is below 2^-104, and below 2^-113
 * where |r| < 2^-14: so results next to a zero keep their relative precision. Then fdlibm's
 * polynomials are used on |r| <= pi/4. */
INLINE void sincos_sum(REAL hi, REAL lo, REAL *sine, REAL *cosine) {
    REAL shifted = hi * 0x1.45f306dc9c883p-1 + ROUNDER; /* 2/pi */
    REAL k = shifted - ROUNDER;
    REAL e1, e2, e3, tail;
    REAL r = (hi - k * PIO2_1) - k * PIO2_2; /* both exact */
    r = two_sum(r, lo, &e1);
    r = two_sum(r, -k * PIO2_3, &e2);
    r = two_sum(r, -k * PIO2_4, &e3);
    r = two_sum(r, ((e1 + e2) + e3) - k * PIO2_5, &tail);

    REAL z = r * r;
    REAL s = REAL_CONST(1.58969099521155010221e-10);
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = r - ((z * (0.5 * tail - z * r * s) - tail) + z * r * 1.66666666666666324348e-01);

    REAL c = REAL_CONST(-1.13596475577881948265e-11);
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    REAL half = 0.5 * z, w = 1.0 - half;
    c = w + (((1.0 - w) - half) + (z * z * c - r * tail));

    /* the low bits of k say which quadrant the angle lies in */
    REAL odd = REAL_SELECT((REAL_BITS(shifted) & 1) != 0, c, s);
    REAL even = REAL_SELECT((REAL_BITS(shifted) & 1) != 0, s, c);
    *sine = REAL_OF_BITS(REAL_BITS(odd) ^ ((REAL_BITS(shifted) & 2) << 62));
    *cosine = REAL_OF_BITS(REAL_BITS(even) ^ (((REAL_BITS(shifted) + 1) & 2) << 62));

    int in_range = REAL_ALL(REAL_ABS(hi) <= 0x1p31);
    if (__builtin_expect(!in_range, 0)) REAL_SINCOS_LARGE(hi, lo, sine, cosine);
}

#endif
