/* dispatch.c: choose the table of kernels: that of the best instruction set, or a named one. */
#include "wavepe.h"

#include <stddef.h>
#include <string.h>

static const char *const kind_names[WPE_KINDS] = {"ricker", "gaussian", "morlet", "haar"};

extern const wpe_kernels wpe_kernels_portable;
#ifdef WPE_X86
extern const wpe_kernels wpe_kernels_avx2, wpe_kernels_avx512;
#ifdef WPE_TEST_VARIANT /* 64-byte vectors compiled for AVX2, to test avx512's code anywhere */
extern const wpe_kernels wpe_kernels_avx2x2;
#endif
#endif

const wpe_kernels *wpe_variant(int index) {
    const wpe_kernels *found[3] = {&wpe_kernels_portable, NULL, NULL};
    int count = 1;
#ifdef WPE_X86
    /* This asks cpuid, and for the wider registers also the operating system (xgetbv). */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v3")) found[count++] = &wpe_kernels_avx2;
    if (__builtin_cpu_supports("x86-64-v4")) found[count++] = &wpe_kernels_avx512;
#endif
    return index >= 0 && index < count ? found[index] : NULL;
}

static wpe_dispatch dispatch = {NULL, kind_names};

static void switch_to(const wpe_kernels *table) {
    __atomic_store_n(&dispatch.current, table, __ATOMIC_RELEASE);
}

wpe_dispatch *wpe_get_dispatch(void) {
    if (!wpe_current(&dispatch)) {
        const wpe_kernels *best = NULL;
        for (int i = 0; wpe_variant(i); i++) best = wpe_variant(i);
        switch_to(best);
    }
    return &dispatch;
}

int wpe_use_variant(const char *name) {
    const wpe_kernels *table, *found = NULL;
    for (int i = 0; (table = wpe_variant(i)); i++)
        if (!strcmp(table->name, name)) found = table;
#if defined(WPE_X86) && defined(WPE_TEST_VARIANT)
    if (__builtin_cpu_supports("x86-64-v3") && !strcmp(wpe_kernels_avx2x2.name, name))
        found = &wpe_kernels_avx2x2;
#endif
    if (!found) return -1;
    switch_to(found);
    return 0;
}
