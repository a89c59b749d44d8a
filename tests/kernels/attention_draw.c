/* attention_draw.c: draw a random call of attention: sizes, tensors and the table. The options,
 * which say who sees whom, are drawn in attention_options.c. */
#include "attention.h"

#include <math.h>
#include <string.h>

wpe_matrix matrix_of(const array *x) { return (wpe_matrix){x->data, x->stride[0], x->stride[1]}; }
wpe_matrix_out matrix_out_of(const array *x) {
    return (wpe_matrix_out){x->data, x->stride[0], x->stride[1]};
}

/* ---- sizes --------------------------------------------------------------------------------- */

/* Half of the lengths lie next to a block size. */
static int64_t draw_length(int64_t least, int64_t most) {
    return chance(0.5) ? random_size(least, most) : random_int(least, most);
}

/* Most sizes are small, because a case of 450 x 450 takes as long as a thousand small ones. */
static void draw_sizes(attention_call *c, wpe_attention *a) {
    static const int storages[] = {WPE_F32, WPE_F32, WPE_F32, WPE_BF16, WPE_F16, WPE_F64, WPE_F64};
    const double style = random_uniform(0, 1);
    const int64_t most = style < 0.6 ? 40 : style < 0.93 ? 110 : style < 0.985 ? 240 : 450;
    const int64_t most_d = chance(most > 40 ? 0.02 : 0.1) ? 130 : 33;
    a->storage = c->storage = storages[random_int(0, 6)];
    c->compute_type = c->storage == WPE_F64 ? WPE_F64 : WPE_F32;
    a->queries = c->decodes ? random_size(1, WPE_DECODE_QUERIES) : draw_length(1, most);
    a->keys = chance(most > 110 ? 0.7 : 0.4) && !c->decodes
                  ? a->queries
                  : draw_length(c->pass == WPE_BACKWARD, most);
    a->head_size = random_size(0, most_d);
    a->value_size = chance(0.5) ? a->head_size : random_size(0, most_d);
    c->has_r = chance(0.3);
    a->table_size = c->has_r && chance(0.6) ? random_size(0, most_d) : a->head_size;
    c->heads = chance(0.3) ? 2 : 1;
    a->group = chance(0.5) ? c->heads : random_int(c->heads, 9);
    c->all_variants = a->queries * a->keys < 15000 || chance(0.2);
}

/* ---- tensors ------------------------------------------------------------------------------- */

/* Make a few rows far larger than the others. Then one key dominates the softmax. */
static void make_spikes(const array *x, double factor) {
    for (int64_t i = 0; i < x->shape[0]; i++)
        for (int64_t e = 0, is_one = chance(0.1); is_one && e < x->shape[1]; e++)
            put(x, i, e, 0, factor * random_normal());
}

static array new_filled(int type, int64_t rows, int64_t cols, double scale) {
    array x = new_input(type, rows, cols, 1);
    fill_normal(&x, scale);
    return x;
}

static void draw_tensors(attention_call *c, const wpe_attention *a, int gentle) {
    const double magnitude = c->storage == WPE_F16 ? 1 : 2;
    const double of_values = pow(10, random_uniform(-magnitude, magnitude));
    const double of_gradients = pow(10, random_uniform(-magnitude, magnitude));
    const int type = c->storage, spikes = !gentle && chance(0.1);
    c->k = new_filled(type, a->keys, a->head_size, 1);
    c->v = new_filled(type, a->keys, a->value_size, of_values);
    if (spikes) make_spikes(&c->k, 20);
    c->has_grad_lse = chance(0.6);
    for (int h = 0; h < c->heads; h++) {
        c->q[h] = new_filled(type, a->queries, a->head_size, spikes ? 2 : 1);
        if (c->has_r) c->r[h] = new_filled(type, a->queries, a->table_size, 1);
        if (c->pass != WPE_BACKWARD) continue;
        c->grad_out[h] = new_filled(type, a->queries, a->value_size, of_gradients);
        c->grad_lse[h] = new_dense(c->compute_type, a->queries, 1, 1);
        fill_normal(&c->grad_lse[h], of_gradients);
        c->out[h] = new_output(type, a->queries, a->value_size, 1);
        c->lse[h] = new_dense(c->compute_type, a->queries, 1, 1);
    }
}

/* ---- the table ----------------------------------------------------------------------------- */

