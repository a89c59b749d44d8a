/* frame.h: what the files of the frame share, and the checks do not use. */
#ifndef WAVEPE_FRAME_H
#define WAVEPE_FRAME_H

#include "check.h"

void seed_random(uint64_t seed);

/* Takes back all memory of a case. */
void end_case(void);

/* Whether an element must be written, as own_rows said. */
int is_owned(const array *x, int64_t i, int64_t j, int64_t k);

/* Where an address lies beside the arrays of this case, in words. */
const char *place_of(const void *address);

/* Of calls: catches what kernels raise from now on. */
void catch_signals(void);

/* ---- report.c: variants, counts, failures -----------------------------------------------------
 */

enum { MOST_VARIANTS = 8 };

typedef struct {
    const kernel_check *check; /* what runs */
    uint64_t seed;
    int64_t number;
} check_case;
extern check_case current;
extern const char *program_name;

void list_variants(const char *only); /* NULL: all */
const char *current_variant(void);
int failures(void);
void count_call(ptrdiff_t entry);
/* Prints calls per kernel and variant. With `all`, entries that were never called are failures. */
void print_counts(int all);

#endif
