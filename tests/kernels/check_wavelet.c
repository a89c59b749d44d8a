/* check_wavelet.c: check psi, wavelet tables and their gradients. METHODS 1 [W]. */
#include "bounds.h"
#include "check.h"
#include "psi_reference.h"

#include <math.h>
#include <stdio.h>

/* ---- psi ------------------------------------------------------------------------------------- */

/* Return t - shift, rounded once to the type. */
static double difference(int type, wide t, wide shift) {
    if (type == WPE_F64) return (double)t - (double)shift;
    return (double)rounded(type, t - shift); /* the difference of so few bits is exact */
}

typedef struct {
    int kind, type;
    int64_t n;
    array out, t, scale, shift;
} psi_call;

/* Fill t with positions inside the wavelet, at haar's jumps, at ricker's zeros, and in tails. */
static void fill_positions(const psi_call *c, int special) {
    static const double places[] = {0, -0.5, -1, 1, 0.5, 38, -38, 37.7, 26.6, 3e5, 1e12};
    for (int64_t i = 0; i < c->n; i++) {
        const wide scale = get(&c->scale, i, 0, 0), shift = get(&c->shift, i, 0, 0);
        wide u = chance(0.2) ? places[random_int(0, 10)] : 3 * random_normal();
        if (chance(0.1)) u = random_uniform(-40, 40);
        wide t = isfinite(scale) && isfinite(shift) ? u * scale + shift : u;
        put(&c->t, i, 0, 0, chance(0.3) ? rintl(t) : t);
        if (!special || chance(0.9)) continue;
        put(&c->scale, i, 0, 0, 1e30L); /* haar jumps where the quotient underflows */
        put(&c->shift, i, 0, 0, 0);
        put(&c->t, i, 0, 0, chance(0.5) ? -1e-30L : 1e-30L);
    }
    if (special) fill_special(&c->t, 0.1);
}

/* Call psi for elements begin..end-1 of the arrays. */
static int call_psi_on(const wpe_kernels *k, const psi_call *c, int64_t begin, int64_t end) {
    return CALL(k, psi[c->type], c->kind, at(&c->out, begin, 0, 0), at(&c->t, begin, 0, 0),
                at(&c->scale, begin, 0, 0), at(&c->shift, begin, 0, 0), end - begin,
                c->out.stride[0], c->t.stride[0], c->scale.stride[0], c->shift.stride[0]);
}

static void run_psi(const psi_call *c, const array *kept, const wide *want, const wide *allowed) {
    const int64_t begin = random_int(0, c->n), end = random_int(begin, c->n);
    char *bits = scratch((size_t)c->n * 8);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        expect_rows(&c->out, 0, c->n);
        reset(&c->out);
        if (kept) copy_array(&c->out, kept);
        if (!call_psi_on(k, c, 0, c->n) || !compare("out", &c->out, want, allowed) || kept)
            continue;
        keep_bits(&c->out, bits);
        expect_rows(&c->out, begin, end);
        reset(&c->out);
        if (call_psi_on(k, c, begin, end) && check_canaries("a part", &c->out))
            compare_bits("a part", &c->out, bits);
    }
}

