/* attention_reference.c: attention in float64, forward and backward, one query at a time. */
#include "attention.h"

#include <math.h>
#include <string.h>

/* -O2 would not vectorise the loops over a row. */
#ifndef __clang__ /* which knows no such pragma */
#pragma GCC optimize("O3")
#endif

bounded_matrix new_bounded(int64_t rows, int64_t cols) {
    const size_t bytes = (size_t)(rows * cols) * sizeof(double);
    return (bounded_matrix){scratch(bytes), scratch(bytes), rows, cols};
}

static double *doubles(int64_t count) { return scratch((size_t)count * sizeof(double)); }

/* ---- who sees whom ------------------------------------------------------------------------- */

int in_range(const wpe_attention *a, int64_t i, int64_t j) {
    const int64_t delta = i + a->offset - j;
    if (a->causal && delta < 0) return 0;
    if (delta >= a->window) return 0;
    if (j < a->first_key || j >= a->end_key) return 0;
    return !a->run_begin || (j >= a->run_begin[i] && j < a->run_end[i]);
}

int sees(const wpe_attention *a, int64_t i, int64_t j) {
    if (!in_range(a, i, j)) return 0;
    if (a->segments && a->segments[i] != a->segments[j]) return 0;
    if (a->key_mask && !a->key_mask[j * a->key_mask_stride]) return 0;
    return !a->mask || a->mask[i * a->mask_row_stride + j * a->mask_col_stride];
}

/* splitmix64 of the seed and the row's number gives 64 bits. The hash is a 32-bit mix of these bits
 * and the key's number. */
uint32_t dropout_hash(const wpe_attention *a, int64_t i, int64_t j) {
    uint64_t z = a->seed + (a->drop_row + (uint64_t)i + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z ^= z >> 30;
    z *= UINT64_C(0xBF58476D1CE4E5B9);
    z ^= z >> 27;
    z *= UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    uint32_t x = (uint32_t)j * UINT32_C(0x9E3779B9) + (uint32_t)z;
    x ^= x >> 16;
    x *= UINT32_C(0x7FEB352D);
    x ^= x >> 15;
    x ^= (uint32_t)(z >> 32);
    x *= UINT32_C(0x846CA68B);
    x ^= x >> 16;
    return x;
}

/* Return the factor that dropout gives a weight: 0 or keep_scale. */
static double kept_by_dropout(const wpe_attention *a, int64_t i, int64_t j) {
    if (!a->drop_below) return 1;
    return dropout_hash(a, i, j) >= a->drop_below ? a->keep_scale : 0;
}

/* ---- error bounds --------------------------------------------------------------------------
 *
 * A bound is a number of units times the sum of the terms' magnitudes. For a sum of n terms, in any
 * order, the number is CHAIN(n). The worst case is n. A quarter of n is what equal terms give,
 * whose errors do not average out. The relative error of a weight is twice the absolute error of
 * its score, because lse has that error, too. For float64 kernels the reference itself has errors
 * of this size. Errors of kernels reach a tenth to a third of their bounds. */
#define CHAIN(n) (8 + 0.25 * (double)(n))
enum { OF_EXP = 8, OF_TANH = 16 };

static double norm(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t c = 0; c < count; c++) sum += x[c] * x[c];
    return sqrt(sum);
}

static double *norms(const double *x, int64_t rows, int64_t cols) {
    double *to = doubles(rows);
    for (int64_t i = 0; i < rows; i++) to[i] = norm(x + i * cols, cols);
    return to;
}

static double *transposed(const double *x, int64_t rows, int64_t cols) {
    double *to = doubles(rows * cols);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) to[c * rows + i] = x[i * cols + c];
    return to;
}

/* Return the error that underflow and flushed subnormals may cause, whatever they are multiplied
 * by. */
static double floor_of(const attention_head *h) { return 1e9 * h->tiny; }

/* ---- the scores of one query ----------------------------------------------------------------- */

typedef struct {
    const attention_head *h;
    double *k_t, *v_t, *p_t; /* transposed */
    double *k_norm, *v_norm, *p_norm;
    int64_t begin, end; /* all keys that query i sees lie in begin..end-1 */
    uint8_t *seen;
    int64_t *row;                /* the table's row that each key reads, or -1 */
    double *score, *tanh, *kept; /* kept: the factor of dropout */
    double *size;                /* the magnitude of each score's terms */
    double *relative;            /* r_i . p, for each row of the table */
    double error;                /* the relative error of the weights */
} query;

