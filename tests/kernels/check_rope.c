/* check_rope.c: check rope. METHODS 2 [R]. */
#include "bounds.h"
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    int type, real; /* the type of x and out; the compute type, also of cos and sin */
    array out, x, cos, sin;
    wpe_rope_shape shape;
} rope_call;

static void set_strides(rope_call *c) {
    memcpy(c->shape.out_stride, c->out.stride, sizeof c->out.stride);
    memcpy(c->shape.x_stride, c->x.stride, sizeof c->x.stride);
    memcpy(c->shape.cos_stride, c->cos.stride, sizeof c->cos.stride);
    memcpy(c->shape.sin_stride, c->sin.stride, sizeof c->sin.stride);
}

/* Return where the first or the second element of a pair lies in its row. */
static int64_t element_of(const wpe_rope_shape *s, int64_t pair, int second) {
    return s->interleaved ? 2 * pair + second : pair + (second ? s->pairs : 0);
}

/* Compute the expected values and the allowed errors, row-major. */
static void rope_reference(const rope_call *c, wide *want, wide *allowed) {
    const wpe_rope_shape *s = &c->shape;
    const wide unit = unit_roundoff(c->real), tiny = half_ulp(c->real, 0);
    for (int64_t i = 0; s->head_size && i < s->outer; i++)
        for (int64_t j = 0; j < s->inner; j++) {
            const int64_t row = (i * s->inner + j) * s->head_size;
            for (int64_t e = 0; e < s->head_size; e++) want[row + e] = get(&c->x, i, j, e);
            for (int64_t pair = 0; pair < s->pairs; pair++) {
                const int64_t first = element_of(s, pair, 0), second = element_of(s, pair, 1);
                const wide a = get(&c->x, i, j, first), b = get(&c->x, i, j, second);
                const wide cosine = get(&c->cos, i, j, pair);
                const wide sine = get(&c->sin, i, j, pair) * (s->inverse ? -1 : 1);
                want[row + first] = a * cosine - b * sine;
                want[row + second] = b * cosine + a * sine;
                const wide sizes[] = {fabsl(a * cosine) + fabsl(b * sine),
                                      fabsl(b * cosine) + fabsl(a * sine)};
                for (int n = 0; n < 2; n++) {
                    const int64_t at = row + (n ? second : first);
                    const wide error = ROPE_UNITS * (unit * sizes[n] + tiny);
                    allowed[at] = error;
                    if (c->type != c->real)
                        allowed[at] += half_ulp(c->type, fabsl(want[at]) + error);
                }
            }
        }
}

/* A row must have the same bits if it is rotated alone, in contiguous memory. */
static void check_row_alone(const wpe_kernels *k, const rope_call *c, int64_t i, int64_t j) {
    const wpe_rope_shape *s = &c->shape;
    rope_call one = *c;
    one.x = new_dense(c->type, 1, 1, s->head_size);
    one.out = new_dense(c->type, 1, 1, s->head_size);
    one.cos = new_dense(c->real, 1, 1, s->pairs);
    one.sin = new_dense(c->real, 1, 1, s->pairs);
    for (int64_t e = 0; e < s->head_size; e++) put(&one.x, 0, 0, e, get(&c->x, i, j, e));
    for (int64_t e = 0; e < s->pairs; e++) {
        put(&one.cos, 0, 0, e, get(&c->cos, i, j, e));
        put(&one.sin, 0, 0, e, get(&c->sin, i, j, e));
    }
    one.shape.outer = one.shape.inner = 1;
    set_strides(&one);
    if (!CALL(k, rope[one.type], one.out.data, one.x.data, one.cos.data, one.sin.data, &one.shape))
        return;
    char *bits = scratch((size_t)s->head_size * type_size(c->type));
    keep_bits(&one.out, bits);
    array row = c->out;
    row.data = at(&c->out, i, j, 0);
    row.shape[0] = row.shape[1] = 1;
    compare_bits("the row by itself", &row, bits);
}

