/* check_attention.c: attention, forward, backward and of one query. METHODS 1 [W], 3 [S] [X] [A]. */
#include "attention.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define KERNEL(c, member) attention[(c)->own == WPE_F64].member

/* ---- comparison ------------------------------------------------------------------------------ */

/* Whether a value is what is wanted: NaN where something met NaN, -inf for lse of nothing. */
static int is_right(int type, wide got, double want, double bound, int has_infinity) {
    if (isnan(want)) return has_infinity || !isfinite(got);
    if (isinf(want)) return got == want;
    const wide error = fabsl(got - want);
    if (error <= bound) return 1;
    if (isnan(got)) return 0;
    if (isinf(got)) return rounded(type, want + copysignl(bound, got)) == got;
    return error <= bound + half_ulp(type, fabsl((wide)want) + bound);
}

static int judge(const char *what, const array *got, const judged *want, int has_infinity) {
    if (!check_canaries(what, got)) return 0;
    int64_t wrong = 0, first = 0;
    for (int64_t n = 0; n < want->rows * want->cols; n++) {
        const wide value = get(got, n / want->cols, n % want->cols, 0);
        if (is_right(got->type, value, want->value[n], want->bound[n], has_infinity)) continue;
        if (!wrong++) first = n;
    }
    if (!wrong) return 1;
    const int64_t i = first / want->cols, j = first % want->cols;
    const wide value = get(got, i, j, 0);
    fail("%s: %lld of %lld wrong, first [%lld][%lld]: got %.9Lg, want %.9g, error %.3Lg, allowed %.3g",
         what, (long long)wrong, (long long)(want->rows * want->cols), (long long)i, (long long)j,
         value, want->value[first], fabsl(value - want->value[first]), want->bound[first]);
    return 0;
}

/* Bits of one variant, to be met by those that promise the same, or by the next call. */
typedef struct {
    const wpe_kernels *of;
    void *bits;
} kept_bits;

static kept_bits new_bits(const array *x) {
    return (kept_bits){NULL, scratch((size_t)count_of(x) * type_size(x->type) + 1)};
}

static void compare_variants(const char *what, const wpe_kernels *k, const array *x,
                             kept_bits *kept) {
    if (!kept->of) {
        kept->of = k;
        keep_bits(x, kept->bits);
    } else if (same_arithmetic(k, kept->of)) {
        compare_bits(what, x, kept->bits);
    } else {
        kept->of = k; /* portable came first */
        keep_bits(x, kept->bits);
    }
}

/* ---- what a call needs before -------------------------------------------------------------- */

/* Keys are packed by so many tiles at once (0: all), and the last first, where `backwards`. */
typedef struct {
    int64_t tiles;
    int backwards;
} packing;

static packing draw_packing(void) { return (packing){random_int(0, 2), chance(0.5)}; }

typedef struct {
    wpe_attention_sizes sizes;
    wpe_zone zones[MOST_ZONES];
    array packed, workspace;
} prepared;

static int pack_keys(const wpe_kernels *k, const attention_call *c, const array *packed,
                     packing how) {
    const int64_t n = c->a[0].keys, step = how.tiles ? how.tiles * WPE_KEY_BLOCK : n;
    for (volatile int64_t done = 0; done < n; done += step) {
        const int64_t begin = how.backwards ? (n - 1) / step * step - done : done;
        const int64_t end = begin + step < n ? begin + step : n;
        if (!CALL(k, KERNEL(c, pack), &c->a[0], packed->data, c->pass, begin, end)) return 0;
    }
    return 1;
}

static int pack_zone(const wpe_kernels *k, const attention_call *c, int z, wpe_zone *zone) {
    const drawn_table *t = &c->table;
    const int64_t d = c->a[0].head_size;
    int64_t size = 0;
    *zone = t->zones[z];
    if (!CALL_FOR(size, k, KERNEL(c, zone_size), zone->rows, zone->rank, d)) return 0;
    const array memory = new_block(c->own, size);
    const wpe_matrix none = {NULL, 0, 0};
    if (!CALL(k, KERNEL(c, pack_zone), zone, memory.data, c->storage, d, matrix_of(&t->rows[z]),
              t->has_basis[z] ? matrix_of(&t->basis[z]) : none))
        return 0;
    seal(&memory);
    return check_canaries("zone", &memory);
}