static query new_query(const attention_head *h) {
    const wpe_attention *a = h->a;
    const int64_t n = a->keys, d = a->head_size, dv = a->value_size;
    const int64_t rows = a->relative ? a->relative->rows : 0, c = a->table_size;
    query s = {.h = h, .k_t = transposed(h->k, n, d), .k_norm = norms(h->k, n, d)};
    if (h->grad_out) s.v_t = transposed(h->v, n, dv);
    if (h->grad_out) s.v_norm = norms(h->v, n, dv);
    if (rows) s.p_t = transposed(h->p, rows, c);
    if (rows) s.p_norm = norms(h->p_size, rows, c);
    s.seen = scratch((size_t)n + 1);
    s.row = scratch((size_t)(n + 1) * sizeof(int64_t));
    s.score = doubles(n);
    s.tanh = doubles(n);
    s.kept = doubles(n);
    s.size = doubles(n);
    s.relative = doubles(rows);
    return s;
}

/* to[x] += sum over c of a[c] * b[c][x], for x in begin..end-1. */
static void add_products(double *restrict to, const double *a, const double *restrict b,
                         int64_t depth, int64_t b_row_stride, int64_t begin, int64_t end) {
    for (int64_t c = 0; c < depth; c++) {
        const double factor = a[c], *from = b + c * b_row_stride;
        for (int64_t x = begin; x < end; x++) to[x] += factor * from[x];
    }
}

/* to += factor * x and bound += size * |x|. */
static void add_row(double *restrict to, double *restrict bound, const double *restrict x,
                    int64_t count, double factor, double size) {
    for (int64_t c = 0; c < count; c++) to[c] += factor * x[c];
    for (int64_t c = 0; c < count; c++) bound[c] += size * fabs(x[c]);
}

static void find_seen(query *s, int64_t i) {
    const wpe_attention *a = s->h->a;
    s->begin = s->end = 0;
    for (int64_t j = 0; j < a->keys; j++) {
        if (!(s->seen[j] = (uint8_t)sees(a, i, j))) continue;
        if (!s->end) s->begin = j;
        s->end = j + 1;
        s->kept[j] = kept_by_dropout(a, i, j);
    }
}

/* Add r_i . p to the score of each seen key. */
static void add_relative(query *s, int64_t i) {
    const attention_head *h = s->h;
    const wpe_attention *a = h->a;
    const wpe_relative *p = a->relative;
    for (int64_t j = s->begin; j < s->end; j++) s->row[j] = -1;
    if (!p || !p->rows) return;
    const double *r = h->r + i * a->table_size, size = norm(r, a->table_size);
    int64_t least = p->rows, most = -1;
    for (int64_t j = s->begin; j < s->end; j++) {
        if (!s->seen[j]) continue;
        int64_t row = i + a->offset - j - p->first_delta;
        if (row < 0) row = p->beyond == WPE_EDGE ? 0 : -1;
        if (row >= p->rows) row = p->beyond == WPE_EDGE ? p->rows - 1 : -1;
        s->row[j] = row;
        if (row >= 0 && row < least) least = row;
        if (row > most) most = row;
    }
    for (int64_t x = least; x <= most; x++) s->relative[x] = 0;
    add_products(s->relative, r, s->p_t, a->table_size, p->rows, least, most + 1);
    for (int64_t j = s->begin; j < s->end; j++) {
        if (s->row[j] < 0) continue;
        s->score[j] += s->relative[s->row[j]];
        s->size[j] += size * s->p_norm[s->row[j]];
    }
}

/* Return the row of the bias that a delta reads, or -1. */
static int64_t bias_row(const wpe_delta_bias *bias, int64_t delta) {
    const int64_t row = delta - bias->first_delta, last = bias->rows - 1;
    if (row >= 0 && row <= last) return row;
    return !bias->rows || bias->beyond == WPE_ZERO ? -1 : row < 0 ? 0 : last;
}

/* Return the bound of a score's error, in units of the magnitude of its terms. */
static double score_units(const attention_head *h) {
    return CHAIN(h->a->head_size + h->a->table_size + h->most_rank);
}

