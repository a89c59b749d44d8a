/* check_functions.c: check exp, tanh, sincos and max of the vector headers alone, in ulp. */
#include "bounds.h"
#include "check.h"
#include "frame.h"
#include "functions.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

extern const check_functions check_functions_portable;
#if defined(__x86_64__)
extern const check_functions check_functions_avx2, check_functions_avx512, check_functions_avx2x2;
#endif

const check_functions *functions_of(const wpe_kernels *k) {
#if defined(__x86_64__)
    if (!strcmp(k->name, "avx2")) return &check_functions_avx2;
    if (!strcmp(k->name, "avx512")) return &check_functions_avx512;
    if (!strcmp(k->name, "avx2x2")) return &check_functions_avx2x2;
#endif
    (void)k;
    return &check_functions_portable;
}

enum { COUNT = 1024 }; /* how many arguments a case has */

/* ---- the largest error of each function ------------------------------------------------------ */

enum { EXP_F64, EXP_F32, TANH_F64, TANH_F32, SINE, COSINE, FUNCTIONS };
static const char *const names[] = {"exp_f64", "exp_f32", "tanh_f64", "tanh_f32", "sin", "cos"};
static const int types[] = {WPE_F64, WPE_F32, WPE_F64, WPE_F32, WPE_F64, WPE_F64};
static const double bounds[] = {EXP_F64_ULPS,  EXP_F32_ULPS, TANH_F64_ULPS,
                                TANH_F32_ULPS, SINCOS_ULPS,  SINCOS_ULPS};
static struct {
    wide ulps, argument;
} worst[MOST_VARIANTS][FUNCTIONS];

static wide ulps_between(int type, wide got, wide want) {
    if (got == want || (isnan(got) && isnan(want))) return 0;
    return fabsl(got - want) / (2 * half_ulp(type, want)); /* NaN if got or want is NaN */
}

static void judge(int function, const array *x, const array *out, const wide *want) {
    wide most = 0;
    int64_t where = 0;
    for (int64_t i = 0; i < COUNT && most <= bounds[function]; i++) {
        const wide error = ulps_between(types[function], get(out, i, 0, 0), want[i]);
        if (error <= most) continue; /* false for a NaN */
        most = error;
        where = i;
    }
    const int variant = variant_index();
    const wide argument = get(x, where, 0, 0);
    if (most > worst[variant][function].ulps) {
        worst[variant][function].ulps = most;
        worst[variant][function].argument = argument;
    }
    if (!(most <= bounds[function]))
        fail("%s(%.17Lg = %La) is %.17Lg, want %.17Lg: %.3Lf ulp, allowed %.1f", names[function],
             argument, argument, get(out, where, 0, 0), want[where], most, bounds[function]);
}

void print_worst_ulps(void) {
    const wpe_kernels *k;
    for (int f = 0; f < FUNCTIONS; f++) {
        int any = 0;
        EACH_VARIANT(k) any |= worst[variant_index()][f].ulps > 0;
        if (!any) continue;
        printf("%-10s at most", names[f]);
        EACH_VARIANT(k)
        printf("  %s %.3Lf ulp (%.9Lg)", k->name, worst[variant_index()][f].ulps,
               worst[variant_index()][f].argument);
        printf("\n");
    }
}

/* ---- arguments ------------------------------------------------------------------------------- */

