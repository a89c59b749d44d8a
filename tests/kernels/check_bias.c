/* check_bias.c: check relative_bias, q[i] . p[i + shift - j], and skew and unskew. METHODS 1, 3. */
#include "bounds.h"
#include "check.h"

#include <math.h>
#include <stdio.h>

/* Return the row of the table that row number c reads, or -1. */
static int64_t row_for(int64_t c, int64_t rows, int beyond) {
    if (c >= 0 && c < rows) return c;
    if (beyond == WPE_ZERO) return -1;
    return c < 0 ? 0 : rows - 1;
}

/* Draw the table's rows and the shift. In most cases some keys read a row of the table. */
static void random_rows(int64_t queries, int64_t keys, int beyond, int64_t *rows, int64_t *shift) {
    *rows = random_size(beyond == WPE_ZERO ? 0 : 1, 400);
    *shift = chance(0.5) ? 0 : chance(0.8) ? random_int(-queries, keys) : random_int(-900, 900);
    if (chance(0.02)) *shift = random_int(-(1LL << 40), 1LL << 40);
}

/* ---- relative_bias --------------------------------------------------------------------------- */

typedef struct {
    int type;
    array out, q, p, packed;
    wpe_bias_shape shape;
} bias_call;

static bias_call random_bias(void) {
    bias_call c = {.type = chance(0.5) ? WPE_F32 : WPE_F64};
    wpe_bias_shape *s = &c.shape;
    s->queries = random_size(0, 260);
    s->keys = random_size(0, 260);
    if (!s->keys) s->queries = random_empty(s->queries);
    s->head_size = random_size(0, s->queries * s->keys > 9000 ? 33 : 130);
    s->beyond = chance(0.5) ? WPE_EDGE : WPE_ZERO;
    random_rows(s->queries, s->keys, s->beyond, &s->rows, &s->shift);
    c.out = new_output(c.type, s->queries, s->keys, 1);
    c.q = new_input(c.type, s->keys ? s->queries : 0, s->head_size, 1);
    c.p = new_input(c.type, s->rows, s->head_size, 1);
    s->out_row_stride = c.out.stride[0];
    s->out_col_stride = c.out.stride[1];
    s->q_row_stride = c.q.stride[0];
    s->q_col_stride = c.q.stride[1];
    /* style 1: subnormal results; 2 and 3: subnormal inputs with normal products */
    const double tiny = (double)smallest_normal(c.type), scale = sqrt(tiny);
    const int style = chance(0.7) ? 0 : (int)random_int(1, 3);
    fill_normal(&c.q, (double[]){1, scale, tiny, 1 / scale}[style]);
    fill_normal(&c.p, (double[]){1, scale, 1 / scale, tiny}[style]);
    if (chance(0.15)) fill_special(&c.p, 0.01);
    if (chance(0.1)) fill_special(&c.q, 0.01);
    seal(&c.q);
    seal(&c.p);
    return c;
}

/* Return x, or 0 if x is subnormal. */
static wide flushed(int type, wide x) { return fabsl(x) < smallest_normal(type) ? 0 : x; }

static wide *flushed_values(int type, const array *x) {
    wide *values = values_of(x);
    for (int64_t n = 0; n < count_of(x); n++) values[n] = flushed(type, values[n]);
    return values;
}

static void bias_reference(const bias_call *c, wide *want, wide *allowed) {
    const wpe_bias_shape *s = &c->shape;
    const wide unit = unit_roundoff(c->type), tiny = smallest_normal(c->type);
    const wide *q = flushed_values(c->type, &c->q), *p = flushed_values(c->type, &c->p);
    for (int64_t i = 0; s->keys && i < s->queries; i++)
        for (int64_t j = 0; j < s->keys; j++) {
            const int64_t row = row_for(i + s->shift - j, s->rows, s->beyond);
            wide sum = 0, size = 0;
            for (int64_t k = 0; row >= 0 && k < s->head_size; k++) {
                const wide product = q[i * s->head_size + k] * p[row * s->head_size + k];
                sum += product;
                if (isfinite(product)) size += fabsl(product);
            }
            wide *error = &allowed[i * s->keys + j];
            want[i * s->keys + j] = sum;
            /* each product and each sum is rounded or flushed */
            *error = (wide)(s->head_size + 1) * (SLACK * SUM_UNITS * unit * size + 2 * tiny);
            if (isinf(rounded(c->type, 2 * size))) *error = INFINITY; /* parts may be infinite */
        }
}

static int check_flushed(const bias_call *c) {
    for (int64_t i = 0; c->shape.keys && i < c->shape.queries; i++)
        for (int64_t j = 0; j < c->shape.keys; j++) {
            const wide value = get(&c->out, i, j, 0);
            if (value == 0 || flushed(c->type, value) != 0) continue;
            fail("out[%lld][%lld] is %.9Lg, a subnormal", (long long)i, (long long)j, value);
            return 0;
        }
    return 1;
}