/* Cut the table into zones. Zone 0 has the largest deltas. */
static void cut_zones(drawn_table *t, int64_t table_size) {
    wpe_relative *p = &t->relative;
    int64_t left = p->rows;
    const int low_rank = table_size > 0 && chance(0.4), most = chance(0.35) ? MOST_ZONES : 1;
    for (int z = 0; left > 0; z++) {
        const int64_t rows = z + 1 < most && left > 1 ? random_int(1, left - 1) : left;
        t->has_basis[z] = low_rank && chance(0.8);
        t->zones[z].rows = rows;
        t->zones[z].rank = t->has_basis[z] ? random_size(1, 40) : table_size;
        p->zone_count = z + 1;
        left -= rows;
        if (chance(0.3)) break;
    }
    t->zones[p->zone_count - 1].rows += left;
}

/* Draw the rows of a table or bias, its first delta, and what lies beyond it. */
static void draw_deltas(const wpe_attention *a, int64_t *rows, int64_t *first_delta, int *beyond) {
    /* the least and the largest delta of the call's pairs */
    const int64_t least = a->offset - (a->keys - 1), most = a->offset + a->queries - 1;
    *rows = random_size(1, chance(0.8) ? 100 : 2 * (a->queries + a->keys) + 1);
    *first_delta = chance(0.1)   ? random_int(-1, 1) * (INT64_C(1) << random_int(10, 60))
                   : chance(0.3) ? least + random_int(-2, 2)
                   : chance(0.3) ? random_int(-3, 3)
                                 : random_int(least - *rows - 2, most + 2);
    *beyond = chance(0.4) ? WPE_EDGE : WPE_ZERO;
}

static void draw_bias(attention_call *c, wpe_attention *a, int gentle) {
    wpe_delta_bias *bias = &a->bias;
    draw_deltas(a, &bias->rows, &bias->first_delta, &bias->beyond);
    for (int h = 0; h < c->heads; h++)
        c->bias[h] = new_filled(c->compute_type, bias->rows, 1, gentle ? 1 : random_uniform(0, 8));
}

static void draw_table(attention_call *c, const wpe_attention *a) {
    drawn_table *t = &c->table;
    wpe_relative *p = &t->relative;
    draw_deltas(a, &p->rows, &p->first_delta, &p->beyond);
    cut_zones(t, a->table_size);
    for (int z = 0; z < p->zone_count; z++) {
        const wpe_zone *zone = &t->zones[z];
        t->rows[z] = new_filled(c->storage, zone->rows, zone->rank, 1);
        if (t->has_basis[z])
            t->basis[z] =
                new_filled(c->storage, a->table_size, zone->rank, 1 / sqrt((double)zone->rank));
    }
}

/* ---- NaN, infinities and subnormals ---------------------------------------------------------- */

/* Set an element or a row of x to NaN or infinity. */
static void poison(attention_call *c, const array *x) {
    const double values[] = {NAN, NAN, INFINITY, -INFINITY};
    if (!count_of(x)) return;
    const int64_t i = random_int(0, x->shape[0] - 1), col = random_int(0, x->shape[1] - 1);
    const double value = values[random_int(0, c->has_infinity ? 3 : 1)];
    const int whole_row = chance(0.3);
    for (int64_t e = 0; e < x->shape[1]; e++)
        if (whole_row || e == col) put(x, i, e, 0, value);
}

static void draw_poison(attention_call *c) {
    c->has_infinity = chance(0.3);
    for (int times = chance(0.7) ? 1 : 3; times; times--) {
        const int h = (int)random_int(0, c->heads - 1), z = (int)random_int(0, MOST_ZONES - 1);
        const array *found[] = {&c->q[h],
                                &c->k,
                                &c->v,
                                &c->r[h],
                                &c->bias[h],
                                &c->grad_out[h],
                                &c->grad_lse[h],
                                &c->table.rows[z],
                                &c->table.basis[z],
                                &c->table.rows[0]};
        const array *x = found[random_int(0, 9)];
        if (x->data) poison(c, x);
    }
}

/* Make q subnormal, and k and scale so large that q would show in the result. It must count as
 * zero. */
static void make_subnormal(attention_call *c, wpe_attention *a) {
    const int is_double = c->compute_type == WPE_F64;
    for (int h = 0; h < c->heads; h++) fill_normal(&c->q[h], ldexp(0.1, is_double ? -1022 : -126));
    fill_normal(&c->k, ldexp(1, is_double ? 500 : 106));
    a->scale = ldexp(1, is_double ? 522 : 20);
    c->has_r = 0;
}