static void check_psi(void) {
    static const int types[] = {WPE_F16, WPE_F32, WPE_F64};
    psi_call c = {.kind = (int)random_int(0, WPE_KINDS - 1), .type = types[random_int(0, 2)]};
    c.n = random_size(0, 400);
    const int special = chance(0.3), in_place = (int)random_int(0, 11); /* out is input 0, 1, 2 */
    c.out = new_output(c.type, c.n, 1, 1);
    c.t = new_input(c.type, c.n, 1, 1);
    c.scale = new_input(c.type, c.n, 1, 1);
    c.shift = new_input(c.type, c.n, 1, 1);
    for (int64_t i = 0; i < c.n; i++) {
        put(&c.scale, i, 0, 0, random_scale(special));
        put(&c.shift, i, 0, 0, chance(0.5) ? (wide)random_int(0, 15) : 10 * random_normal());
    }
    if (special) fill_special(&c.shift, 0.05);
    fill_positions(&c, special);
    array *const inputs[] = {&c.t, &c.scale, &c.shift};
    for (int n = 0; n < 3; n++) seal(inputs[n]);

    wide *want = new_wides(c.n), *allowed = new_wides(c.n);
    const int step_type = c.type == WPE_F64 ? WPE_F64 : WPE_F32;
    for (int64_t i = 0; i < c.n; i++) {
        const double d = difference(c.type, get(&c.t, i, 0, 0), get(&c.shift, i, 0, 0));
        const bounded_value psi = psi_of(c.kind, d, (double)get(&c.scale, i, 0, 0), step_type);
        want[i] = psi.value;
        allowed[i] = psi.error + half_ulp(c.type, fabsl(psi.value) + psi.error);
        if (c.kind == WPE_HAAR) allowed[i] = 0;
    }
    array kept;
    if (in_place < 3) {
        kept = *inputs[in_place];
        *inputs[in_place] = c.out;
    }
    describe("kind %d, out is input %d, out %s t %s scale %s shift %s", c.kind,
             in_place < 3 ? in_place : -1, show(&c.out), show(&c.t), show(&c.scale),
             show(&c.shift));
    run_psi(&c, in_place < 3 ? &kept : NULL, want, allowed);
}

static void call_psi(const wpe_kernels *k, void *context) {
    const psi_call *c = context;
    k->psi[c->type](c->kind, c->out.data, c->t.data, c->scale.data, c->shift.data, c->n, 1, 1, 0,
                    0);
}

static const char *const kinds[WPE_KINDS] = {"ricker", "gaussian", "morlet", "haar"};

static void bench_psi(void) {
    static const int types[] = {WPE_F16, WPE_F32, WPE_F64};
    for (int t = 0; t < 3; t++)
        for (int kind = 0; kind < WPE_KINDS; kind++) {
            psi_call c = {.kind = kind, .type = types[t], .n = 1000};
            c.out = new_dense(c.type, c.n, 1, 1);
            c.t = new_dense(c.type, c.n, 1, 1);
            c.scale = new_dense(c.type, c.n, 1, 1);
            c.shift = new_dense(c.type, c.n, 1, 1);
            fill_normal(&c.t, 3);
            put(&c.scale, 0, 0, 0, 2);
            put(&c.shift, 0, 0, 0, 1);
            char what[80];
            snprintf(what, sizeof what, "psi %s %s, an element", type_name(c.type), kinds[kind]);
            bench(what, (double)c.n, call_psi, &c);
        }
}

/* ---- tables and their gradients -------------------------------------------------------------- */

typedef struct {
    int kind, sign, type;
    array out, offsets, scale, shift;
    wpe_wavelet_shape shape;
} table_call;

static table_call random_table(int type, int special) {
    table_call c = {.kind = (int)random_int(0, WPE_KINDS - 1), .type = type};
    c.sign = chance(0.5) ? 1 : -1;
    const int64_t cols = random_size(0, 200);
    int64_t rows = random_size(0, cols > 40 ? 100 : 300);
    if (!cols) rows = random_empty(rows);
    c.out = new_output(type, rows, cols, 1);
    c.offsets = new_input(CHECK_I64, cols ? rows : 0, 1, 1);
    c.scale = new_input(WPE_F64, cols, 1, 1);
    c.shift = new_input(WPE_F64, cols, 1, 1);
    c.shape = (wpe_wavelet_shape){rows,
                                  cols,
                                  c.out.stride[0],
                                  c.out.stride[1],
                                  c.offsets.stride[0],
                                  c.scale.stride[0],
                                  c.shift.stride[0]};
    const int64_t first_offset =
        chance(0.8) ? random_int(-50, 50) : random_int(-(1LL << 53), 1LL << 53);
    const int in_order = chance(0.7), has_large = chance(0.3);
    for (int64_t i = 0; i < count_of(&c.offsets); i++) {
        int64_t offset = in_order ? first_offset + i : random_int(-500, 500);
        if (has_large && chance(0.05)) offset = random_int(-(1LL << 53), 1LL << 53);
        if (offset > 1LL << 53) offset = 1LL << 53;
        put(&c.offsets, i, 0, 0, offset);
    }
    const int grid = chance(0.4); /* powers of two in every lane */
    for (int64_t i = 0; i < cols; i++) {
        const double power = ldexp(1, (int)(i / 16 % 9));
        put(&c.scale, i, 0, 0, grid ? power : random_scale(special));
        put(&c.shift, i, 0, 0, grid ? i % 16 : 10 * random_normal());
    }
    seal(&c.offsets);
    seal(&c.scale);
    seal(&c.shift);
    return c;
}

