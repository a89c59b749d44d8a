/* bench.c: measure cycles per element. */
#include "check.h"
#include "frame.h"

#include <stdio.h>
#include <time.h>

enum { SAMPLES = 30, TICKS_OF_A_SAMPLE = 100000 };

/* Return the time stamp counter, or nanoseconds. */
static uint64_t ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
#endif
}

static uint64_t ticks_of(bench_call *call, const wpe_kernels *k, void *context, int64_t times) {
    const uint64_t begin = ticks();
    for (int64_t i = 0; i < times; i++) call(k, context);
    return ticks() - begin;
}

void bench(const char *what, double elements, bench_call *call, void *context) {
    const wpe_kernels *k;
    printf("%-44s", what);
    EACH_VARIANT(k) {
        int64_t times = 1;
        while (ticks_of(call, k, context, times) < TICKS_OF_A_SAMPLE) times *= 2;
        uint64_t best = UINT64_MAX;
        for (int i = 0; i < SAMPLES; i++) {
            const uint64_t sample = ticks_of(call, k, context, times);
            if (sample < best) best = sample;
        }
        printf("%10s %8.2f", k->name, (double)best / (double)times / elements);
        fflush(stdout);
    }
    printf("\n");
}