static double of_bits64(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float of_bits32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Return an edge case. A NaN gets random payload bits, because kernels shift and add its bits. */
static double random_edge64(const double *edges, int count) {
    const double edge = edges[random_int(0, count - 1)];
    return isnan(edge) ? of_bits64(0x7ff8000000000000u | random_bits() >> 13) : edge;
}

static float random_edge32(const float *edges, int count) {
    const float edge = edges[random_int(0, count - 1)];
    return isnan(edge) ? of_bits32(0x7fc00000u | (uint32_t)(random_bits() >> 42)) : edge;
}

/* Fill x with consecutive floats, with random bits, or with uniform numbers. A number that is out
 * of range is replaced by an edge case. */
static void fill_f32(const array *x, float least, float most, const float *edges, int edge_count) {
    const uint32_t from = bits32((float)random_uniform(least, most));
    const int dense = chance(0.5), in_range = chance(0.5);
    for (int64_t i = 0; i < COUNT; i++) {
        float value = of_bits32(dense ? from + (uint32_t)i : (uint32_t)random_bits());
        if (!dense && in_range) value = (float)random_uniform(least, most);
        if (!(value >= least && value <= most)) value = random_edge32(edges, edge_count);
        put(x, i, 0, 0, value);
    }
}

static void fill_f64(const array *x, double least, double most, const double *edges,
                     int edge_count) {
    const int style = (int)random_int(0, 3);
    for (int64_t i = 0; i < COUNT; i++) {
        double value = random_uniform(least, most);
        if (style == 1) value = of_bits64(random_bits());
        if (style == 2) /* next to a step of the argument's reduction */
            value = ((double)random_int(-1030, 0) + 0.5) * M_LN2 * (1 + 1e-15 * random_normal());
        if (style == 3) value = random_uniform(-1, chance(0.5) ? 0 : 1);
        if (!(value >= least && value <= most)) value = random_edge64(edges, edge_count);
        put(x, i, 0, 0, value);
    }
}

/* ---- functions of one argument --------------------------------------------------------------- */

static wide *references(const array *x, wide (*exact)(wide)) {
    wide *want = new_wides(COUNT);
    for (int64_t i = 0; i < COUNT; i++) want[i] = exact(get(x, i, 0, 0));
    return want;
}

static wide exact_exp_f64(wide x) { return x < EXP_F64_LEAST ? 0 : expl(x); }
static wide exact_exp_f32(wide x) { return x < EXP_F32_LEAST ? 0 : expl(x); }

#define CHECK_ONE(name, NAME, type, TYPE, fill, least, most, exact, ...)                  \
    static void check_##name(void) {                                                      \
        static const type edges[] = {__VA_ARGS__};                                        \
        const array x = new_dense(TYPE, COUNT, 1, 1), out = new_dense(TYPE, COUNT, 1, 1); \
        fill(&x, least, most, edges, sizeof edges / sizeof *edges);                       \
        seal(&x);                                                                         \
        const wide *want = references(&x, exact);                                         \
        describe("%d arguments from %a on", COUNT, (double)get(&x, 0, 0, 0));             \
        const wpe_kernels *k;                                                             \
        EACH_VARIANT(k) {                                                                 \
            reset(&out);                                                                  \
            if (CALL_PLAIN(functions_of(k)->name(out.data, x.data, COUNT)) &&             \
                check_canaries("out", &out))                                              \
                judge(NAME, &x, &out, want);                                              \
        }                                                                                 \
    }

CHECK_ONE(exp_f64, EXP_F64, double, WPE_F64, fill_f64, -709, 0, exact_exp_f64, 0, -0.0, -INFINITY,
          NAN, -708, -708.0000000000001, -1e-300, -1e300, -0x1p-1074, -0x1p-53, -0x1p-54)
CHECK_ONE(exp_f32, EXP_F32, float, WPE_F32, fill_f32, -88, 80, exact_exp_f32, 0, -0.0f, -INFINITY,
          NAN, -87, -87.00001f, 80, -1e30f, 1e-40f, -0x1p-149f, -0x1p-24f, 0x1p-24f, -0x1p-25f)
CHECK_ONE(tanh_f64, TANH_F64, double, WPE_F64, fill_f64, -25, 25, tanhl, 0, -0.0, INFINITY,
          -INFINITY, NAN, 1e-310, 1e300, 0.625)
CHECK_ONE(tanh_f32, TANH_F32, float, WPE_F32, fill_f32, -22, 22, tanhl, 0, -0.0f, INFINITY,
          -INFINITY, NAN, 0.625f, -0.625f, 0x1.3ffffep-1f, 20, 20.000002f, 1e-40f, 1e38f, -1e38f)

/* ---- sincos ---------------------------------------------------------------------------------- */

/* Draw hi + lo, where |lo| is at most half an ulp of hi. Many sums lie next to a multiple of pi
 * / 2. */
static void random_angle(const array *hi, const array *lo, int64_t i) {
    const wide quarter = 1.57079632679489661923132169163975144L;
    wide angle = random_uniform(-1, 1) * exp2(random_uniform(-40, 31));
    if (chance(0.5)) {
        const wide multiple = rintl(random_uniform(-1, 1) * exp2(random_uniform(0, 30))) * quarter;
        angle = multiple + random_uniform(-1, 1) * ldexpl(multiple, (int)random_int(-58, -2));
    }
    const double high = (double)angle;
    put(hi, i, 0, 0, high);
    put(lo, i, 0, 0, chance(0.2) ? 0 : angle - high);
    if (chance(0.01)) put(hi, i, 0, 0, chance(0.5) ? 0x1p31 : -0x1p31);
}

