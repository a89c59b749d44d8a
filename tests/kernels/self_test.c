/* self_test.c: check the checker: it must find the faults that are planted in a small function. */
#include "check.h"
#include "frame.h"

#include <stdio.h>
#include <stdlib.h>

typedef void fault(float *out, const float *x, int64_t n, int64_t out_stride, int64_t x_stride);

static void no_fault(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    for (int64_t i = 0; i < n; i++) out[i * o] = 2 * x[i * s];
}

static void wrong_last(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    out[(n - 1) * o] *= 1.0000002f;
}

static void unwritten_last(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n - 1, o, s);
}

static void reads_what_it_writes(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    for (int64_t i = 0; i < n; i++) out[i * o] += 2 * x[i * s];
}

static void writes_behind(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    (o > 0 ? out + (n - 1) * o : out)[1] = 0;
}

static void writes_before(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    (o > 0 ? out : out + (n - 1) * o)[-1] = 0;
}

static void writes_a_hole(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    if (o == 1 || o == -1) return writes_behind(out, x, n, o, s); /* no hole here */
    out[o > 0 ? 1 : -1] = 0;
}

static void writes_its_input(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    *(float *)x = 0;
}

/* The memory lies at one of its guards only. The other one may be some pages away. */
static void reads_outside(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    const float *end = s > 0 ? x + (n - 1) * s + 1 : x + 1, *begin = s > 0 ? x : x + (n - 1) * s;
    no_fault(out, x, n, o, s);
    float sum = 0;
    for (int i = 0; i < 1 << 15; i++) sum += *(const volatile float *)(end + i);
    for (int i = 1; i < 1 << 15; i++) sum += *(const volatile float *)(begin - i);
    out[0] += 0 * sum;
}

static void aborts(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    abort();
}

static void leaves_modes(float *out, const float *x, int64_t n, int64_t o, int64_t s) {
    no_fault(out, x, n, o, s);
    set_processor_modes(processor_modes() ^ MODE_BIT);
}

static const struct {
    const char *name;
    fault *function;
} faults[] = {
    {"a value one ulp off", wrong_last},
    {"an element that is not written", unwritten_last},
    {"an output that is read", reads_what_it_writes},
    {"a write behind the output", writes_behind},
    {"a write before the output", writes_before},
    {"a write between the output's elements", writes_a_hole},
    {"a write to an input", writes_its_input},
    {"a read past an input", reads_outside},
    {"an abort", aborts},
    {"modes that are not restored", leaves_modes},
};

/* Run one case, and return whether the checker reported nothing. */
static int passes(fault *function) {
    const int64_t n = random_size(2, 200);
    const array x = new_input(WPE_F32, n, 1, 1), out = new_output(WPE_F32, n, 1, 1);
    wide *want = new_wides(n);
    fill_normal(&x, 1);
    seal(&x);
    for (int64_t i = 0; i < n; i++) want[i] = 2 * get(&x, i, 0, 0);
    reset(&out);
    const int right = CALL_PLAIN(function(out.data, x.data, n, out.stride[0], x.stride[0])) &&
                      compare("out", &out, want, NULL);
    end_case();
    return right;
}

int self_test(void) {
    enum { CASES = 200, FAULTS = sizeof faults / sizeof *faults };
    int bad = 0;
    set_quiet(1);
    for (int i = 0; i < CASES; i++) bad += !passes(no_fault);
    if (bad) printf("FAIL %d of %d calls without a fault were reported\n", bad, CASES);
    for (int f = 0; f < FAULTS; f++) {
        int missed = 0;
        for (int i = 0; i < CASES; i++) missed += passes(faults[f].function);
        if (missed) printf("FAIL %s: missed in %d of %d calls\n", faults[f].name, missed, CASES);
        bad += missed;
    }
    set_quiet(0);
    printf("self-test: %d faults planted in %d calls each, %s\n", FAULTS, CASES,
           bad ? "NOT all found" : "all found");
    return bad != 0;
}