static void scores_of(query *s, int64_t i) {
    const attention_head *h = s->h;
    const wpe_attention *a = h->a;
    find_seen(s, i);
    const double *q = h->q + i * a->head_size, size = norm(q, a->head_size);
    for (int64_t j = s->begin; j < s->end; j++) s->score[j] = 0;
    for (int64_t j = s->begin; j < s->end; j++) s->size[j] = size * s->k_norm[j];
    add_products(s->score, q, s->k_t, a->head_size, a->keys, s->begin, s->end);
    add_relative(s, i);
    double most_size = 0, largest = a->sink > -INFINITY ? fabs(a->sink) : 0;
    for (int64_t j = s->begin; j < s->end; j++) {
        if (!s->seen[j]) continue;
        const double steep = a->slope * fabs((double)(i + a->offset - j));
        const int64_t row = bias_row(&a->bias, i + a->offset - j);
        const double bias = row < 0 ? 0 : h->bias[row];
        s->score[j] = s->score[j] * a->scale - steep + bias;
        s->size[j] = s->size[j] * fabs(a->scale) + fabs(steep) + fabs(bias);
        s->tanh[j] = a->softcap != 0 ? tanh(s->score[j] / a->softcap) : 0;
        if (a->softcap != 0) s->score[j] = a->softcap * s->tanh[j];
        most_size = fmax(most_size, s->size[j]);
        largest = fmax(largest, fabs(s->score[j]));
    }
    s->error =
        h->unit * (2 * score_units(h) * most_size + 4 * largest + CHAIN(a->keys) + 4 * OF_EXP);
}

/* ---- forward ------------------------------------------------------------------------------- */

/* Return the largest of the sink and the seen scores, NaN if one of them is NaN, or -inf
 * without any. */
static double largest_score(const query *s) {
    double largest = s->h->a->sink;
    for (int64_t j = s->begin; j < s->end; j++) {
        if (!s->seen[j]) continue;
        if (isnan(s->score[j])) return NAN;
        if (s->score[j] > largest) largest = s->score[j];
    }
    return largest;
}

void attention_forward_reference(const attention_head *h, const attention_results *to) {
    const wpe_attention *a = h->a;
    const int64_t dv = a->value_size;
    query s = new_query(h);
    for (int64_t i = 0; i < a->queries; i++) {
        double *out = to->out.value + i * dv, *bound = to->out.bound + i * dv, sum = 0;
        memset(out, 0, (size_t)dv * sizeof *out);
        memset(bound, 0, (size_t)dv * sizeof *bound);
        to->lse.value[i] = a->sink;
        to->lse.bound[i] = 0;
        scores_of(&s, i);
        if (s.begin == s.end) continue;
        const double largest = largest_score(&s);
        sum = exp(a->sink - largest);
        for (int64_t j = s.begin; j < s.end; j++)
            if (s.seen[j]) sum += exp(s.score[j] - largest);
        const double lse = largest + log(sum);
        for (int64_t j = s.begin; j < s.end; j++) {
            if (!s.seen[j]) continue;
            const double weight = exp(s.score[j] - lse) * s.kept[j];
            add_row(out, bound, h->v + j * dv, dv, weight, weight);
        }
        const double relative = s.error + h->unit * (CHAIN(a->keys) + OF_EXP);
        for (int64_t x = 0; x < dv; x++) bound[x] = bound[x] * relative + floor_of(h);
        to->lse.value[i] = lse;
        to->lse.bound[i] = s.error + 2 * h->unit * fabs(lse) + floor_of(h);
    }
}

/* ---- backward ------------------------------------------------------------------------------ */

/* For each key: the gradient of its score before the softcap, its bound, and its weight after
 * dropout. For each row of the table: the sum of the gradients of the keys that read it. */
typedef struct {
    double *score, *error;
    double *weight;
    double *of_table, *table_error;
    uint8_t *is_read; /* rows of the table that some key reads */
} gradient;

/* With w = exp(score - lse) and w~ = w kept:
 *     dv_j += w~ do_i,  ds = w (kept do_i . v_j - (do_i . out_i - dlse_i)) (1 - tanh^2). */
static void score_gradients(const query *s, int64_t i, gradient *g) {
    const attention_head *h = s->h;
    const wpe_attention *a = h->a;
    const int64_t dv = a->value_size, sums = a->keys + 2 * h->heads * a->queries;
    const double *of_out = h->grad_out + i * dv, size = norm(of_out, dv), unit = h->unit;
    const double of_lse = h->grad_lse ? h->grad_lse[i] : 0;
    double term = -of_lse;
    for (int64_t x = 0; x < dv; x++) term += of_out[x] * h->out[i * dv + x];
    const double term_size = size * norm(h->out + i * dv, dv);
    const double term_error = unit * (CHAIN(dv) * term_size + 2 * fabs(of_lse));
    for (int64_t j = s->begin; j < s->end; j++) g->score[j] = 0;
    add_products(g->score, of_out, s->v_t, dv, a->keys, s->begin, s->end);
    for (int64_t j = s->begin; j < s->end; j++) {
        if (!s->seen[j]) continue;
        const double w = exp(s->score[j] - h->lse[i]), bend = 1 - s->tanh[j] * s->tanh[j];
        const double of_weight = g->score[j] * s->kept[j], both = fabs(of_weight) + fabs(term);
        double error = both * (s->error + OF_EXP * unit) + term_error;
        error = (error + unit * CHAIN(dv) * s->kept[j] * size * s->v_norm[j]) * bend;
        if (a->softcap != 0)
            error += both * unit * (OF_TANH + 2 * score_units(h) * s->size[j] / fabs(a->softcap));
        g->weight[j] = w * s->kept[j];
        g->score[j] = w * (of_weight - term) * bend;
        g->error[j] = w * error + unit * CHAIN(sums) * fabs(g->score[j]);
    }
}

