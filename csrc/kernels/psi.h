/* psi.h: every mother wavelet and its derivative, written once. METHODS 1 [W].
 *
 * The includer says what it computes on, as for angle.h, which comes before; and REAL_NARROW, which
 * rounds to float32, and REAL_EXP for x <= 0 with exp(-inf) = 0. */
#ifndef WAVEPE_PSI_H
#define WAVEPE_PSI_H

/* For a switch that calls one function with the kind as a constant: psi_at then folds to one case.
 */
#define EACH_KIND(CASE) CASE(WPE_RICKER) CASE(WPE_GAUSSIAN) CASE(WPE_MORLET) CASE(WPE_HAAR)

/* u = distance / scale, distance = t - shift; a scale of 0 gives NaN. */
INLINE REAL psi_quotient(REAL distance, REAL scale) {
    return REAL_SELECT(scale == 0.0, REAL_CONST(NAN), distance / scale);
}

/* psi at u = distance / scale. `narrow`: the caller's values are float32 or smaller; only haar,
 * which jumps, can tell. */
INLINE REAL psi_at(int kind, REAL distance, REAL u, int narrow) {
    const REAL zero = REAL_CONST(0.0), one = REAL_CONST(1.0);
    REAL value, s, c;
    /* Past 38 exp has underflowed for every kind: tails are 0, where inf * 0 would be NaN. Most of
     * a long table is tail. */
    if (REAL_ALL(REAL_ABS(u) > 38.0)) return zero;
    switch (kind) {
        case WPE_RICKER: /* (1 - u^2) exp(-u^2/2), as factors: keeps precision next to u = 1 */
            value = (1.0 - u) * (1.0 + u) * REAL_EXP(-0.5 * u * u);
            break;
        case WPE_GAUSSIAN: /* exp(-u^2), no 1/2 */
            value = REAL_EXP(-u * u);
            break;
        case WPE_MORLET: /* exp(-u^2) cos(t - shift): the cosine is not scaled */
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

/* Partial derivatives of psi by u and, where distance also stands alone (morlet), by distance. */
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
        default: /* haar: steps, zero between them */
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
    /* In the tails, and for haar everywhere, 0 whatever u and scale are (inf * 0, 0 / 0). */
    *by_scale = REAL_SELECT((by_u == 0.0) & (by_distance == 0.0), REAL_CONST(0.0), *by_scale);
    *by_shift = REAL_SELECT((by_u == 0.0) & (by_distance == 0.0), REAL_CONST(0.0), *by_shift);
}

#endif