static void check_sincos(void) {
    const array hi = new_dense(WPE_F64, COUNT, 1, 1), lo = new_dense(WPE_F64, COUNT, 1, 1);
    const array s = new_dense(WPE_F64, COUNT, 1, 1), c = new_dense(WPE_F64, COUNT, 1, 1);
    wide *sine = new_wides(COUNT), *cosine = new_wides(COUNT);
    for (int64_t i = 0; i < COUNT; i++) {
        random_angle(&hi, &lo, i);
        /* hi + lo = sum + rest exactly, and the square of rest is below the precision of `wide` */
        const wide high = get(&hi, i, 0, 0), low = get(&lo, i, 0, 0), sum = high + low;
        const wide rest = (high - sum) + low;
        sine[i] = sinl(sum) + cosl(sum) * rest;
        cosine[i] = cosl(sum) - sinl(sum) * rest;
    }
    seal(&hi);
    seal(&lo);
    describe("%d angles", COUNT);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&s);
        reset(&c);
        if (!CALL_PLAIN(functions_of(k)->sincos(s.data, c.data, hi.data, lo.data, COUNT))) continue;
        if (!check_canaries("sin", &s) || !check_canaries("cos", &c)) continue;
        judge(SINE, &hi, &s, sine);
        judge(COSINE, &hi, &c, cosine);
    }
}

/* ---- max: gives its second argument if either is NaN ----------------------------------------- */

static void check_max(void) {
    const int type = chance(0.5) ? WPE_F32 : WPE_F64;
    const array a = new_dense(type, COUNT, 1, 1), b = new_dense(type, COUNT, 1, 1);
    const array out = new_dense(type, COUNT, 1, 1);
    fill_normal(&a, 1);
    fill_normal(&b, 1);
    fill_special(&a, 0.2);
    fill_special(&b, 0.2);
    seal(&a);
    seal(&b);
    wide *want = new_wides(COUNT);
    for (int64_t i = 0; i < COUNT; i++) {
        const wide x = get(&a, i, 0, 0), y = get(&b, i, 0, 0);
        want[i] = x > y ? x : y;
    }
    describe("%s", type_name(type));
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        const check_functions *f = functions_of(k);
        reset(&out);
        if (type == WPE_F32 ? CALL_PLAIN(f->max_f32(out.data, a.data, b.data, COUNT))
                            : CALL_PLAIN(f->max_f64(out.data, a.data, b.data, COUNT)))
            compare("max", &out, want, NULL);
    }
}

/* ---- timing ---------------------------------------------------------------------------------- */

static array bench_x, bench_out;

#define BENCH_ONE(name, TYPE, least, most)                                                       \
    static void call_##name(const wpe_kernels *k, void *context) {                               \
        (void)context;                                                                           \
        functions_of(k)->name(bench_out.data, bench_x.data, COUNT);                              \
    }                                                                                            \
    static void bench_##name(void) {                                                             \
        bench_x = new_dense(TYPE, COUNT, 1, 1);                                                  \
        bench_out = new_dense(TYPE, COUNT, 1, 1);                                                \
        for (int64_t i = 0; i < COUNT; i++) put(&bench_x, i, 0, 0, random_uniform(least, most)); \
        bench(#name ", an element", COUNT, call_##name, NULL);                                   \
    }
BENCH_ONE(exp_f64, WPE_F64, -30, 0)
BENCH_ONE(exp_f32, WPE_F32, -30, 0)
BENCH_ONE(tanh_f64, WPE_F64, -5, 5)
BENCH_ONE(tanh_f32, WPE_F32, -5, 5)

const kernel_check function_checks[] = {
    {"exp_f64", check_exp_f64, bench_exp_f64},
    {"exp_f32", check_exp_f32, bench_exp_f32},
    {"tanh_f64", check_tanh_f64, bench_tanh_f64},
    {"tanh_f32", check_tanh_f32, bench_tanh_f32},
    {"sincos", check_sincos, NULL},
    {"max", check_max, NULL},
    {NULL, NULL, NULL},
};
