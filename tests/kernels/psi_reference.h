/* psi_reference.h: the mother wavelets of METHODS 1 [W], and bounds of the errors of double
 * arithmetic. */
#ifndef WAVEPE_PSI_REFERENCE_H
#define WAVEPE_PSI_REFERENCE_H

#include "check.h"

typedef struct {
    wide value, error;
} bounded_value;

/* Return psi(distance / scale). step_type is the type to which haar, which jumps, rounds the
 * quotient. */
bounded_value psi_of(int kind, double distance, double scale, int step_type);

/* Compute the partial derivatives of psi by scale and by shift, where distance = t - shift. */
void psi_gradient_of(int kind, double distance, double scale, bounded_value *by_scale,
                     bounded_value *by_shift);

/* Return a random scale: a power of two or another number. With `special` also 0, infinite, NaN,
 * negative, tiny and huge numbers. */
double random_scale(int special);

#endif
