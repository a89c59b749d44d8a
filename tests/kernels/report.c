/* report.c: the variants, the calls of each kernel, and the failures. */
#include "check.h"
#include "frame.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

check_case current;
const char *program_name = "check";

/* ---- variants -------------------------------------------------------------------------------- */

#if defined(__x86_64__)
static const char *const known[] = {"portable", "avx2", "avx2x2", "avx512"};
#else
static const char *const known[] = {"portable"};
#endif
enum { KNOWN = sizeof known / sizeof *known };

static const wpe_kernels *variants[MOST_VARIANTS];
static int count, taken;

int list_variants(const char *only) {
    for (int i = 0; i < KNOWN; i++) {
        if (wpe_use_variant(known[i])) {
            if (!only) printf("not run: %s (this CPU or this build does not have it)\n", known[i]);
            continue;
        }
        if (!only || !strcmp(only, known[i])) variants[count++] = wpe_current(wpe_get_dispatch());
    }
    return count;
}

const wpe_kernels *take_variant(int index) {
    taken = index;
    return index < count ? variants[index] : NULL;
}

int variant_index(void) { return taken; }
const char *current_variant(void) { return taken < count ? variants[taken]->name : "all variants"; }

int same_arithmetic(const wpe_kernels *a, const wpe_kernels *b) {
    return strcmp(a->name, "portable") && strcmp(b->name, "portable");
}

/* ---- failures -------------------------------------------------------------------------------- */

static char description[2000];
static int failed, is_quiet;

void set_quiet(int quiet) {
    is_quiet = quiet;
    failed = 0;
}

void describe(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(description, sizeof description, format, arguments);
    va_end(arguments);
}

void fail(const char *format, ...) {
    va_list arguments;
    failed++;
    if (is_quiet) return;
    va_start(arguments, format);
    printf("FAIL %s %s: ", current.check ? current.check->name : "", current_variant());
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n     call: %s\n     again: %s --kernel %s --seed %llu --case %lld\n", description,
           program_name, current.check ? current.check->name : "", (unsigned long long)current.seed,
           (long long)current.number);
    fflush(stdout);
}

int failures(void) { return failed; }

/* ---- counts ---------------------------------------------------------------------------------- */

enum { ENTRIES = sizeof(wpe_kernels) / sizeof(void *) };
static int64_t calls[MOST_VARIANTS][ENTRIES];

#define MEMBER(member, count) {#member, offsetof(wpe_kernels, member) / sizeof(void *), count}
#define ATTENTION(member)                                                                          \
    {"attention " #member, offsetof(wpe_kernels, attention[0].member) / sizeof(void *), 1},        \
        {"attention " #member " f64", offsetof(wpe_kernels, attention[1].member) / sizeof(void *), \
         1}
static const struct {
    const char *name;
    size_t first;
    int count; /* how many pointers: one per type */
} members[] = {
    MEMBER(psi, WPE_DTYPES),
    MEMBER(wavelet_table, WPE_DTYPES),
    MEMBER(wavelet_backward, 1),
    MEMBER(rope_table, WPE_DTYPES),
    MEMBER(rope, WPE_DTYPES),
    MEMBER(packed_size, WPE_DTYPES),
    MEMBER(pack_table, WPE_DTYPES),
    MEMBER(relative_bias, WPE_DTYPES),
    MEMBER(skew, WPE_DTYPES),
    MEMBER(unskew, WPE_DTYPES),
    ATTENTION(sizes),
    ATTENTION(seen_keys),
    ATTENTION(zone_size),
    ATTENTION(pack_zone),
    ATTENTION(pack),
    ATTENTION(forward),
    ATTENTION(backward),
    ATTENTION(decode_sizes),
    ATTENTION(decode),
    ATTENTION(merge),
    ATTENTION(store),
};
enum { MEMBERS = sizeof members / sizeof *members };

void count_call(ptrdiff_t entry) { calls[taken][entry]++; }

static void print_name(size_t entry) {
    for (int m = 0; m < MEMBERS; m++)
        if (entry >= members[m].first && entry < members[m].first + (size_t)members[m].count) {
            printf("%s", members[m].name);
            if (members[m].count > 1) printf(" %s", type_name((int)(entry - members[m].first)));
            return;
        }
    printf("pointer %zu of wpe_kernels, which report.c does not name,", entry);
}

/* Report the pointers of the table that no check has called. */
static void report_never_called(void) {
    for (size_t entry = 1; entry < ENTRIES; entry++) {
        int missing = 0;
        for (int v = 0; v < count; v++) {
            if (calls[v][entry] || !((const void *const *)variants[v])[entry]) continue;
            if (!missing++) {
                printf("FAIL ");
                print_name(entry);
                printf(" was never called in");
            }
            printf(" %s", variants[v]->name);
        }
        if (missing) printf("\n");
        failed += missing > 0;
    }
}

void print_counts(int all) {
    printf("%-26s", "calls");
    for (int v = 0; v < count; v++) printf("%12s", variants[v]->name);
    printf("\n");
    for (int m = 0; m < MEMBERS; m++) {
        int64_t sums[MOST_VARIANTS] = {0}, sum = 0;
        for (int v = 0; v < count; v++)
            for (int i = 0; i < members[m].count; i++) sums[v] += calls[v][members[m].first + i];
        for (int v = 0; v < count; v++) sum += sums[v];
        if (!sum) continue;
        printf("%-26s", members[m].name);
        for (int v = 0; v < count; v++) printf("%12lld", (long long)sums[v]);
        printf("\n");
    }
    if (all) report_never_called();
}