/* Compute all rows, then a range of rows alone: same bits, and nothing else may be written. */
static void run_bias(const wpe_kernels *k, const bias_call *c, int64_t begin, int64_t end,
                     const wide *want, const wide *allowed, void *bits) {
    const wpe_bias_shape *s = &c->shape;
    expect_rows(&c->out, 0, s->queries);
    reset(&c->out);
    if (!CALL(k, relative_bias[c->type], c->out.data, c->q.data, c->packed.data, s, 0, s->queries))
        return;
    if (!compare("out", &c->out, want, allowed) || !check_flushed(c)) return;
    keep_bits(&c->out, bits);
    expect_rows(&c->out, begin, end);
    reset(&c->out);
    if (!CALL(k, relative_bias[c->type], c->out.data, c->q.data, c->packed.data, s, begin, end))
        return;
    if (check_canaries("a range of rows", &c->out)) compare_bits("a range of rows", &c->out, bits);
}

/* Pack p. Return 0 if something went wrong. */
static int pack(const wpe_kernels *k, bias_call *c) {
    const wpe_bias_shape *s = &c->shape;
    int64_t size = 0;
    if (!CALL_FOR(size, k, packed_size[c->type], s->rows, s->head_size)) return 0;
    if (size < s->rows * s->head_size || size > (s->rows + 64) * s->head_size)
        return fail("packed_size is %lld", (long long)size), 0;
    c->packed = new_block(c->type, size);
    expect_rows(&c->packed, 0, size);
    if (!CALL(k, pack_table[c->type], c->packed.data, c->p.data, s->rows, s->head_size,
              c->p.stride[0], c->p.stride[1]) ||
        !check_canaries("packed", &c->packed))
        return 0;
    seal(&c->packed);
    return 1;
}

static void check_relative_bias(void) {
    bias_call c = random_bias();
    const wpe_bias_shape *s = &c.shape;
    const int64_t n = s->queries * s->keys;
    const int64_t begin = random_int(0, s->queries), end = random_int(begin, s->queries);
    wide *want = new_wides(n), *allowed = new_wides(n);
    char *bits = scratch((size_t)n * 8), *bits_before = NULL;
    bias_reference(&c, want, allowed);
    describe("shift %lld beyond %d, rows %lld..%lld alone, out %s q %s p %s", (long long)s->shift,
             s->beyond, (long long)begin, (long long)end, show(&c.out), show(&c.q), show(&c.p));
    const wpe_kernels *k;
    const wpe_kernels *volatile before = NULL;
    EACH_VARIANT(k) {
        if (!pack(k, &c)) continue;
        run_bias(k, &c, begin, end, want, allowed, bits);
        expect_rows(&c.out, begin, end); /* what the last call wrote */
        if (before && same_arithmetic(before, k))
            compare_bits("the variant before", &c.out, bits_before);
        if (!bits_before) bits_before = scratch((size_t)n * 8);
        keep_bits(&c.out, bits_before);
        before = k;
    }
}

typedef struct {
    bias_call call;
    const wpe_kernels *packed_by;
} bias_bench;

static void call_bias(const wpe_kernels *k, void *context) {
    bias_bench *b = context;
    const bias_call *c = &b->call;
    if (b->packed_by != k)
        k->pack_table[c->type](c->packed.data, c->p.data, c->shape.rows, c->shape.head_size,
                               c->p.stride[0], 1);
    b->packed_by = k;
    k->relative_bias[c->type](c->out.data, c->q.data, c->packed.data, &c->shape, 0,
                              c->shape.queries);
}

static void bench_relative_bias(void) {
    const int types[] = {WPE_F32, WPE_F64};
    for (int t = 0; t < 2; t++) {
        bias_bench b = {.call = {.type = types[t]}};
        bias_call *c = &b.call;
        c->shape = (wpe_bias_shape){.queries = 192,
                                    .keys = 192,
                                    .rows = 192,
                                    .head_size = 64,
                                    .out_row_stride = 192,
                                    .out_col_stride = 1,
                                    .q_row_stride = 64,
                                    .q_col_stride = 1};
        c->out = new_dense(c->type, 192, 192, 1);
        c->q = new_dense(c->type, 192, 64, 1);
        c->p = new_dense(c->type, 192, 64, 1);
        c->packed = new_block(c->type, 256 * 64);
        fill_normal(&c->q, 1);
        fill_normal(&c->p, 1);
        bench(t ? "relative_bias f64, a product" : "relative_bias f32, a product",
              192 * 192 / 2 * 64, call_bias, &b);
    }
}

/* ---- skew and unskew ------------------------------------------------------------------------- */