/* ---- the inputs of the reference ------------------------------------------------------------- */

/* Return the values as a contiguous array. Subnormals become zero, and infinities NaN, so that all
 * results that depend on them are NaN. */
static double *doubles_of(const array *x) {
    double *to = scratch((size_t)count_of(x) * sizeof *to), *next = to;
    const wide least = x->type == WPE_F16 ? 0 : smallest_normal(x->type);
    for (int64_t i = 0; i < x->shape[0]; i++)
        for (int64_t e = 0; e < x->shape[1]; e++) {
            const wide value = get(x, i, e, 0);
            *next++ = isfinite(value) ? (fabsl(value) < least ? 0 : (double)value) : NAN;
        }
    return to;
}

/* Compute p = C U^T in rising delta, and its size |C| |U|^T. */
static void table_values(const attention_call *c, double **p, double **size) {
    const drawn_table *t = &c->table;
    const int64_t d = c->a[0].table_size, count = t->relative.rows * d;
    double *to = *p = scratch((size_t)count * sizeof **p);
    double *to_size = *size = scratch((size_t)count * sizeof **size);
    for (int z = t->relative.zone_count - 1; z >= 0; z--) {
        const int64_t rows = t->zones[z].rows, rank = t->zones[z].rank;
        const double *left = doubles_of(&t->rows[z]);
        const double *right = t->has_basis[z] ? doubles_of(&t->basis[z]) : NULL;
        for (int64_t x = 0; x < rows * d; x++, to++, to_size++) {
            *to = right ? 0 : left[x];
            *to_size = right ? 0 : fabs(left[x]);
            for (int64_t k = 0; right && k < rank; k++) {
                const double product = left[x / d * rank + k] * right[x % d * rank + k];
                *to += product;
                *to_size += fabs(product);
            }
        }
    }
}

static void read_heads(attention_call *c) {
    double *p = NULL, *p_size = NULL, *k = doubles_of(&c->k), *v = doubles_of(&c->v);
    if (c->a[0].relative) table_values(c, &p, &p_size);
    for (int h = 0; h < c->heads; h++) {
        attention_head *head = &c->head[h];
        *head = (attention_head){.a = &c->a[h], .k = k, .v = v, .p = p, .p_size = p_size};
        head->q = doubles_of(&c->q[h]);
        head->r = c->has_r ? doubles_of(&c->r[h]) : head->q;
        if (c->a[h].bias.rows) head->bias = doubles_of(&c->bias[h]);
        head->heads = c->heads;
        head->unit = (double)unit_roundoff(c->compute_type);
        head->tiny = (double)smallest_normal(c->compute_type);
        for (int z = 0; z < c->table.relative.zone_count; z++)
            if (c->table.has_basis[z] && c->table.zones[z].rank > head->most_rank)
                head->most_rank = c->table.zones[z].rank;
    }
}

/* ---- the expected results -------------------------------------------------------------------- */

/* Round the reference's out and lse. They are the inputs of backward. */
static void give_results(attention_call *c, int h) {
    const attention_results *want = &c->want[h];
    for (int64_t i = 0; i < c->a[h].queries; i++) {
        put(&c->lse[h], i, 0, 0, want->lse.value[i]);
        for (int64_t x = 0; x < c->a[h].value_size; x++)
            put(&c->out[h], i, x, 0, want->out.value[i * c->a[h].value_size + x]);
    }
    seal(&c->out[h]);
    seal(&c->lse[h]);
    double *lse = doubles_of(&c->lse[h]);
    for (int64_t i = 0; i < c->a[h].queries; i++)
        if (want->lse.value[i] == -INFINITY) lse[i] = -INFINITY;
    c->head[h].lse = lse;
    c->head[h].out = doubles_of(&c->out[h]);
    c->head[h].grad_out = doubles_of(&c->grad_out[h]);
    c->head[h].grad_lse = c->has_grad_lse ? doubles_of(&c->grad_lse[h]) : NULL;
}

