/* check.c: the checker of the kernels: it makes random calls of every kernel in every variant. */
#include "check.h"
#include "frame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const kernel_check *const suites[] = {
    wavelet_checks,    /* psi, tables of it, their gradient */
    rope_table_checks, /* cos and sin of positions */
    rope_checks,       /* the rotation */
    bias_checks,       /* relative_bias, skew, unskew */
    attention_checks,  /* forward, backward, decode, store */
    function_checks,   /* exp, tanh, sincos, max */
    conversion_checks, /* f16 and bf16 */
    NULL,
};

enum { MOST_CHECKS = 64, MOST_FAILURES = 3, LEAST_CASES = 20 };

static struct {
    const kernel_check *check;
    double seconds;
    int64_t cases;
    int failures;
} checks[MOST_CHECKS];
static int check_count;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void list_checks(const char *only) {
    for (int s = 0; suites[s]; s++)
        for (const kernel_check *check = suites[s]; check->name; check++)
            if (!only || !strcmp(only, check->name)) checks[check_count++].check = check;
}

/* Return the seed of a case. Only the seed, the check's name and the case's number enter it. */
static uint64_t seed_of_case(uint64_t seed, const char *name, int64_t number) {
    uint64_t hash = 0xcbf29ce484222325u ^ seed; /* FNV-1a */
    for (; *name; name++) hash = (hash ^ (uint8_t)*name) * 0x100000001b3u;
    return hash ^ (uint64_t)number * 0xd6e8feb86659fd93u;
}

static void run_case(int index, uint64_t seed, int64_t number) {
    current = (check_case){checks[index].check, seed, number};
    const double begin = now();
    const int before = failures();
    seed_random(seed_of_case(seed, current.check->name, number));
    draw_layouts();
    describe("not described yet");
    current.check->check();
    end_case();
    checks[index].seconds += now() - begin;
    checks[index].cases++;
    checks[index].failures += failures() > before;
}

/* Return the check that has run for the shortest time, or -1 if all have failed MOST_FAILURES
 * times. */
static int next_check(void) {
    int next = -1;
    for (int i = 0; i < check_count; i++) {
        if (checks[i].failures >= MOST_FAILURES) continue;
        if (next < 0 || checks[i].seconds < checks[next].seconds) next = i;
    }
    return next;
}

static void run_all(uint64_t seed, double seconds) {
    const double begin = now();
    for (int i = 0; i < check_count; i++)
        while (checks[i].cases < LEAST_CASES && checks[i].failures < MOST_FAILURES)
            run_case(i, seed, checks[i].cases);
    while (now() - begin < seconds) {
        const int next = next_check();
        if (next < 0) return;
        run_case(next, seed, checks[next].cases);
    }
}

static const char usage[] =
    "usage: check [--seconds S] [--seed N] [--kernel NAME] [--variant NAME] [--case K]\n"
    "             [--bench] [--list] [--self-test]\n"
    "Calls every kernel with random arguments that its contract allows, and compares the results\n"
    "with references. --case repeats one call. --bench prints cycles per element instead.\n"
    "--self-test checks that the checker finds planted faults.\n";

static int run_benchmarks(void) {
    for (int i = 0; i < check_count; i++)
        if (checks[i].check->bench) {
            current.check = checks[i].check;
            seed_random(1);
            checks[i].check->bench();
            end_case();
        }
    return 0;
}

static void print_summary(int all, uint64_t seed) {
    print_worst_ulps();
    print_counts(all);
    for (int i = 0; i < check_count; i++)
        printf("%-26s%12lld cases, %.0f a second%s\n", checks[i].check->name,
               (long long)checks[i].cases, (double)checks[i].cases / (checks[i].seconds + 1e-9),
               checks[i].failures >= MOST_FAILURES ? ", given up" : "");
    printf("seed %llu: %d failures\n", (unsigned long long)seed, failures());
}

static struct {
    double seconds;
    uint64_t seed;
    int64_t one_case;
    const char *kernel, *variant;
    int benchmark, list, self_test;
} options = {.seconds = 3, .one_case = -1};

/* Read the command line. Return 0 if an option is unknown or its value is missing. */
static int read_options(int count, char **words) {
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *value = words[i + 1]; /* NULL after the last word */
        const int switches = !strcmp(word, "--bench")       ? options.benchmark = 1
                             : !strcmp(word, "--list")      ? options.list = 1
                             : !strcmp(word, "--self-test") ? options.self_test = 1
                                                            : 0;
        if (switches) continue;
        if (!value) return 0;
        if (!strcmp(word, "--seconds"))
            options.seconds = atof(value);
        else if (!strcmp(word, "--seed"))
            options.seed = strtoull(value, NULL, 10);
        else if (!strcmp(word, "--kernel"))
            options.kernel = value;
        else if (!strcmp(word, "--variant"))
            options.variant = value;
        else if (!strcmp(word, "--case"))
            options.one_case = strtoll(value, NULL, 10);
        else
            return 0;
        i++;
    }
    return 1;
}

int main(int count, char **words) {
    options.seed = (uint64_t)time(NULL);
    if (!read_options(count, words)) return fputs(usage, stderr), 2;
    program_name = words[0];
    list_checks(options.kernel);
    if (!check_count) return fprintf(stderr, "no check is called %s\n", options.kernel), 2;
    for (int i = 0; options.list && i < check_count; i++) puts(checks[i].check->name);
    if (options.list) return 0;
    if (!list_variants(options.variant))
        return fprintf(stderr, "there is no variant %s\n", options.variant), 2;
    if (options.benchmark) return run_benchmarks();
    catch_signals();
    if (options.self_test) return self_test();
    printf("seed %llu\n", (unsigned long long)options.seed);
    if (options.one_case >= 0)
        for (int i = 0; i < check_count; i++) run_case(i, options.seed, options.one_case);
    else
        run_all(options.seed, options.seconds);
    print_summary(!options.kernel && !options.variant && options.one_case < 0, options.seed);
    return failures() > 0;
}
