/* psi_reference.c: the mother wavelets and their derivatives, with first-order bounds.
 *
 * A relative error of one unit in u changes psi by |u psi'(u)| units. Each rounded factor adds one
 * unit of the value. A rounding of the exponent x of exp(x) adds |x| units. */
#include "bounds.h"
#include "psi_reference.h"

#include <math.h>

/* Return whether exp_f64 may give 0 for exp(-x). */
static int may_be_dropped(wide x) { return x > -EXP_F64_LEAST * (1 - 1e-12L); }

static bounded_value bell_error(wide value, wide units, int dropped) {
    const wide unit = unit_roundoff(WPE_F64) * SLACK;
    return (bounded_value){value, dropped ? fabsl(value) + unit * units : unit * units};
}

static wide step(wide u) { return u >= -1 && u < -0.5L ? -1 : u >= -0.5L && u < 0 ? 1 : 0; }

bounded_value psi_of(int kind, double distance, double scale, int step_type) {
    if (isnan(distance) || isnan(scale) || scale == 0) return (bounded_value){NAN, 0};
    const wide u = (wide)distance / scale, square = u * u;
    if (isnan(u)) return (bounded_value){NAN, 0};
    if (isinf(u)) return (bounded_value){0, 0};
    wide bell, cosine;
    switch (kind) {
        case WPE_RICKER: /* (1 - u) (1 + u) exp(-u^2 / 2): two sums, two products, exp */
            bell = expl(-square / 2);
            return bell_error((1 - square) * bell,
                              bell * (fabsl(square * (square - 3)) +
                                      fabsl(1 - square) * (4 + EXP_UNITS + square / 2)),
                              may_be_dropped(square / 2));
        case WPE_GAUSSIAN:
            bell = expl(-square);
            return bell_error(bell, bell * (3 * square + EXP_UNITS), may_be_dropped(square));
        case WPE_MORLET: /* the cosine is that of the distance, without scale; one product */
            bell = expl(-square);
            cosine = cosl(distance);
            return bell_error(bell * cosine,
                              bell * fabsl(cosine) * (3 * square + EXP_UNITS + SINCOS_UNITS + 1),
                              may_be_dropped(square));
        default: /* haar: exact for the rounded u */
            return (bounded_value){
                step(step_type == WPE_F64 ? (wide)(distance / scale) : rounded(step_type, u)), 0};
    }
}

void psi_gradient_of(int kind, double distance, double scale, bounded_value *by_scale,
                     bounded_value *by_shift) {
    const wide u = (wide)distance / scale, square = u * u, size = fabsl(u);
    *by_scale = *by_shift = (bounded_value){isnan(u) && kind != WPE_HAAR ? NAN : 0, 0};
    if (!isfinite(u)) return; /* in the tails the gradient is 0, whatever the scale is */
    wide bell = expl(kind == WPE_RICKER ? -square / 2 : -square), cosine = 1, sine = 0;
    bounded_value by_u = {0, 0}, by_distance = {0, 0};
    const int dropped = may_be_dropped(kind == WPE_RICKER ? square / 2 : square);
    const wide units = 2 + EXP_UNITS; /* two products and exp */
    switch (kind) {
        case WPE_RICKER: /* u (u^2 - 3) exp(-u^2 / 2) */
            by_u = bell_error(u * (square - 3) * bell,
                              bell * size *
                                  (fabsl(square * square - 6 * square + 3) + square +
                                   fabsl(square - 3) * (1 + units + square / 2)),
                              dropped);
            break;
        case WPE_MORLET: /* -2 u exp(-u^2) cos d by u, -exp(-u^2) sin d by d */
            cosine = cosl(distance);
            sine = sinl(distance);
            by_distance = bell_error(
                -bell * sine, bell * fabsl(sine) * (3 * square + units + SINCOS_UNITS), dropped);
            /* fall through */
        case WPE_GAUSSIAN:
            by_u = bell_error(-2 * u * bell * cosine,
                              bell * size * fabsl(cosine) *
                                  (fabsl(4 * square - 2) + 2 * (square + units + SINCOS_UNITS)),
                              dropped);
            break;
    }
    /* -(by_u u / scale) and -(by_u / scale + by_distance) */
    const wide unit = unit_roundoff(WPE_F64), a = fabsl((wide)scale);
    by_scale->value = -by_u.value * u / scale;
    by_scale->error = (by_u.error * size + 3 * unit * fabsl(by_u.value * u)) / a;
    by_shift->value = -by_u.value / scale - by_distance.value;
    by_shift->error = (by_u.error + unit * fabsl(by_u.value)) / a + by_distance.error +
                      unit * (fabsl(by_u.value) / a + fabsl(by_distance.value));
}

double random_scale(int special) {
    static const double specials[] = {0,     -0.0,  INFINITY, -INFINITY, NAN,       -1,
                                      1e-30, 1e300, 1e-310,   0x1p-1022, 0x1p-1074, 0x1p1023};
    if (special && chance(0.15)) return specials[random_int(0, 11)];
    if (chance(0.5)) return ldexp(1, (int)random_int(-2, 12));
    const double scale = exp2(random_uniform(-6, 14));
    return special && chance(0.1) ? -scale : scale;
}
