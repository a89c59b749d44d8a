/* check_rope_table.c: check rope_table: cos and sin of position * inv_freq. METHODS 2 [R]. */
#include "bounds.h"
#include "check.h"

#include <math.h>

typedef struct {
    wide cosine, sine;
    wide angle_error; /* absolute */
    wide large_lo;    /* 0, or the most that lo may be where |hi| > 2^31 */
} turn;

/* Return cos and sin of position * f. The product is the exact sum hi + lo. */
static turn turn_of(wide position, wide f) {
    const wide hi = position * f, lo = fmal(position, f, -hi);
    turn t = {cosl(hi) * cosl(lo) - sinl(hi) * sinl(lo), sinl(hi) * cosl(lo) + cosl(hi) * sinl(lo),
              0, 0};
    const wide unit = unit_roundoff(WPE_F64);
    if (fabsl(position) > 0x1p31L || position != rintl(position))
        t.angle_error = ANGLE_UNITS * unit * fabsl(hi);
    if (fabsl(hi) > 0x1p31L * (1 - unit)) t.large_lo = half_ulp(WPE_F64, hi);
    return t;
}

static wide allowed_of(int type, const turn *t, wide value, wide factor) {
    wide error = SINCOS_ULPS * 2 * half_ulp(WPE_F64, value);
    if (t->large_lo > 0)
        error = LARGE_ANGLE_UNITS * unit_roundoff(WPE_F64) * (fabsl(value) + t->large_lo);
    error = (error + t->angle_error) * fabsl(factor) * SLACK;
    if (type == WPE_F32) error += half_ulp(WPE_F64, value * factor); /* the product is a double */
    return error + half_ulp(type, fabsl(value * factor) + error);
}

static double random_position(int style) {
    static const double edges[] = {0, 1, -1, 0x1p31, -0x1p31, 0x1p31 - 1, 0x1p24, 0x1p24 + 1, -0.0};
    switch (style) {
        case 0:
            return edges[random_int(0, 8)];
        case 1:
            return (double)random_int(-5000, 5000);
        case 2:
            return (double)random_int(-(1LL << 31), 1LL << 31);
        case 3:
            return random_uniform(-1e5, 1e5);
        default:
            return (double)random_int(-(1LL << 53), 1LL << 53);
    }
}

/* Return a frequency. For one in three, position * f lies next to a multiple of pi / 2. */
static double random_frequency(double position) {
    if (position != 0 && chance(0.33)) {
        const wide quarter = 1.57079632679489661923132169163975144L;
        const int64_t most = fabs(position) < 0x1p30 ? (int64_t)fabs(position) + 2 : 1LL << 30;
        return (double)((wide)random_int(1, most) * quarter / (wide)position);
    }
    if (chance(0.5)) return pow(10, random_uniform(-7, 0.5));
    const double edges[] = {0, 1, -1, 0.5, 1e-30, 1.25e3, 0x1.fffffffffffffp-1};
    return edges[random_int(0, 6)];
}

typedef struct {
    int type;
    int64_t n;
    array cosine, sine, position, inv_freq, factor;
} table_call;

/* Call rope_table for elements begin..end-1 of the arrays. */
static int call_on(const wpe_kernels *k, const table_call *c, int64_t begin, int64_t end) {
    const array *const inputs[] = {&c->position, &c->inv_freq, &c->factor};
    const double *from[3];
    for (int a = 0; a < 3; a++) from[a] = at(inputs[a], begin, 0, 0);
    return CALL(k, rope_table[c->type], at(&c->cosine, begin, 0, 0), at(&c->sine, begin, 0, 0),
                from[0], from[1], from[2], end - begin, c->cosine.stride[0], c->sine.stride[0],
                c->position.stride[0], c->inv_freq.stride[0], c->factor.stride[0]);
}

