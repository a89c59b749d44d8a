/* frame.h: the functions that the checker's own files share. Checks do not use them. */
#ifndef WAVEPE_FRAME_H
#define WAVEPE_FRAME_H

#include "check.h"

void seed_random(uint64_t seed);

/* Draw whether all arrays of this case are dense. Without such cases the fastest code paths, which
 * need strides of 1, would hardly ever run. */
void draw_layouts(void);

/* Free all memory of a case. */
void end_case(void);

/* Return whether a kernel must write this element (see expect_rows). */
int must_be_written(const array *x, int64_t i, int64_t j, int64_t k);

/* Return a text that says where an address lies, relative to the arrays of this case. */
const char *describe_address(const void *address);

/* ---- call.c ---------------------------------------------------------------------------------- */

/* From now on catch the signals that kernels raise. */
void catch_signals(void);

/* The processor's modes of rounding and of subnormals. A kernel must not change them. */
uint64_t processor_modes(void);
void set_processor_modes(uint64_t modes);
#if defined(__x86_64__)
#define MODE_BIT 0x8000u /* subnormal results become 0 */
#else
#define MODE_BIT (1u << 24)
#endif

/* ---- report.c: variants, counts, failures ---------------------------------------------------- */

enum { MOST_VARIANTS = 8 };

typedef struct {
    const kernel_check *check;
    uint64_t seed;
    int64_t number;
} check_case;
extern check_case current;
extern const char *program_name;

/* List the variants to check: the named one, or all for NULL. Return how many there are. */
int list_variants(const char *only);
const char *current_variant(void);
int variant_index(void);
int failures(void);
/* Reset the count of failures. quiet: count failures, but do not print them. */
void set_quiet(int quiet);
void count_call(ptrdiff_t entry);
/* Print the calls per kernel and variant. With `all`, an entry without a call is a failure. */
void print_counts(int all);

/* self_test.c: check that the checker finds planted faults. Return 0 if it finds all. */
int self_test(void);

/* check_functions.c: print the largest error of each function. */
void print_worst_ulps(void);

#endif