static void check_rope(void) {
    static const int types[] = {WPE_F16, WPE_BF16, WPE_F32, WPE_F64};
    rope_call c = {.type = types[random_int(0, 3)]};
    c.real = c.type == WPE_F64 ? WPE_F64 : WPE_F32;
    wpe_rope_shape *s = &c.shape;
    s->outer = random_size(0, 5);
    s->inner = random_size(0, 9);
    s->head_size = random_size(0, 400);
    if (!s->head_size) s->outer = random_empty(s->outer);
    s->pairs = chance(0.6) ? s->head_size / 2 : random_int(0, s->head_size / 2);
    s->interleaved = chance(0.5) ? (int)random_int(1, 2) : 0;
    s->inverse = chance(0.5);
    const int in_place = chance(0.25);
    array kept = new_input(c.type, s->outer, s->inner, s->head_size);
    c.out = new_output(c.type, s->outer, s->inner, s->head_size);
    c.x = in_place ? c.out : kept;
    c.cos = new_input(c.real, s->outer, s->inner, s->pairs);
    c.sin = new_input(c.real, s->outer, s->inner, s->pairs);
    set_strides(&c);
    fill_normal(&kept, chance(0.2) ? 1000 : 1);
    fill_normal(&c.cos, 1);
    fill_normal(&c.sin, 1);
    if (chance(0.2)) fill_special(&kept, 0.05);
    const array all[] = {kept, c.cos, c.sin};
    for (int n = 0; n < 3; n++) seal(&all[n]);

    const int64_t count = s->outer * s->inner * s->head_size;
    wide *want = new_wides(count), *allowed = new_wides(count);
    rope_call from_kept = c;
    from_kept.x = kept;
    rope_reference(&from_kept, want, allowed);
    describe("pairs %lld interleaved %d inverse %d in place %d out %s x %s cos %s sin %s",
             (long long)s->pairs, s->interleaved, s->inverse, in_place, show(&c.out), show(&c.x),
             show(&c.cos), show(&c.sin));
    const int64_t i = s->outer ? random_int(0, s->outer - 1) : 0;
    const int64_t j = s->inner ? random_int(0, s->inner - 1) : 0;
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&c.out);
        if (in_place) copy_array(&c.out, &kept);
        if (!CALL(k, rope[c.type], c.out.data, c.x.data, c.cos.data, c.sin.data, s)) continue;
        if (compare("out", &c.out, want, allowed) && count) check_row_alone(k, &from_kept, i, j);
    }
}

static void call_rope(const wpe_kernels *k, void *context) {
    const rope_call *c = context;
    k->rope[c->type](c->out.data, c->x.data, c->cos.data, c->sin.data, &c->shape);
}

static void bench_rope(void) {
    for (int type = 0; type < WPE_DTYPES; type++)
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            rope_call c = {.type = type, .real = type == WPE_F64 ? WPE_F64 : WPE_F32};
            c.shape = (wpe_rope_shape){
                .outer = 8, .inner = 8, .head_size = 128, .pairs = 64, .interleaved = interleaved};
            c.x = new_dense(type, 8, 8, 128);
            c.out = new_dense(type, 8, 8, 128);
            c.cos = new_dense(c.real, 8, 1, 64);
            c.sin = new_dense(c.real, 8, 1, 64);
            const array *const inputs[] = {&c.x, &c.cos, &c.sin};
            for (int n = 0; n < 3; n++) fill_normal(inputs[n], 1);
            set_strides(&c);
            c.shape.cos_stride[1] = c.shape.sin_stride[1] = 0;
            char what[80];
            snprintf(what, sizeof what, "rope %s %s, an element", type_name(type),
                     interleaved ? "interleaved" : "half-split");
            bench(what, 8 * 8 * 128, call_rope, &c);
        }
}

const kernel_check rope_checks[] = {{"rope", check_rope, bench_rope}, {NULL, NULL, NULL}};