static table_call random_table(int style) {
    table_call c = {.type = chance(0.5) ? WPE_F32 : WPE_F64, .n = random_size(0, 400)};
    c.cosine = new_output(c.type, c.n, 1, 1);
    c.sine = new_output(c.type, c.n, 1, 1);
    c.position = new_input(WPE_F64, c.n, 1, 1);
    c.inv_freq = new_input(WPE_F64, c.n, 1, 1);
    c.factor = new_input(WPE_F64, c.n, 1, 1);
    const int plain = chance(0.5);
    for (int64_t i = 0; i < c.n; i++) {
        put(&c.position, i, 0, 0, random_position(style));
        put(&c.factor, i, 0, 0, plain ? 1 : random_uniform(-2, 2));
    }
    for (int64_t i = 0; i < c.n; i++)
        put(&c.inv_freq, i, 0, 0, random_frequency((double)get(&c.position, i, 0, 0)));
    seal(&c.position);
    seal(&c.inv_freq);
    seal(&c.factor);
    return c;
}

static void check_rope_table(void) {
    const int style = chance(0.8) ? (int)random_int(0, 3) : 4;
    const table_call c = random_table(style);
    wide *want[2] = {new_wides(c.n), new_wides(c.n)};
    wide *allowed[2] = {new_wides(c.n), new_wides(c.n)};
    for (int64_t i = 0; i < c.n; i++) {
        const turn t = turn_of(get(&c.position, i, 0, 0), get(&c.inv_freq, i, 0, 0));
        const wide factor = get(&c.factor, i, 0, 0), values[] = {t.cosine, t.sine};
        for (int which = 0; which < 2; which++) {
            want[which][i] = values[which] * factor;
            allowed[which][i] = allowed_of(c.type, &t, values[which], factor);
        }
    }
    const int64_t begin = random_int(0, c.n), end = random_int(begin, c.n);
    char *bits = scratch((size_t)c.n * 8);
    describe(
        "positions of style %d, part %lld..%lld, cos %s sin %s position %s inv_freq %s factor %s",
        style, (long long)begin, (long long)end, show(&c.cosine), show(&c.sine), show(&c.position),
        show(&c.inv_freq), show(&c.factor));
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        expect_rows(&c.cosine, 0, c.n);
        expect_rows(&c.sine, 0, c.n);
        reset(&c.cosine);
        reset(&c.sine);
        if (!call_on(k, &c, 0, c.n) || !compare("cos", &c.cosine, want[0], allowed[0]) ||
            !compare("sin", &c.sine, want[1], allowed[1]))
            continue;
        keep_bits(&c.cosine, bits);
        expect_rows(&c.cosine, begin, end);
        expect_rows(&c.sine, begin, end);
        reset(&c.cosine);
        reset(&c.sine);
        if (call_on(k, &c, begin, end) && check_canaries("a part", &c.cosine) &&
            check_canaries("a part", &c.sine))
            compare_bits("a part", &c.cosine, bits);
    }
}

static void call_table(const wpe_kernels *k, void *context) {
    const table_call *b = context;
    k->rope_table[b->type](b->cosine.data, b->sine.data, b->position.data, b->inv_freq.data,
                           b->factor.data, b->n, 1, 1, 0, 1, 0);
}

static void bench_rope_table(void) {
    const int types[] = {WPE_F32, WPE_F64};
    for (int t = 0; t < 2; t++) {
        table_call b = {.type = types[t], .n = 64};
        b.cosine = new_dense(b.type, b.n, 1, 1);
        b.sine = new_dense(b.type, b.n, 1, 1);
        b.position = new_dense(WPE_F64, b.n, 1, 1);
        b.inv_freq = new_dense(WPE_F64, b.n, 1, 1);
        b.factor = new_dense(WPE_F64, b.n, 1, 1);
        for (int64_t i = 0; i < b.n; i++) {
            put(&b.position, i, 0, 0, 12345);
            put(&b.inv_freq, i, 0, 0, powl(10000, -(wide)i / 64));
            put(&b.factor, i, 0, 0, 1);
        }
        bench(t ? "rope_table f64, a pair" : "rope_table f32, a pair", (double)b.n, call_table, &b);
    }
}

const kernel_check rope_table_checks[] = {
    {"rope_table", check_rope_table, bench_rope_table},
    {NULL, NULL, NULL},
};