static double distance_of(const table_call *c, int64_t row, int64_t col) {
    const double t = c->sign * (double)get(&c->offsets, row, 0, 0);
    return t - (double)get(&c->shift, col, 0, 0);
}

static void describe_table(const table_call *c, const char *out) {
    describe("kind %d sign %d %s %s offsets %s scale %s shift %s", c->kind, c->sign, out,
             show(&c->out), show(&c->offsets), show(&c->scale), show(&c->shift));
}

/* The part of the table from (row, col) on must have the same bits if it is computed alone. */
static void check_corner(const wpe_kernels *k, const table_call *c, int64_t row, int64_t col) {
    wpe_wavelet_shape s = c->shape;
    s.rows -= row;
    s.cols -= col;
    if (s.rows == 0 || s.cols == 0) return;
    array alone = new_dense(c->type, s.rows, s.cols, 1), corner = c->out;
    s.out_row_stride = s.cols;
    s.out_col_stride = 1;
    corner.data = at(&c->out, row, col, 0);
    corner.shape[0] = s.rows;
    corner.shape[1] = s.cols;
    if (!CALL(k, wavelet_table[c->type], c->kind, c->sign, alone.data, at(&c->offsets, row, 0, 0),
              at(&c->scale, col, 0, 0), at(&c->shift, col, 0, 0), &s))
        return;
    compare_bits("a part by itself", &corner, alone.data);
}

static void check_wavelet_table(void) {
    static const int types[] = {WPE_F16, WPE_F32, WPE_F64};
    const table_call c = random_table(types[random_int(0, 2)], chance(0.3));
    const wpe_wavelet_shape *s = &c.shape;
    const int64_t n = s->rows * s->cols;
    wide *want = new_wides(n), *allowed = new_wides(n);
    for (int64_t e = 0; e < n; e++) {
        const double scale = (double)get(&c.scale, e % s->cols, 0, 0);
        const bounded_value psi =
            psi_of(c.kind, distance_of(&c, e / s->cols, e % s->cols), scale, WPE_F64);
        want[e] = psi.value;
        allowed[e] = psi.error + half_ulp(c.type, fabsl(psi.value) + psi.error);
        if (c.kind == WPE_HAAR) allowed[e] = 0;
    }
    describe_table(&c, "out");
    const int64_t row = random_int(0, s->rows), col = random_int(0, s->cols);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&c.out);
        if (CALL(k, wavelet_table[c.type], c.kind, c.sign, c.out.data, c.offsets.data, c.scale.data,
                 c.shift.data, s) &&
            compare("out", &c.out, want, allowed))
            check_corner(k, &c, row, col);
    }
}

/* Sum the gradients of a column over the rows, in order. The bound is the sum of the derivatives'
 * errors, and a rounding for each row and one more. */
static void gradient_reference(const table_call *c, int64_t col, bounded_value sums[2]) {
    const wide unit = unit_roundoff(WPE_F64), tiny = half_ulp(WPE_F64, 0);
    const double scale = (double)get(&c->scale, col, 0, 0);
    wide sizes[2] = {0, 0};
    sums[0] = sums[1] = (bounded_value){0, 0};
    for (int64_t row = 0; row < c->shape.rows; row++) {
        const wide grad = get(&c->out, row, col, 0);
        bounded_value by[2];
        psi_gradient_of(c->kind, distance_of(c, row, col), scale, &by[0], &by[1]);
        for (int p = 0; p < 2; p++) {
            sums[p].value += grad * by[p].value;
            sums[p].error += fabsl(grad) * (by[p].error + tiny) + tiny;
            sizes[p] += fabsl(grad * by[p].value);
        }
    }
    for (int p = 0; p < 2; p++)
        sums[p].error =
            SLACK * (sums[p].error + SUM_UNITS * unit * sizes[p] * (wide)(c->shape.rows + 1));
}