static int prepare(const wpe_kernels *k, attention_call *c, packing how, prepared *to) {
    const wpe_relative *p = c->a[0].relative;
    for (int z = 0; p && z < p->zone_count; z++)
        if (!pack_zone(k, c, z, &to->zones[z])) return 0;
    c->table.relative.zones = to->zones;
    if (!CALL_FOR(to->sizes, k, KERNEL(c, sizes), &c->a[0], c->pass)) return 0;
    to->workspace = new_block(c->own, to->sizes.workspace);
    to->packed = new_block(c->own, to->sizes.packed);
    if (c->pass == WPE_DECODE) return 1;
    if (!pack_keys(k, c, &to->packed, how)) return 0;
    seal(&to->packed);
    return 1;
}

/* Some of the query blocks, begin..end-1 of the queries. */
static wpe_range draw_blocks(int64_t queries) {
    const int64_t blocks = (queries + WPE_QUERY_BLOCK - 1) / WPE_QUERY_BLOCK;
    const int64_t first = random_int(0, blocks - 1), last = random_int(first, blocks);
    const int64_t end = last * WPE_QUERY_BLOCK;
    return (wpe_range){first * WPE_QUERY_BLOCK, end < queries ? end : queries};
}

/* ---- seen_keys ------------------------------------------------------------------------------- */

static wpe_range keys_in_range(const wpe_attention *a, int64_t i) {
    wpe_range seen = {0, 0};
    for (int64_t j = 0; j < a->keys; j++) {
        if (!in_range(a, i, j)) continue;
        if (!seen.end) seen.begin = j;
        seen.end = j + 1;
    }
    return seen;
}

