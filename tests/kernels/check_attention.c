/* check_attention.c: check attention's forward and decode. METHODS 1 [W], 3 [S] [X] [A]. */
#include "attention_call.h"

/* Draw some consecutive query blocks, as a range of queries. */
static wpe_range draw_blocks(int64_t queries) {
    const int64_t blocks = (queries + WPE_QUERY_BLOCK - 1) / WPE_QUERY_BLOCK;
    const int64_t first_block = random_int(0, blocks - 1);
    const int64_t end_block = random_int(first_block, blocks), end = end_block * WPE_QUERY_BLOCK;
    return (wpe_range){first_block * WPE_QUERY_BLOCK, end < queries ? end : queries};
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

/* Check seen_keys of queries begin..end-1. Its ends are exact if the first and the last query see a
 * key. */
static void check_seen_keys(const wpe_kernels *k, const attention_call *c, int64_t begin,
                            int64_t end) {
    const wpe_attention *a = &c->a[0];
    wpe_range all = {0, 0}, next = {0, 0};
    if (!CALL_FOR(all, k, KERNEL(c, seen_keys), a, begin, end)) return;
    for (int64_t i = begin; i < end; i++) {
        const wpe_range seen = keys_in_range(a, i);
        if (seen.begin == seen.end) continue;
        if (all.begin > seen.begin || all.end < seen.end ||
            (i == begin && all.begin < seen.begin) || (i == end - 1 && all.end > seen.end))
            fail("seen_keys of %lld..%lld is %lld..%lld, but %lld sees %lld..%lld",
                 (long long)begin, (long long)end, (long long)all.begin, (long long)all.end,
                 (long long)i, (long long)seen.begin, (long long)seen.end);
    }
    if (all.begin < 0 || all.begin > all.end || all.end > a->keys)
        fail("seen_keys of %lld..%lld is %lld..%lld", (long long)begin, (long long)end,
             (long long)all.begin, (long long)all.end);
    if (end == a->queries || !CALL_FOR(next, k, KERNEL(c, seen_keys), a, begin + 1, end + 1))
        return;
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
    to.lse = new_dense(c->compute_type, c->a[0].queries, 1, 1);
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

/* Compute some blocks alone. They must have the same bits, and nothing else may be written. */
static void check_forward_part(const wpe_kernels *k, const attention_call *c, int h,
                               const prepared *p, const forward_results *to, wpe_range part) {
    kept_bits out = new_bits(&to->out), lse = new_bits(&to->lse);
    keep_bits(&to->out, out.bits);
    keep_bits(&to->lse, lse.bits);
    expect_rows(&to->out, part.begin, part.end);
    expect_rows(&to->lse, part.begin, part.end);
    if (run_forward(k, c, h, p, to, part) && check_canaries("part of out", &to->out) &&
        check_canaries("part of lse", &to->lse)) {
        compare_bits("part of out", &to->out, out.bits);
        compare_bits("part of lse", &to->lse, lse.bits);
    }
    expect_rows(&to->out, 0, c->a[h].queries);
    expect_rows(&to->lse, 0, c->a[h].queries);
}

static void check_forward_head(const wpe_kernels *k, const attention_call *c, int h,
                               const prepared *p, forward_results *to, const wpe_range *part) {
    const attention_results *want = &c->want[h];
    if (!run_forward(k, c, h, p, to, (wpe_range){0, c->a[h].queries})) return;
    if (!check_result("out", &to->out, &want->out, c->has_infinity)) return;
    if (!check_result("lse", &to->lse, &want->lse, c->has_infinity)) return;
    if (c->a[h].queries > 1) {
        compare_variants("out", k, &to->out, &to->out_bits);
        compare_variants("lse", k, &to->lse, &to->lse_bits);
    }
    if (part) check_forward_part(k, c, h, p, to, *part);
}

static void check_forward(void) {
    attention_call c;
    draw_attention(&c, WPE_FORWARD, 0);
    const packing how = draw_packing();
    const int64_t m = c.a[0].queries, begin = random_int(0, m - 1), end = random_int(begin + 1, m);
    const wpe_range part = draw_blocks(m);
    const int has_part = chance(m > WPE_QUERY_BLOCK ? 0.5 : 0.05);
    forward_results to[MOST_HEADS];
    for (int h = 0; h < c.heads; h++) to[h] = new_forward_results(&c);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        prepared p = {0};
        if (!is_called(&c, k)) continue;
        check_seen_keys(k, &c, begin, end);
        if (!prepare(k, &c, how, &p)) continue;
        for (int h = 0; h < c.heads; h++)
            check_forward_head(k, &c, h, &p, &to[h], has_part ? &part : NULL);
        check_canaries("workspace", &p.workspace);
    }
}

/* ---- decode -------------------------------------------------------------------------------- */

/* Decode heads first..end-1 in parts of `part` keys, and merge the parts. */
static int run_decode(const wpe_kernels *k, const attention_call *c, int first, int end,
                      int64_t part, const forward_results *to) {
    const int64_t n = c->a[0].keys, parts = n ? (n + part - 1) / part : 1;
    wpe_decode_sizes sizes;
    if (!CALL_FOR(sizes, k, KERNEL(c, decode_sizes), &c->a[0], end - first)) return 0;
    const int64_t item = (int64_t)type_size(c->compute_type);
    const int64_t stride = ((end - first) * sizes.sums + 15) / 16 * 16;
    const array workspace = new_block(c->compute_type, sizes.workspace);
    const array sums = new_block(c->compute_type, parts * stride);
    for (volatile int64_t p = 0; p < parts; p++) {
        const int64_t begin = p * part, end_key = begin + part < n ? begin + part : n;
        if (!CALL(k, KERNEL(c, decode), &c->a[first], end - first, begin, end_key,
                  (char *)sums.data + p * stride * item, workspace.data))
            return 0;
    }
    for (volatile int h = first; h < end; h++) {
        reset(&to[h].out);
        reset(&to[h].lse);
        if (!CALL(k, KERNEL(c, merge), &c->a[h],
                  (char *)sums.data + (h - first) * sizes.sums * item, parts, stride,
                  matrix_out_of(&to[h].out), to[h].lse.data))
            return 0;
    }
    return check_canaries("workspace", &workspace) && check_canaries("sums", &sums);
}

static void check_decode(void) {
    attention_call c;
    draw_attention(&c, WPE_FORWARD, 1);
    const int64_t part = WPE_KEY_BLOCK * random_int(1, 1 + c.a[0].keys / WPE_KEY_BLOCK);
    const int alone = (int)random_int(0, c.heads - 1);
    forward_results to[MOST_HEADS];
    for (int h = 0; h < c.heads; h++) to[h] = new_forward_results(&c);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        wpe_zone zones[MOST_ZONES];
        if (!is_called(&c, k) || !pack_table(k, &c, zones)) continue;
        if (!run_decode(k, &c, 0, c.heads, part, to)) continue;
        for (int h = 0; h < c.heads; h++) {
            check_result("out", &to[h].out, &c.want[h].out, c.has_infinity);
            check_result("lse", &to[h].lse, &c.want[h].lse, c.has_infinity);
            compare_variants("out", k, &to[h].out, &to[h].out_bits);
            compare_variants("lse", k, &to[h].lse, &to[h].lse_bits);
        }
        kept_bits out = new_bits(&to[alone].out);
        keep_bits(&to[alone].out, out.bits);
        if (run_decode(k, &c, alone, alone + 1, part, to))
            compare_bits("out without the other heads", &to[alone].out, out.bits);
    }
}

const kernel_check attention_checks[] = {
    {"attention", check_forward, bench_attention},
    {"attention_backward", check_attention_backward, bench_attention_backward},
    {"attention_decode", check_decode, bench_attention_decode},
    {"attention_store", check_attention_store, NULL},
    {NULL, NULL, NULL},
};