static void check_wavelet_backward(void) {
    const table_call c = random_table(WPE_F64, chance(0.3));
    const wpe_wavelet_shape *s = &c.shape;
    fill_normal(&c.out, 1); /* here it is an input: the gradient of the table */
    seal(&c.out);
    const array grad_scale = new_dense(WPE_F64, s->cols, 1, 1);
    const array grad_shift = new_dense(WPE_F64, s->cols, 1, 1);
    wide *want[2] = {new_wides(s->cols), new_wides(s->cols)};
    wide *allowed[2] = {new_wides(s->cols), new_wides(s->cols)};
    for (int64_t col = 0; col < s->cols; col++) {
        bounded_value sums[2];
        gradient_reference(&c, col, sums);
        for (int p = 0; p < 2; p++) {
            want[p][col] = sums[p].value;
            allowed[p][col] = sums[p].error;
        }
    }
    describe_table(&c, "grad");
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&grad_scale);
        reset(&grad_shift);
        if (!CALL(k, wavelet_backward, c.kind, c.sign, grad_scale.data, grad_shift.data, c.out.data,
                  c.offsets.data, c.scale.data, c.shift.data, s))
            continue;
        if (compare("grad_scale", &grad_scale, want[0], allowed[0]))
            compare("grad_shift", &grad_shift, want[1], allowed[1]);
    }
}

typedef struct {
    table_call call;
    array grad_scale, grad_shift;
} table_bench;

static void call_table(const wpe_kernels *k, void *context) {
    const table_call *c = &((const table_bench *)context)->call;
    k->wavelet_table[c->type](c->kind, c->sign, c->out.data, c->offsets.data, c->scale.data,
                              c->shift.data, &c->shape);
}

static void call_backward(const wpe_kernels *k, void *context) {
    const table_bench *b = context;
    const table_call *c = &b->call;
    k->wavelet_backward(c->kind, c->sign, b->grad_scale.data, b->grad_shift.data, c->out.data,
                        c->offsets.data, c->scale.data, c->shift.data, &c->shape);
}

static void bench_tables(int type, bench_call *call, const char *name) {
    for (int kind = 0; kind < WPE_KINDS; kind++) {
        table_bench b = {.call = {.kind = kind, .sign = 1, .type = type}};
        table_call *c = &b.call;
        c->shape = (wpe_wavelet_shape){256, 128, 128, 1, 1, 1, 1};
        c->out = new_dense(type, 256, 128, 1);
        c->offsets = new_dense(CHECK_I64, 256, 1, 1);
        c->scale = new_dense(WPE_F64, 128, 1, 1);
        c->shift = new_dense(WPE_F64, 128, 1, 1);
        b.grad_scale = new_dense(WPE_F64, 128, 1, 1);
        b.grad_shift = new_dense(WPE_F64, 128, 1, 1);
        for (int64_t i = 0; i < 256; i++) put(&c->offsets, i, 0, 0, i);
        for (int64_t i = 0; i < 128; i++) put(&c->scale, i, 0, 0, ldexpl(1, (int)(i / 16)));
        for (int64_t i = 0; i < 128; i++) put(&c->shift, i, 0, 0, i % 16);
        fill_normal(&c->out, 1);
        char what[80];
        snprintf(what, sizeof what, "%s %s %s, an element", name, type_name(type), kinds[kind]);
        bench(what, 256 * 128, call, &b);
    }
}

static void bench_wavelet_table(void) {
    bench_tables(WPE_F16, call_table, "wavelet_table");
    bench_tables(WPE_F32, call_table, "wavelet_table");
    bench_tables(WPE_F64, call_table, "wavelet_table");
}

static void bench_wavelet_backward(void) {
    bench_tables(WPE_F64, call_backward, "wavelet_backward");
}

const kernel_check wavelet_checks[] = {
    {"psi", check_psi, bench_psi},
    {"wavelet_table", check_wavelet_table, bench_wavelet_table},
    {"wavelet_backward", check_wavelet_backward, bench_wavelet_backward},
    {NULL, NULL, NULL},
};
