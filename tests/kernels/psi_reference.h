/* psi_reference.h: the mother wavelets of METHODS 1 [W], and what double arithmetic may be off. */
#ifndef WAVEPE_PSI_REFERENCE_H
#define WAVEPE_PSI_REFERENCE_H

#include "check.h"

typedef struct {
    wide value, error;
} judged;

/* psi(distance / scale). step_type: what haar, which jumps, rounds the quotient to. */
judged psi_of(int kind, double distance, double scale, int step_type);

/* Its partial derivatives by scale and by shift, where distance is t - shift. */
void psi_gradient_of(int kind, double distance, double scale, judged *by_scale, judged *by_shift);

/* A random scale: powers of two, others, and for `special` 0, infinite, negative, tiny and huge. */
double random_scale(int special);

#endif
