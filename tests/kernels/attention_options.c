/* attention_options.c: draw which keys each query sees, and the other options of the scores. */
#include "attention.h"

#include <math.h>
#include <stdlib.h>

/* ---- ranges -------------------------------------------------------------------------------- */

static int64_t clipped(int64_t x, int64_t most) { return x < most ? x : most; }

/* Pack sequences one after another. A sequence has the same queries as keys. */
static void pack_sequences(const wpe_attention *a, int64_t *begin, int64_t *end) {
    for (int64_t i = 0, last; i < a->queries; i = last) {
        last = clipped(i + random_size(1, a->queries), a->queries);
        for (int64_t x = i; x < last; x++) {
            begin[x] = clipped(i, a->keys);
            end[x] = clipped(last, a->keys);
        }
    }
}

/* Draw runs one after another, with gaps; or two bounds that rise independently and may cross. */
static void draw_bounds(const wpe_attention *a, int64_t *begin, int64_t *end) {
    int64_t from = 0, to = random_size(0, a->keys);
    const double change = ldexp(1, -(int)random_int(0, 6));
    const int in_order = chance(0.6);
    for (int64_t i = 0; i < a->queries; i++) {
        if (chance(change)) {
            from =
                in_order ? (chance(0.8) ? to : random_int(to, a->keys)) : random_int(from, a->keys);
            const int64_t least = in_order ? from : to;
            to = random_int(least, chance(0.5) ? clipped(least + 40, a->keys) : a->keys);
        }
        begin[i] = from;
        end[i] = to;
    }
}

static void draw_runs(wpe_attention *a) {
    array begin = new_dense(CHECK_I64, a->queries, 1, 1);
    array end = new_dense(CHECK_I64, a->queries, 1, 1);
    if (chance(0.5))
        pack_sequences(a, begin.data, end.data);
    else
        draw_bounds(a, begin.data, end.data);
    seal(&begin);
    seal(&end);
    a->run_begin = begin.data;
    a->run_end = end.data;
}

/* Draw queries that see no keys or few, between others that see some: their keys lie in other
 * sequences than they do. */
static void draw_narrow_runs(wpe_attention *a) {
    a->offset = random_int(-40, 60);
    a->causal = chance(0.8);
    a->window = random_int(1, 40);
    draw_runs(a);
}

static void draw_ranges(wpe_attention *a) {
    const int64_t m = a->queries, n = a->keys, large = INT64_C(1) << random_int(10, 60);
    a->offset = chance(0.3)    ? n - m
                : chance(0.03) ? (chance(0.5) ? large : -large)
                               : random_int(-m - 2, n + 2);
    a->causal = chance(0.6);
    int64_t least = a->offset - (n - 1), most = a->offset + m - 1; /* of the deltas */
    if (least < 0) least = 0;
    if (most < least) most = least;
    a->window = chance(0.5)   ? INT64_C(1) << 60
                : chance(0.6) ? least + random_size(0, 70)
                              : random_int(least, most + 2);
    a->window = clipped(a->window, INT64_C(1) << 60);
    a->end_key = n;
    if (chance(0.3)) {
        a->first_key = random_int(0, n);
        if (chance(0.6)) a->end_key = random_int(a->first_key, n);
    }
    if (chance(0.2))
        draw_narrow_runs(a);
    else if (chance(0.2))
        draw_runs(a);
}

/* ---- segments and masks ---------------------------------------------------------------------- */

static void draw_segments(wpe_attention *a) {
    static const int64_t ids[] = {0, 1, -1, INT64_MAX, INT64_MIN, 7};
    array segments = new_dense(CHECK_I64, a->keys, 1, 1);
    int64_t *id = segments.data, sequence = 0;
    const double change = ldexp(1, -(int)(a->keys > 96 ? random_int(3, 8) : random_int(0, 6)));
    const int kinds = (int)random_int(0, 5), sorted = chance(0.3);
    for (int64_t j = 0; j < a->keys; j++) {
        if (chance(change)) sequence = sorted ? sequence + 1 : random_int(0, kinds);
        id[j] = sorted ? sequence : ids[sequence];
    }
    seal(&segments);
    a->segments = id;
}

/* Fill a mask with stretches of 0 and of another byte, which need not be 1. Some neighbouring
 * queries see no key at all. */
static void fill_mask(const array *x) {
    const double share = random_uniform(0, 1), change = ldexp(1, -(int)random_int(0, 5));
    const double blinding = chance(0.5) ? 0 : ldexp(1, -(int)random_int(0, 4));
    int seen = chance(share), blind = 0;
    for (int64_t i = 0; i < x->shape[0]; i++) {
        if (chance(blinding)) blind = chance(0.5);
        for (int64_t j = 0; j < x->shape[1]; j++) {
            if (chance(change)) seen = chance(share);
            put(x, i, j, 0, seen && !blind ? (chance(0.9) ? 1 : 128) : 0);
        }
    }
    seal(x);
}

static void draw_mask(wpe_attention *a) {
    array x = new_input(CHECK_U8, a->queries, a->keys, 1);
    fill_mask(&x);
    a->mask = x.data;
    a->mask_row_stride = x.stride[0];
    a->mask_col_stride = x.stride[1];
}

/* ---- the other options --------------------------------------------------------------------- */

static void draw_sink(wpe_attention *a) {
    a->sink = chance(0.3) ? (float)random_uniform(-6, 6) : -INFINITY;
}

void draw_head_options(wpe_attention *a) {
    a->drop_row = random_bits();
    if (a->slope != 0) a->slope *= random_uniform(0, 1);
    if (chance(0.3)) a->scale = random_uniform(-1, 1);
    if (chance(0.3)) draw_sink(a);
    if (a->mask && chance(0.7)) draw_mask(a);
}

/* Draw drop_below: any number, the one that drops all pairs, or exactly the hash of a pair. */
static void draw_dropout(wpe_attention *a) {
    a->seed = random_bits();
    a->drop_row = random_bits();
    const double style = random_uniform(0, 1);
    a->drop_below = (uint64_t)random_int(1, 0xf8000000);
    if (style < 0.1) a->drop_below = UINT64_C(1) << 32;
    if (style > 0.7 && a->keys)
        a->drop_below = dropout_hash(a, random_int(0, a->queries - 1), random_int(0, a->keys - 1));
    const double kept = 1 - (double)a->drop_below * 0x1p-32;
    a->keep_scale = kept > 0.01 ? 1 / kept : 1;
}

void draw_options(wpe_attention *a, int gentle) {
    draw_ranges(a);
    if (a->queries == a->keys && chance(a->keys > 192 ? 0.5 : 0.3)) draw_segments(a);
    if (chance(0.2)) {
        array x = new_input(CHECK_U8, a->keys, 1, 1);
        fill_mask(&x);
        a->key_mask = x.data;
        a->key_mask_stride = x.stride[0];
    }
    if (chance(0.2)) draw_mask(a);
    const double d = a->head_size ? (double)a->head_size : 1;
    a->scale = chance(0.6) ? 1 / sqrt(d) : chance(0.05) ? 0 : random_uniform(-2, 2) / sqrt(d);
    if (chance(0.2)) {
        const double longest = fabs((double)a->offset) + (double)(a->queries + a->keys);
        a->slope = random_uniform(-1, 1) * (gentle ? 5 : 80) / longest;
    }
    if (chance(0.2)) a->softcap = random_uniform(0.2, 20);
    if (chance(0.2)) draw_dropout(a);
    draw_sink(a);
}
