/* attention_call.h: the functions that the checks of attention share. */
#ifndef WAVEPE_CHECK_ATTENTION_CALL_H
#define WAVEPE_CHECK_ATTENTION_CALL_H

#include "attention.h"

/* A kernel of the call's compute type, for CALL. */
#define KERNEL(c, member) attention[(c)->compute_type == WPE_F64].member

/* Check that the results lie within their bounds, that they are NaN where they depend on a NaN, and
 * that nothing else was written. Report errors; return whether all is right. has_infinity: a
 * result that should be NaN may be anything. */
int check_result(const char *what, const array *got, const bounded_matrix *want, int has_infinity);

/* Return whether the call is run on this variant. */
int is_called(const attention_call *c, const wpe_kernels *k);

/* The bits of a result, and the variant that gave them. */
typedef struct {
    const wpe_kernels *of;
    void *bits;
} kept_bits;
kept_bits new_bits(const array *x);
/* Compare the bits with the kept ones, if both variants must give equal bits. Else keep these. */
void compare_variants(const char *what, const wpe_kernels *k, const array *x, kept_bits *kept);

/* How keys are packed: so many tiles in one call (0: all), from the last to the first if
 * `backwards`. */
typedef struct {
    int64_t tiles;
    int backwards;
} packing;
packing draw_packing(void);

/* Pack the table, and set the zones of the call to `zones`. Return 0 if a kernel failed. */
int pack_table(const wpe_kernels *k, attention_call *c, wpe_zone *zones);

/* Pack keys, values and the table, and allocate a workspace. Return 0 if a kernel failed. */
typedef struct {
    wpe_attention_sizes sizes;
    wpe_zone zones[MOST_ZONES];
    array packed, workspace;
} prepared;
int prepare(const wpe_kernels *k, attention_call *c, packing how, prepared *to);

void check_attention_backward(void);
void check_attention_store(void);
void bench_attention(void);
void bench_attention_backward(void);
void bench_attention_decode(void);

#endif
