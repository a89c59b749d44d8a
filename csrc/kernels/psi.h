/* psi.h: every mother wavelet, written once. METHODS 1 [W].
 *
 * The includer says what it computes on: REAL (a vector of double lanes on the CPU),
 * REAL_CONST(c), REAL_SELECT(mask, yes, no), REAL_ALL(mask), REAL_ABS, REAL_COS, REAL_NARROW
 * (rounds to float32), and REAL_EXP for x <= 0 with exp(-inf) = 0. */
#ifndef WAVEPE_PSI_H
#define WAVEPE_PSI_H

/* psi at u = distance / scale, distance = t - shift. A scale of 0 gives NaN. `narrow`: the caller's
 * values are float32 or smaller; only haar, which jumps, can tell. */
INLINE REAL psi_at(int kind, REAL distance, REAL scale, int narrow) {
    const REAL zero = REAL_CONST(0.0), one = REAL_CONST(1.0);
    REAL u = REAL_SELECT(scale == 0.0, REAL_CONST(NAN), distance / scale);
    REAL value;
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
            value = REAL_EXP(-u * u) * REAL_COS(distance);
            break;
        default: /* haar: +1 on [-1/2, 0), -1 on [-1, -1/2), 0 elsewhere */
            if (narrow) u = REAL_NARROW(u);
            value = REAL_SELECT(u < -0.5, -one, one);
            value = REAL_SELECT((u >= -1.0) & (u < 0.0), value, zero);
            return REAL_SELECT(u == u, value, u);
    }
    return REAL_SELECT(REAL_ABS(u) > 38.0, zero, value);
}

#endif
