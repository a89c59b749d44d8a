/* attention.h: what the checks of attention share: the reference, and a random call.
 *
 * check_attention*.c call the kernels, attention_draw.c and attention_options.c draw their
 * arguments, and attention_reference.c says what they should give. */
#ifndef WAVEPE_CHECK_ATTENTION_H
#define WAVEPE_CHECK_ATTENTION_H

#include "check.h"

/* ---- the reference: float64, dense, formula for formula ----------------------------------------
 *
 * METHODS 1 [W], 3 [S] [X] [A], and the text of wavepe.h:
 *     score = (q_i . k_j + r_i . p[delta - first_delta]) scale - slope |delta| + bias[delta - ...]
 *     softcap tanh(score / softcap), softmax over the keys that i sees, dropout, times v
 * Nothing is shared with csrc but the structs that carry options, strides and masks. What a pair
 * that is hidden holds is never read, so a NaN reaches what sees it and nothing else. */

/* Values and the errors allowed: (rows, cols), row-major. */
typedef struct {
    double *value, *bound;
    int64_t rows, cols;
} judged;

/* One query head, as dense matrices of the values that its arrays hold. */
typedef struct {
    const wpe_attention *a;
    const double *q, *k, *v;
    const double *r;              /* q where it is not apart */
    const double *p, *p_size;     /* rows in rising delta; the sums of their terms' sizes */
    const double *bias;           /* in rising delta */
    const double *grad_out, *out; /* backward: (queries, value_size) */
    const double *lse, *grad_lse; /* backward: (queries) */
    int64_t most_rank;            /* of the table's zones */
    int heads;                    /* how many add to dk, dv and dp */
    double unit, tiny;            /* of the kernel's own type: unit roundoff, smallest normal */
} attention_head;

/* NULL values: not wanted. dq, dr, dbias: of this head; dk, dv, dp: added to. */
typedef struct {
    judged out, lse, dq, dr, dbias, dk, dv, dp;
} attention_results;

judged new_judged(int64_t rows, int64_t cols);
void attention_forward_reference(const attention_head *h, const attention_results *to);
void attention_backward_reference(const attention_head *h, const attention_results *to);

/* What dropout compares with drop_below. */
uint32_t dropout_hash(const wpe_attention *a, int64_t i, int64_t j);

/* Whether query i sees key j, and by its ranges alone: not by segments and masks. */
int sees(const wpe_attention *a, int64_t i, int64_t j);
int in_range(const wpe_attention *a, int64_t i, int64_t j);

/* ---- a random call ------------------------------------------------------------------------- */

enum { MOST_HEADS = 2, MOST_ZONES = 4 };

/* A table: a zone is rows (rows, rank), and basis (head_size, rank) where its rank is low. */
typedef struct {
    wpe_relative relative;      /* its zones are those below, once they are packed */
    wpe_zone zones[MOST_ZONES]; /* rows and rank only */
    int has_basis[MOST_ZONES];
    array rows[MOST_ZONES], basis[MOST_ZONES];
    array dense; /* decode: (rows, head_size) */
} drawn_table;

typedef struct {
    enum wpe_pass pass;
    int is_for_all; /* variants: compilers make avx2x2 30 to 100 times slower than avx2 */
    int heads;
    int storage, own; /* wpe_dtype: of tensors; of sums, lse and workspace */
    wpe_attention a[MOST_HEADS];
    array q[MOST_HEADS], r[MOST_HEADS], bias[MOST_HEADS], k, v;
    array grad_out[MOST_HEADS], grad_lse[MOST_HEADS], out[MOST_HEADS], lse[MOST_HEADS];
    int has_r, has_grad_lse, wants_dp, wants_dbias;
    drawn_table table;
    int has_infinity; /* then what it reaches is not judged */
    attention_head head[MOST_HEADS];
    attention_results want[MOST_HEADS]; /* dk, dv and dp are the same sums in all */
} attention_call;

/* Who sees whom, scale, slope, softcap and dropout; gentle: every seen weight is far from
 * underflow. And what may differ in the second head. */
void draw_options(wpe_attention *a, int gentle);
void draw_head_options(wpe_attention *a);

/* Draws a call for the pass, computes what it should give, and describes it. */
void draw_attention(attention_call *c, enum wpe_pass pass);

wpe_matrix matrix_of(const array *x);
wpe_matrix_out matrix_out_of(const array *x);

#endif
