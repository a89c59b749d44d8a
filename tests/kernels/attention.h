/* attention.h: the reference of attention, and random calls.
 *
 * check_attention*.c call the kernels. attention_draw.c and attention_options.c draw the arguments.
 * attention_reference.c computes the expected results. */
#ifndef WAVEPE_CHECK_ATTENTION_H
#define WAVEPE_CHECK_ATTENTION_H

#include "check.h"

/* ---- the reference: float64, dense, formula for formula ----------------------------------------
 *
 * METHODS 1 [W], 3 [S] [X] [A], and the text of wavepe.h:
 *     score = (q_i . k_j + r_i . p[delta - first_delta]) scale - slope |delta| + bias[delta - ...]
 *     softcap tanh(score / softcap), softmax over the keys that i sees and the sink, dropout, times
 * v It shares nothing with csrc but the structs for options, strides and masks. It never reads the
 * data of a hidden pair. So a NaN reaches only the results that depend on it. */

/* Values and the allowed errors: (rows, cols), row-major. */
typedef struct {
    double *value, *bound;
    int64_t rows, cols;
} bounded_matrix;

/* One query head: the values of its arrays as contiguous matrices. */
typedef struct {
    const wpe_attention *a;
    const double *q, *k, *v;
    const double *r;              /* q if the call has no r */
    const double *p;              /* in rising delta */
    const double *p_size;         /* for each element of p, the sum of |terms| that it is made of */
    const double *bias;           /* in rising delta */
    const double *grad_out, *out; /* backward: (queries, value_size) */
    const double *lse, *grad_lse; /* backward: (queries) */
    int64_t most_rank;            /* the largest rank of a zone with a basis */
    int heads;                    /* how many heads add to dk, dv and dp */
    double unit, tiny;            /* unit roundoff and smallest normal of the compute type */
} attention_head;

/* A value of NULL is not computed. dq, dr and dbias belong to one head. To dk, dv and dp the
 * reference adds. */
typedef struct {
    bounded_matrix out, lse, dq, dr, dbias, dk, dv, dp;
} attention_results;

bounded_matrix new_bounded(int64_t rows, int64_t cols);
void attention_forward_reference(const attention_head *h, const attention_results *to);
void attention_backward_reference(const attention_head *h, const attention_results *to);

/* Return the hash that dropout compares with drop_below. */
uint32_t dropout_hash(const wpe_attention *a, int64_t i, int64_t j);

/* Return whether query i sees key j. in_range ignores segments and masks. */
int sees(const wpe_attention *a, int64_t i, int64_t j);
int in_range(const wpe_attention *a, int64_t i, int64_t j);

/* ---- a random call ------------------------------------------------------------------------- */

enum { MOST_HEADS = 2, MOST_ZONES = 4 };

/* A table. Zone z is rows[z] (rows, rank), and basis[z] (table_size, rank) if it has one. */
typedef struct {
    wpe_relative relative;      /* pack_table() sets its zones */
    wpe_zone zones[MOST_ZONES]; /* only rows and rank are set */
    int has_basis[MOST_ZONES];
    array rows[MOST_ZONES], basis[MOST_ZONES];
} drawn_table;

typedef struct {
    enum wpe_pass pass; /* for decode, too, it is WPE_FORWARD */
    int decodes;
    int all_variants; /* 0: not avx2x2, which is 30 to 100 times slower than avx2 */
    int heads;
    int storage, compute_type; /* wpe_dtype: of tensors; of sums, lse and workspace */
    wpe_attention a[MOST_HEADS];
    array q[MOST_HEADS], r[MOST_HEADS], bias[MOST_HEADS], k, v;
    array grad_out[MOST_HEADS], grad_lse[MOST_HEADS], out[MOST_HEADS], lse[MOST_HEADS];
    int has_r, has_grad_lse, wants_dp, wants_dbias;
    drawn_table table;
    int has_infinity; /* 1: a result that should be NaN may be anything */
    attention_head head[MOST_HEADS];
    attention_results want[MOST_HEADS]; /* dk, dv and dp are the same sums in all heads */
} attention_call;

/* Draw which keys each query sees, scale, slope, softcap, dropout and the sink. gentle: no weight
 * of a seen pair comes close to underflow. draw_head_options draws what may differ in the second
 * head. */
void draw_options(wpe_attention *a, int gentle);
void draw_head_options(wpe_attention *a);

/* Draw a call for the pass or for decode, compute its expected results, and describe it. */
void draw_attention(attention_call *c, enum wpe_pass pass, int decodes);

wpe_matrix matrix_of(const array *x);
wpe_matrix_out matrix_out_of(const array *x);

#endif