/* Of queries begin..end-1: exact where the first and the last one see anything. */
static void check_seen_keys(const wpe_kernels *k, const attention_call *c, int64_t begin,
                            int64_t end) {
    const wpe_attention *a = &c->a[0];
    wpe_range all = {0, 0}, next = {0, 0};
    if (!CALL_FOR(all, k, KERNEL(c, seen_keys), a, begin, end)) return;
    for (int64_t i = begin; i < end; i++) {
        const wpe_range seen = keys_in_range(a, i);
        if (seen.begin == seen.end) continue;
        if (all.begin > seen.begin || all.end < seen.end || (i == begin && all.begin < seen.begin) ||
            (i == end - 1 && all.end > seen.end))
            fail("seen_keys of %lld..%lld is %lld..%lld, but %lld sees %lld..%lld", (long long)begin,
                 (long long)end, (long long)all.begin, (long long)all.end, (long long)i,
                 (long long)seen.begin, (long long)seen.end);
    }
    if (all.begin < 0 || all.begin > all.end || all.end > a->keys)
        fail("seen_keys of %lld..%lld is %lld..%lld", (long long)begin, (long long)end,
             (long long)all.begin, (long long)all.end);
    if (end == a->queries || !CALL_FOR(next, k, KERNEL(c, seen_keys), a, begin + 1, end + 1)) return;
    if (next.begin < all.begin || next.end < all.end)
        fail("seen_keys falls after %lld..%lld", (long long)begin, (long long)end);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct {
    array out, lse;
    kept_bits out_bits, lse_bits;
} forward_results;

static forward_results new_forward_results(const attention_call *c) {
    forward_results to;
    to.out = new_output(c->storage, c->a[0].queries, c->a[0].value_size, 1);
    to.lse = new_dense(c->own, c->a[0].queries, 1, 1);
    to.out_bits = new_bits(&to.out);
    to.lse_bits = new_bits(&to.lse);
    return to;
}

static int run_forward(const wpe_kernels *k, const attention_call *c, int h, const prepared *p,
                       const forward_results *to, wpe_range queries) {
    reset(&to->out);
    reset(&to->lse);
    reset(&p->workspace);
    return CALL(k, KERNEL(c, forward), &c->a[h], p->packed.data, matrix_out_of(&to->out),
                to->lse.data, queries.begin, queries.end, p->workspace.data);
}

/* Some blocks by themselves: the same bits there, and nothing written elsewhere. */
static void check_forward_part(const wpe_kernels *k, const attention_call *c, int h,
                               const prepared *p, const forward_results *to, wpe_range part) {
    kept_bits out = new_bits(&to->out), lse = new_bits(&to->lse);
    keep_bits(&to->out, out.bits);
    keep_bits(&to->lse, lse.bits);
    own_rows(&to->out, part.begin, part.end);
    own_rows(&to->lse, part.begin, part.end);
    if (run_forward(k, c, h, p, to, part) && check_canaries("part of out", &to->out) &&
        check_canaries("part of lse", &to->lse)) {
        compare_bits("part of out", &to->out, out.bits);
        compare_bits("part of lse", &to->lse, lse.bits);
    }
    own_rows(&to->out, 0, c->a[h].queries);
    own_rows(&to->lse, 0, c->a[h].queries);
}

static void check_forward_head(const wpe_kernels *k, const attention_call *c, int h,
                               const prepared *p, forward_results *to, const wpe_range *part) {
    const attention_results *want = &c->want[h];
    if (!run_forward(k, c, h, p, to, (wpe_range){0, c->a[h].queries})) return;
    if (!judge("out", &to->out, &want->out, c->has_infinity)) return;
    if (!judge("lse", &to->lse, &want->lse, c->has_infinity)) return;
    if (c->a[h].queries > 1) {
        compare_variants("out beside another variant's", k, &to->out, &to->out_bits);
        compare_variants("lse beside another variant's", k, &to->lse, &to->lse_bits);
    }
    if (part) check_forward_part(k, c, h, p, to, *part);
}

static void check_forward(void) {
    attention_call c;
    draw_attention(&c, WPE_FORWARD);
    const packing how = draw_packing();
    const int64_t m = c.a[0].queries, begin = random_int(0, m - 1), end = random_int(begin + 1, m);
    const wpe_range part = draw_blocks(m);
    const int has_part = chance(m > WPE_QUERY_BLOCK ? 0.5 : 0.05);
    forward_results to[MOST_HEADS];
    for (int h = 0; h < c.heads; h++) to[h] = new_forward_results(&c);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        prepared p = {0};
        check_seen_keys(k, &c, begin, end);
        if (!prepare(k, &c, how, &p)) continue;
        for (int h = 0; h < c.heads; h++)
            check_forward_head(k, &c, h, &p, &to[h], has_part ? &part : NULL);
        check_canaries("workspace", &p.workspace);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct {
    array dq[MOST_HEADS], dr[MOST_HEADS], dk, dv, dp; /* the last three: padded sums */
    array dk_rows, dv_rows, dp_rows;                  /* the rows and columns in use */
} backward_results;

enum { GRADIENTS = 3 + 2 * MOST_HEADS };
typedef struct {
    kept_bits of[GRADIENTS];
} gradient_bits;

/* A (rows, cols) part of a block; dp holds the table's rows from the last to the first. */
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
    to->dk = new_block(c->own, s->dk_rows * s->dk_cols);
    to->dv = new_block(c->own, s->dk_rows * s->dv_cols);
    to->dk_rows = used_part(&to->dk, a->keys, a->head_size, s->dk_cols, 0);
    to->dv_rows = used_part(&to->dv, a->keys, a->value_size, s->dv_cols, 0);
    if (!c->wants_dp) return;
    to->dp = new_block(c->own, s->dp_rows * s->dk_cols);
    to->dp_rows = used_part(&to->dp, a->relative->rows, a->head_size, s->dk_cols, 1);
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
    g.sums = (wpe_attention_sums){to->dk.data, to->dv.data, to->dp.data};
    return g;
}

/* All heads, by `step` queries at once. */
static int run_backward(const wpe_kernels *k, const attention_call *c, const prepared *p,
                        const backward_results *to, int64_t step) {
    clear(&to->dk);
    clear(&to->dv);
    clear(&to->dp);
    for (int h = 0; h < c->heads; h++) {
        const wpe_attention_gradients g = gradients_of(c, h, to);
        const int64_t m = c->a[h].queries;
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
    int right = judge("dk", &to->dk_rows, &c->want[0].dk, infinite);
    right &= judge("dv", &to->dv_rows, &c->want[0].dv, infinite);
    if (c->wants_dp) right &= judge("dp", &to->dp_rows, &c->want[0].dp, infinite);
    for (int h = 0; h < c->heads; h++) {
        right &= judge("dq", &to->dq[h], &c->want[h].dq, infinite);
        if (c->has_r) right &= judge("dr", &to->dr[h], &c->want[h].dr, infinite);
    }
    return right;
}

/* Keeps the bits of all gradients, or compares with those kept. */
static void compare_gradients(const char *how, const wpe_kernels *k, const backward_results *to,
                              gradient_bits *kept) {
    static const char *const names[GRADIENTS] = {"dk", "dv", "dp", "dq", "dr", "dq", "dr"};
    const array *all[GRADIENTS] = {&to->dk_rows, &to->dv_rows, &to->dp_rows, &to->dq[0],
                                   &to->dr[0],   &to->dq[1],   &to->dr[1]};
    for (int x = 0; x < GRADIENTS; x++) {
        if (!all[x]->data) continue;
        char what[80];
        snprintf(what, sizeof what, "%s %s", names[x], how);
        if (!kept->of[x].bits) kept->of[x] = new_bits(all[x]);
        compare_variants(what, k, all[x], &kept->of[x]);
    }
}

static void check_backward(void) {
    attention_call c;
    draw_attention(&c, WPE_BACKWARD);
    const packing how = draw_packing();
    const int64_t m = c.a[0].queries;
    const int64_t step = m > WPE_QUERY_BLOCK && chance(0.5) ? WPE_QUERY_BLOCK * random_int(1, 3) : m;
    backward_results to = {0};
    gradient_bits kept = {0};
    for (int h = 0; h < c.heads; h++) {
        to.dq[h] = new_output(c.storage, m, c.a[0].head_size, 1);
        if (c.has_r) to.dr[h] = new_output(c.storage, m, c.a[0].head_size, 1);
    }
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        prepared p = {0};
        if (!prepare(k, &c, how, &p)) continue;
        new_sums(&c, &p.sizes, &to);
        if (!run_backward(k, &c, &p, &to, m) || !judge_gradients(&c, &to)) continue;
        check_canaries("workspace", &p.workspace);
        if (m > 1) compare_gradients("beside another variant's", k, &to, &kept);
        gradient_bits whole = {0};
        if (step < m) compare_gradients("", k, &to, &whole);
        if (step < m && run_backward(k, &c, &p, &to, step))
            compare_gradients("in parts", k, &to, &whole);
    }
}

/* ---- decode -------------------------------------------------------------------------------- */

static void check_decode_head(const wpe_kernels *k, const attention_call *c, int h,
                              const prepared *p, const forward_results *to) {
    const wpe_matrix table = c->a[h].relative ? matrix_of(&c->table.dense) : (wpe_matrix){NULL, 0, 0};
    reset(&to->out);
    reset(&to->lse);
    reset(&p->workspace);
    if (!CALL(k, KERNEL(c, decode), &c->a[h], table, matrix_out_of(&to->out), to->lse.data,
              p->workspace.data))
        return;
    judge("out", &to->out, &c->want[h].out, c->has_infinity);
    judge("lse", &to->lse, &c->want[h].lse, c->has_infinity);
}

static void check_decode(void) {
    attention_call c;
    draw_attention(&c, WPE_DECODE);
    const forward_results to = new_forward_results(&c);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        prepared p = {0};
        if (!prepare(k, &c, (packing){0, 0}, &p)) continue;
        for (int h = 0; h < c.heads; h++) check_decode_head(k, &c, h, &p, &to);
        check_canaries("workspace", &p.workspace);
    }
}

const kernel_check attention_checks[] = {
    {"attention", check_forward, NULL},
    {"attention_backward", check_backward, NULL},
    {"attention_decode", check_decode, NULL},
    {"attention_store", check_attention_store, NULL},
    {NULL, NULL, NULL},
};
