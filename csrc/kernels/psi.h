/* psi.h: every mother wavelet and its derivative. METHODS 1 [W].
 *
 * CPU and GPU compile this same file. Before they include it they include angle.h and define its
 * macros, REAL_NARROW(x), which rounds to float32, and REAL_EXP(x), used for x <= 0 only, with
 * exp(-inf) = 0. */
#ifndef WAVEPE_PSI_H
#define WAVEPE_PSI_H

/* CASE(kind) for each kind. A switch made of it calls one function with the kind as a constant, and
 * the compiler then keeps one case of psi_at. */
#define EACH_KIND(CASE) CASE(WPE_RICKER) CASE(WPE_GAUSSIAN) CASE(WPE_MORLET) CASE(WPE_HAAR)

/* Return u = distance / scale, where distance = t - shift. A scale of 0 gives NaN. */
INLINE REAL psi_quotient(REAL distance, REAL scale) {
    return REAL_SELECT(scale == 0.0, REAL_CONST(NAN), distance / scale);
}

/* Return psi for u = distance / scale. narrow: haar, which jumps, first rounds u to float32.
 * Callers set it if their values are float32 or smaller. */
INLINE REAL psi_at(int kind, REAL distance, REAL u, int narrow) {
    const REAL zero = REAL_CONST(0.0), one = REAL_CONST(1.0);
    REAL value, s, c;
    /* For |u| > 38 exp underflows for every kind, so psi is 0. Without this test inf * 0 would be
     * NaN. And it saves time: most elements of a long table are such tails. */
    if (REAL_ALL(REAL_ABS(u) > 38.0)) return zero;
    switch (kind) {
        case WPE_RICKER: /* (1 - u^2) exp(-u^2/2); the factors keep precision next to u = 1 */
            value = (1.0 - u) * (1.0 + u) * REAL_EXP(-0.5 * u * u);
            break;
        case WPE_GAUSSIAN: /* exp(-u^2), without a factor of 1/2 */
            value = REAL_EXP(-u * u);
            break;
        case WPE_MORLET: /* exp(-u^2) cos(t - shift): scale does not enter the cosine */
            sincos_sum(distance, zero, &s, &c);
            value = REAL_EXP(-u * u) * c;
            break;
        default: /* haar: +1 on [-1/2, 0), -1 on [-1, -1/2), 0 elsewhere */
            if (narrow) u = REAL_NARROW(u);
            value = REAL_SELECT(u < -0.5, -one, one);
            value = REAL_SELECT((u >= -1.0) & (u < 0.0), value, zero);
            return REAL_SELECT(u == u, value, u);
    }
    return REAL_SELECT(REAL_ABS(u) > 38.0, zero, value);
}

/* Partial derivatives of psi by u, and by distance where it stands outside u (morlet's cosine). */
INLINE void psi_slope(int kind, REAL distance, REAL u, REAL *by_u, REAL *by_distance) {
    const REAL zero = REAL_CONST(0.0);
    REAL bell, s, c;
    *by_u = *by_distance = zero;
    switch (kind) {
        case WPE_RICKER:
            *by_u = u * (u * u - 3.0) * REAL_EXP(-0.5 * u * u);
            break;
        case WPE_GAUSSIAN:
            *by_u = -2.0 * u * REAL_EXP(-u * u);
            break;
        case WPE_MORLET:
            sincos_sum(distance, zero, &s, &c);
            bell = REAL_EXP(-u * u);
            *by_u = -2.0 * u * bell * c;
            *by_distance = -bell * s;
            break;
        default: /* haar is constant between its jumps */
            return;
    }
    *by_u = REAL_SELECT(REAL_ABS(u) > 38.0, zero, *by_u);
    *by_distance = REAL_SELECT(REAL_ABS(u) > 38.0, zero, *by_distance);
}

/* Partial derivatives of psi(distance / scale) by scale and by shift: distance = t - shift. */
INLINE void psi_gradient(int kind, REAL distance, REAL scale, REAL *by_scale, REAL *by_shift) {
    REAL u = distance / scale, by_u, by_distance;
    psi_slope(kind, distance, u, &by_u, &by_distance);
    *by_scale = -(by_u * u / scale);
    *by_shift = -(by_u / scale + by_distance);
    /* In the tails, and for haar everywhere, the gradient is 0. inf * 0 and 0 / 0 would be NaN. */
    *by_scale = REAL_SELECT((by_u == 0.0) & (by_distance == 0.0), REAL_CONST(0.0), *by_scale);
    *by_shift = REAL_SELECT((by_u == 0.0) & (by_distance == 0.0), REAL_CONST(0.0), *by_shift);
}

#endif