/* Compute dr_i and dp from the gradients of the scores. */
static void table_gradients(const query *s, int64_t i, gradient *g, double *dr, double *dr_bound,
                            const bounded_matrix *dp) {
    const attention_head *h = s->h;
    const wpe_attention *a = h->a;
    const int64_t rows = a->relative ? a->relative->rows : 0, d = a->table_size;
    const double scale = a->scale, of_products = h->unit * CHAIN(d + h->most_rank);
    memset(g->is_read, 0, (size_t)rows);
    for (int64_t j = s->begin; rows && j < s->end; j++) {
        const int64_t row = s->row[j];
        if (!s->seen[j] || row < 0) continue;
        if (!g->is_read[row]) g->of_table[row] = g->table_error[row] = 0;
        g->is_read[row] = 1;
        g->of_table[row] += g->score[j];
        g->table_error[row] += g->error[j];
    }
    for (int64_t x = 0; x < rows; x++) {
        if (!g->is_read[x]) continue;
        const double of = g->of_table[x], error = g->table_error[x] + of_products * fabs(of);
        add_row(dr, dr_bound, h->p + x * d, d, scale * of, 0);
        for (int64_t c = 0; c < d; c++) dr_bound[c] += fabs(scale) * error * h->p_size[x * d + c];
        if (dp->value)
            add_row(dp->value + x * d, dp->bound + x * d, h->r + i * d, d, scale * of,
                    fabs(scale) * error);
    }
}

static void bias_gradients(const query *s, int64_t i, const gradient *g,
                           const bounded_matrix *dbias) {
    const wpe_attention *a = s->h->a;
    for (int64_t j = s->begin; j < s->end; j++) {
        const int64_t row = bias_row(&a->bias, i + a->offset - j);
        if (!s->seen[j] || row < 0) continue;
        dbias->value[row] += g->score[j];
        dbias->bound[row] += g->error[j];
    }
}

/* Add the part of query i to every gradient. */
static void query_gradients(const query *s, int64_t i, gradient *g, const attention_results *to) {
    const attention_head *h = s->h;
    const wpe_attention *a = h->a;
    const int64_t d = a->head_size, dv = a->value_size;
    const double scale = a->scale, *q = h->q + i * d;
    double *dq = to->dq.value + i * d, *dq_bound = to->dq.bound + i * d;
    score_gradients(s, i, g);
    for (int64_t j = s->begin; j < s->end; j++) {
        if (!s->seen[j]) continue;
        const double of = scale * g->score[j], error = fabs(scale) * g->error[j];
        const double w = g->weight[j];
        const double w_error = w * (s->error + h->unit * (OF_EXP + CHAIN(h->heads * a->queries)));
        add_row(dq, dq_bound, h->k + j * d, d, of, error);
        add_row(to->dk.value + j * d, to->dk.bound + j * d, q, d, of, error);
        add_row(to->dv.value + j * dv, to->dv.bound + j * dv, h->grad_out + i * dv, dv, w, w_error);
    }
    if (to->dbias.value) bias_gradients(s, i, g, &to->dbias);
    const bounded_matrix *dr = to->dr.value ? &to->dr : &to->dq;
    table_gradients(s, i, g, dr->value + i * a->table_size, dr->bound + i * a->table_size, &to->dp);
}

static void add_floor(const bounded_matrix *x, double least) {
    for (int64_t e = 0; x->value && e < x->rows * x->cols; e++) x->bound[e] += least;
}

void attention_backward_reference(const attention_head *h, const attention_results *to) {
    const wpe_attention *a = h->a;
    const int64_t n = a->keys, rows = a->relative ? a->relative->rows : 0;
    query s = new_query(h);
    gradient g = {doubles(n),    doubles(n),    doubles(n),
                  doubles(rows), doubles(rows), scratch((size_t)rows + 1)};
    for (int64_t i = 0; i < a->queries; i++) {
        scores_of(&s, i);
        if (s.begin < s.end) query_gradients(&s, i, &g, to);
    }
    const bounded_matrix *all[] = {&to->dq, &to->dr, &to->dk, &to->dv, &to->dp, &to->dbias};
    for (int x = 0; x < 6; x++) add_floor(all[x], floor_of(h));
}