typedef struct {
    int type;
    array skewed, t;
    wpe_skew_shape shape;
} skew_call;

static skew_call random_skew(int forward) {
    skew_call c = {.type = chance(0.5) ? WPE_F32 : WPE_F64};
    wpe_skew_shape *s = &c.shape;
    s->queries = random_size(0, 130);
    s->keys = random_size(0, 260);
    s->beyond = chance(0.5) ? WPE_EDGE : WPE_ZERO;
    random_rows(s->queries, s->keys, s->beyond, &s->rows, &s->shift);
    if (!(forward ? s->keys : s->rows)) s->queries = random_empty(s->queries);
    if (forward) {
        c.skewed = new_output(c.type, s->queries, s->keys, 1);
        c.t = new_input(c.type, s->keys ? s->queries : 0, s->rows, 1);
    } else {
        c.skewed = new_input(c.type, s->rows ? s->queries : 0, s->keys, 1);
        c.t = new_output(c.type, s->queries, s->rows, 1);
    }
    s->skewed_row_stride = c.skewed.stride[0];
    s->skewed_col_stride = c.skewed.stride[1];
    s->t_row_stride = c.t.stride[0];
    s->t_col_stride = c.t.stride[1];
    const array *input = forward ? &c.t : &c.skewed;
    fill_normal(input, 1);
    if (forward && chance(0.2)) fill_special(input, 0.05);
    seal(input);
    describe("shift %lld beyond %d, skewed %s t %s", (long long)s->shift, s->beyond,
             show(&c.skewed), show(&c.t));
    return c;
}

static void check_skew(void) {
    const skew_call c = random_skew(1);
    const wpe_skew_shape *s = &c.shape;
    wide *want = new_wides(s->queries * s->keys);
    for (int64_t i = 0; s->keys && i < s->queries; i++)
        for (int64_t j = 0; j < s->keys; j++) {
            const int64_t row = row_for(i + s->shift - j, s->rows, s->beyond);
            want[i * s->keys + j] = row < 0 ? 0 : get(&c.t, i, row, 0);
        }
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&c.skewed);
        if (CALL(k, skew[c.type], c.skewed.data, c.t.data, s))
            compare("skewed", &c.skewed, want, NULL);
    }
}

/* unskew is the transpose of skew: it adds skewed[i][j] to the t[i][row] that skew reads for it. */
static void check_unskew(void) {
    const skew_call c = random_skew(0);
    const wpe_skew_shape *s = &c.shape;
    const int64_t n = s->queries * s->rows;
    wide *want = new_wides(n), *allowed = new_wides(n);
    for (int64_t i = 0; s->rows && i < s->queries; i++) {
        for (int64_t j = 0; j < s->keys; j++) {
            const int64_t row = row_for(i + s->shift - j, s->rows, s->beyond);
            if (row < 0) continue;
            want[i * s->rows + row] += get(&c.skewed, i, j, 0);
            allowed[i * s->rows + row] += fabsl(get(&c.skewed, i, j, 0));
        }
        for (int64_t row = 0; row < s->rows; row++) {
            const int sums = s->beyond == WPE_EDGE && (row == 0 || row == s->rows - 1);
            allowed[i * s->rows + row] *=
                sums ? SLACK * SUM_UNITS * unit_roundoff(c.type) * (wide)s->keys : 0;
        }
    }
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&c.t);
        if (CALL(k, unskew[c.type], c.t.data, c.skewed.data, s)) compare("t", &c.t, want, allowed);
    }
}

static void call_skew(const wpe_kernels *k, void *context) {
    const skew_call *c = context;
    k->skew[c->type](c->skewed.data, c->t.data, &c->shape);
}

static void call_unskew(const wpe_kernels *k, void *context) {
    const skew_call *c = context;
    k->unskew[c->type](c->t.data, c->skewed.data, &c->shape);
}

static void bench_skews(bench_call *call, const char *what) {
    skew_call c = {.type = WPE_F32};
    c.shape = (wpe_skew_shape){192, 192, 192, 0, 192, 1, 192, 1, WPE_ZERO};
    c.skewed = new_dense(c.type, 192, 192, 1);
    c.t = new_dense(c.type, 192, 192, 1);
    fill_normal(&c.skewed, 1);
    fill_normal(&c.t, 1);
    bench(what, 192 * 192, call, &c);
}

static void bench_skew(void) { bench_skews(call_skew, "skew f32, an element"); }
static void bench_unskew(void) { bench_skews(call_unskew, "unskew f32, an element"); }

const kernel_check bias_checks[] = {
    {"relative_bias", check_relative_bias, bench_relative_bias},
    {"skew", check_skew, bench_skew},
    {"unskew", check_unskew, bench_unskew},
    {NULL, NULL, NULL},
};
