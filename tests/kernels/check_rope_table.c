/* check_rope_table.c: cos and sin of position * inv_freq. METHODS 2 [R]. */
#include "bounds.h"
#include "check.h"

#include <math.h>

typedef struct {
    wide cosine, sine;
    wide angle_error; /* absolute */
    wide far;         /* 0, or the most that lo may be where |hi| > 2^31 */
} turn;

/* cos and sin of position * f. The product is exact: hi + lo. */
static turn turn_of(wide position, wide f) {
    const wide hi = position * f, lo = fmal(position, f, -hi);
    turn t = {cosl(hi) * cosl(lo) - sinl(hi) * sinl(lo), sinl(hi) * cosl(lo) + cosl(hi) * sinl(lo),
              0, 0};
    const wide unit = unit_roundoff(WPE_F64);
    if (fabsl(position) > 0x1p31L || position != rintl(position))
        t.angle_error = ANGLE_UNITS * unit * fabsl(hi);
    if (fabsl(hi) > 0x1p31L * (1 - unit)) t.far = half_ulp(WPE_F64, hi);
    return t;
}

static wide allowed_of(int type, const turn *t, wide value, wide factor) {
    wide error = SINCOS_ULPS * 2 * half_ulp(WPE_F64, value);
    if (t->far > 0) error = FAR_UNITS * unit_roundoff(WPE_F64) * (fabsl(value) + t->far);
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

/* A frequency; one in three puts position * f next to a multiple of pi / 2. */
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

static void check_rope_table(void) {
    const int type = chance(0.5) ? WPE_F32 : WPE_F64;
    const int64_t n = random_size(0, 400);
    array cosine = new_output(type, n, 1, 1), sine = new_output(type, n, 1, 1);
    array position = new_input(WPE_F64, n, 1, 1), inv_freq = new_input(WPE_F64, n, 1, 1);
    array factor = new_input(WPE_F64, n, 1, 1);
    const int style = chance(0.8) ? (int)random_int(0, 3) : 4, plain = chance(0.5);
    for (int64_t i = 0; i < n; i++) {
        put(&position, i, 0, 0, random_position(style));
        put(&factor, i, 0, 0, plain ? 1 : random_uniform(-2, 2));
    }
    for (int64_t i = 0; i < n; i++)
        put(&inv_freq, i, 0, 0, random_frequency((double)get(&position, i, 0, 0)));
    const array inputs[] = {position, inv_freq, factor};
    for (int a = 0; a < 3; a++) seal(&inputs[a]);

    wide *cos_want = new_wides(n), *sin_want = new_wides(n);
    wide *cos_allowed = new_wides(n), *sin_allowed = new_wides(n);
    for (int64_t i = 0; i < n; i++) {
        const turn t = turn_of(get(&position, i, 0, 0), get(&inv_freq, i, 0, 0));
        const wide times = get(&factor, i, 0, 0);
        cos_want[i] = t.cosine * times;
        sin_want[i] = t.sine * times;
        cos_allowed[i] = allowed_of(type, &t, t.cosine, times);
        sin_allowed[i] = allowed_of(type, &t, t.sine, times);
    }
    describe("positions of style %d, cos %s sin %s position %s inv_freq %s factor %s", style,
             show(&cosine), show(&sine), show(&position), show(&inv_freq), show(&factor));
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&cosine);
        reset(&sine);
        if (!CALL(k, rope_table[type], cosine.data, sine.data, position.data, inv_freq.data,
                  factor.data, n, cosine.stride[0], sine.stride[0], position.stride[0],
                  inv_freq.stride[0], factor.stride[0]))
            continue;
        if (compare("cos", &cosine, cos_want, cos_allowed))
            compare("sin", &sine, sin_want, sin_allowed);
    }
}

typedef struct {
    int type;
    int64_t n;
    array cosine, sine, position, inv_freq, factor;
} table_bench;

static void call_table(const wpe_kernels *k, void *context) {
    const table_bench *b = context;
    k->rope_table[b->type](b->cosine.data, b->sine.data, b->position.data, b->inv_freq.data,
                           b->factor.data, b->n, 1, 1, 0, 1, 0);
}

static void bench_rope_table(void) {
    const int types[] = {WPE_F32, WPE_F64};
    for (int t = 0; t < 2; t++) {
        table_bench b = {.type = types[t], .n = 64};
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
