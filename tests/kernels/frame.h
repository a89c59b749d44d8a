/* frame.h: what the files of the frame share, and the checks do not use. */
#ifndef WAVEPE_FRAME_H
#define WAVEPE_FRAME_H

#include "check.h"

void seed_random(uint64_t seed);

/* Whether all arrays of this case are dense: the fastest ways want all strides to be 1. */
void draw_layouts(void);

/* Takes back all memory of a case. */
void end_case(void);

/* Whether an element must be written, as own_rows said. */
int is_owned(const array *x, int64_t i, int64_t j, int64_t k);

/* Where an address lies beside the arrays of this case, in words. */
const char *place_of(const void *address);

/* ---- call.c ------------------------------------------------------------------------------------
 */

/* Catches what kernels raise from now on. */
void catch_signals(void);

/* Rounding and the treatment of subnormals, which a kernel must leave as they were. */
uint64_t processor_modes(void);
void set_processor_modes(uint64_t modes);
#if defined(__x86_64__)
#define MODE_BIT 0x8000u /* results that are subnormal become 0 */
#else
#define MODE_BIT (1u << 24)
#endif

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

int list_variants(const char *only); /* NULL: all; returns how many */
const char *current_variant(void);
int variant_index(void);
int failures(void);
void hush(int quiet); /* counts failures without a word */
void count_call(ptrdiff_t entry);
/* Prints calls per kernel and variant. With `all`, entries that were never called are failures. */
void print_counts(int all);

/* self_test.c: whether the checker misses a planted fault. */
int self_test(void);

/* check_functions.c: prints the largest errors found. */
void print_worst_ulps(void);

#endif
