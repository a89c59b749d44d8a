/* check_attention_backward.c: check the gradients of attention. */
#include "attention_call.h"

#include <string.h>

typedef struct {
    array dq[MOST_HEADS], dr[MOST_HEADS];
    array dk, dv, dp;                /* sums, with padded rows and columns */
    array dk_rows, dv_rows, dp_rows; /* the rows and columns in use of these sums */
    array dbias[MOST_HEADS];
} backward_results;

/* Return the first rows and columns of a padded block. reversed: from the last row to the first, as
 * dp holds the table's rows. */
static array used_part(const array *block, int64_t rows, int64_t cols, int64_t padded,
                       int reversed) {
    array x = *block;
    x.shape[0] = rows;
    x.shape[1] = cols;
    x.stride[0] = reversed ? -padded : padded;
    if (reversed) x.data = (char *)x.data + (rows - 1) * padded * (int64_t)type_size(x.type);
    return x;
}

static void new_sums(const attention_call *c, const wpe_attention_sizes *s, backward_results *to) {
    const wpe_attention *a = &c->a[0];
    to->dk = new_block(c->compute_type, s->dk_rows * s->dk_cols);
    to->dv = new_block(c->compute_type, s->dk_rows * s->dv_cols);
    to->dk_rows = used_part(&to->dk, a->keys, a->head_size, s->dk_cols, 0);
    to->dv_rows = used_part(&to->dv, a->keys, a->value_size, s->dv_cols, 0);
    for (int h = 0; c->wants_dbias && h < c->heads; h++)
        to->dbias[h] = new_dense(c->compute_type, a->bias.rows, 1, 1);
    if (!c->wants_dp) return;
    to->dp = new_block(c->compute_type, s->dp_rows * s->dp_cols);
    to->dp_rows = used_part(&to->dp, a->relative->rows, a->table_size, s->dp_cols, 1);
}

static void clear(const array *x) {
    if (x->data) memset(x->data, 0, (size_t)count_of(x) * type_size(x->type));
}

static wpe_attention_gradients gradients_of(const attention_call *c, int h,
                                            const backward_results *to) {
    wpe_attention_gradients g = {0};
    g.out = matrix_of(&c->out[h]);
    g.grad_out = matrix_of(&c->grad_out[h]);
    g.lse = c->lse[h].data;
    g.grad_lse = c->has_grad_lse ? c->grad_lse[h].data : NULL;
    g.dq = matrix_out_of(&to->dq[h]);
    if (c->has_r) g.dr = matrix_out_of(&to->dr[h]);
    g.sums = (wpe_attention_sums){to->dk.data, to->dv.data, to->dp.data, to->dbias[h].data};
    return g;
}

/* Run backward for all heads, with `step` queries in one call. */
static int run_backward(const wpe_kernels *k, const attention_call *c, const prepared *p,
                        const backward_results *to, int64_t step) {
    clear(&to->dk);
    clear(&to->dv);
    clear(&to->dp);
    for (int h = 0; h < c->heads; h++) {
        const wpe_attention_gradients g = gradients_of(c, h, to);
        const int64_t m = c->a[h].queries;
        clear(&to->dbias[h]);
        reset(&to->dq[h]);
        if (c->has_r) reset(&to->dr[h]);
        for (volatile int64_t i = 0; i < m; i += step) {
            reset(&p->workspace);
            if (!CALL(k, KERNEL(c, backward), &c->a[h], p->packed.data, &g, i,
                      i + step < m ? i + step : m, p->workspace.data))
                return 0;
        }
    }
    return 1;
}

static int judge_gradients(const attention_call *c, const backward_results *to) {
    const int infinite = c->has_infinity;
    int right = check_result("dk", &to->dk_rows, &c->want[0].dk, infinite);
    right &= check_result("dv", &to->dv_rows, &c->want[0].dv, infinite);
    if (c->wants_dp) right &= check_result("dp", &to->dp_rows, &c->want[0].dp, infinite);
    for (int h = 0; h < c->heads; h++) {
        right &= check_result("dq", &to->dq[h], &c->want[h].dq, infinite);
        if (c->wants_dbias)
            right &= check_result("dbias", &to->dbias[h], &c->want[h].dbias, infinite);
        if (c->has_r) right &= check_result("dr", &to->dr[h], &c->want[h].dr, infinite);
    }
    return right;
}

enum { GRADIENTS = 3 + 3 * MOST_HEADS };
typedef struct {
    kept_bits of[GRADIENTS];
} gradient_bits;
static const char *const gradient_names[GRADIENTS] = {"dk", "dv", "dp",    "dq",   "dr",
                                                      "dq", "dr", "dbias", "dbias"};

static const array *gradient(const backward_results *to, int number) {
    const array *all[GRADIENTS] = {&to->dk_rows, &to->dv_rows,  &to->dp_rows,
                                   &to->dq[0],   &to->dr[0],    &to->dq[1],
                                   &to->dr[1],   &to->dbias[0], &to->dbias[1]};
    return all[number]->data ? all[number] : NULL;
}

static void compare_gradients(const wpe_kernels *k, const backward_results *to,
                              gradient_bits *kept) {
    for (int x = 0; x < GRADIENTS; x++) {
        const array *got = gradient(to, x);
        if (!got) continue;
        if (!kept->of[x].bits) kept->of[x] = new_bits(got);
        compare_variants(gradient_names[x], k, got, &kept->of[x]);
    }
}

/* Run backward in steps. It must give the same bits as one call for all queries. */
static void check_backward_parts(const wpe_kernels *k, const attention_call *c, const prepared *p,
                                 const backward_results *to, int64_t step) {
    void *whole[GRADIENTS] = {NULL};
    for (int x = 0; x < GRADIENTS; x++) {
        const array *got = gradient(to, x);
        if (!got) continue;
        whole[x] = new_bits(got).bits;
        keep_bits(got, whole[x]);
    }
    if (!run_backward(k, c, p, to, step)) return;
    for (int x = 0; x < GRADIENTS; x++)
        if (whole[x]) compare_bits("in parts", gradient(to, x), whole[x]);
}

void check_attention_backward(void) {
    attention_call c;
    draw_attention(&c, WPE_BACKWARD, 0);
    const packing how = draw_packing();
    const int64_t m = c.a[0].queries;
    const int64_t step =
        m > WPE_QUERY_BLOCK && chance(0.5) ? WPE_QUERY_BLOCK * random_int(1, 3) : m;
    backward_results to = {0};
    gradient_bits kept = {0};
    for (int h = 0; h < c.heads; h++) {
        to.dq[h] = new_output(c.storage, m, c.a[0].head_size, 1);
        if (c.has_r) to.dr[h] = new_output(c.storage, m, c.a[0].table_size, 1);
    }
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        prepared p = {0};
        if (!is_called(&c, k)) continue;
        if (!prepare(k, &c, how, &p)) continue;
        new_sums(&c, &p.sizes, &to);
        if (!run_backward(k, &c, &p, &to, m) || !judge_gradients(&c, &to)) continue;
        check_canaries("workspace", &p.workspace);
        if (m > 1) compare_gradients(k, &to, &kept);
        if (step < m) check_backward_parts(k, &c, &p, &to, step);
    }
}
