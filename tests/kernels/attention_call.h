/* attention_call.h: what the checks of attention share beside the random call. */
#ifndef WAVEPE_CHECK_ATTENTION_CALL_H
#define WAVEPE_CHECK_ATTENTION_CALL_H

#include "attention.h"

/* The kernels of the call's own type. */
#define KERNEL(c, member) attention[(c)->own == WPE_F64].member

/* Whether results lie within their bounds, NaN stands where something met NaN, and nothing else was
 * written; reports what is wrong. has_infinity: what should be NaN may be anything. */
int judge(const char *what, const array *got, const judged *want, int has_infinity);

/* Whether a variant takes part in the call. */
int is_called(const attention_call *c, const wpe_kernels *k);

/* Bits of one variant. */
typedef struct {
    const wpe_kernels *of;
    void *bits;
} kept_bits;
kept_bits new_bits(const array *x);
/* Compares with those of the last variant that promises the same, or keeps these. */
void compare_variants(const char *what, const wpe_kernels *k, const array *x, kept_bits *kept);

/* Keys are packed by so many tiles at once (0: all), and the last first, where `backwards`. */
typedef struct {
    int64_t tiles;
    int backwards;
} packing;
packing draw_packing(void);

/* Packs keys, values and the table, and takes a workspace; 0 where a kernel failed. */
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