static void compute_results(attention_call *c) {
    const wpe_attention *a = &c->a[0];
    attention_results sums = {0};
    if (c->pass == WPE_BACKWARD) {
        sums.dk = new_bounded(a->keys, a->head_size);
        sums.dv = new_bounded(a->keys, a->value_size);
        if (c->wants_dp) sums.dp = new_bounded(a->relative->rows, a->table_size);
    }
    for (int h = 0; h < c->heads; h++) {
        attention_results *want = &c->want[h];
        *want = sums;
        want->out = new_bounded(a->queries, a->value_size);
        want->lse = new_bounded(a->queries, 1);
        attention_forward_reference(&c->head[h], want);
        if (c->pass != WPE_BACKWARD) continue;
        give_results(c, h);
        want->dq = new_bounded(a->queries, a->head_size);
        if (c->has_r) want->dr = new_bounded(a->queries, a->table_size);
        if (c->wants_dbias) want->dbias = new_bounded(a->bias.rows, 1);
        attention_backward_reference(&c->head[h], want);
    }
}

/* ---- the whole call -------------------------------------------------------------------------- */

static void seal_inputs(const attention_call *c) {
    const drawn_table *t = &c->table;
    const array *all[] = {&c->k,           &c->v,           &t->rows[0],     &t->rows[1],
                          &t->rows[2],     &t->rows[3],     &t->basis[0],    &t->basis[1],
                          &t->basis[2],    &t->basis[3],    &c->q[0],        &c->q[1],
                          &c->r[0],        &c->r[1],        &c->grad_out[0], &c->grad_out[1],
                          &c->grad_lse[0], &c->grad_lse[1], &c->bias[0],     &c->bias[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data) seal(all[i]);
}

static void describe_call(const attention_call *c) {
    const wpe_attention *a = &c->a[0];
    const wpe_relative *p = a->relative;
    describe(
        "%s m %lld n %lld d %lld dv %lld heads %d offset %lld causal %d window %lld keys %lld..%lld"
        " runs %d segments %d key_mask %d mask %d slope %g softcap %g scale %g dropout %g"
        " sink %g bias %lld from %lld beyond %d"
        " table %lld x %lld from %lld beyond %d zones %d (rank %lld) r %d infinite %d",
        type_name(c->storage), (long long)a->queries, (long long)a->keys, (long long)a->head_size,
        (long long)a->value_size, c->heads, (long long)a->offset, a->causal, (long long)a->window,
        (long long)a->first_key, (long long)a->end_key, !!a->run_begin, !!a->segments,
        !!a->key_mask, !!a->mask, a->slope, a->softcap, a->scale, (double)a->drop_below * 0x1p-32,
        a->sink, (long long)a->bias.rows, (long long)a->bias.first_delta, a->bias.beyond,
        p ? (long long)p->rows : 0, (long long)a->table_size, p ? (long long)p->first_delta : 0,
        p ? p->beyond : 0, p ? p->zone_count : 0, p ? (long long)c->head[0].most_rank : 0, c->has_r,
        c->has_infinity);
}

void draw_attention(attention_call *c, enum wpe_pass pass, int decodes) {
    memset(c, 0, sizeof *c);
    c->pass = pass;
    c->decodes = decodes;
    wpe_attention *a = &c->a[0];
    draw_sizes(c, a);
    const int is_poisoned = chance(0.2);
    const int is_subnormal = !is_poisoned && pass != WPE_BACKWARD && c->storage != WPE_F16 &&
                             a->table_size == a->head_size && chance(0.02);
    draw_options(a, is_poisoned);
    draw_tensors(c, a, is_poisoned);
    if (chance(0.6)) {
        draw_table(c, a);
        a->relative = &c->table.relative;
    }
    if (chance(0.4)) draw_bias(c, a, is_poisoned);
    if (is_poisoned) draw_poison(c);
    if (is_subnormal) make_subnormal(c, a);
    c->wants_dp = pass == WPE_BACKWARD && a->relative && chance(0.7);
    c->wants_dbias = pass == WPE_BACKWARD && a->bias.rows && chance(0.7);
    a->k = matrix_of(&c->k);
    a->v = matrix_of(&c->v);
    for (int h = 0; h < c->heads; h++) {
        if (h) c->a[h] = *a;
        if (h) draw_head_options(&c->a[h]);
        c->a[h].q = matrix_of(&c->q[h]);
        c->a[h].bias.values = c->bias[h].data;
        c->a[h].bias.stride = c->bias[h].stride[0];
        c->a[h].r = c->has_r ? matrix_of(&c->r[h]) : (wpe_matrix){NULL, 0, 0};
    }
    seal_inputs(c);
    read_heads(c);
    describe_call(c);
    compute_results(c);
}
