/* attention_call.c: the preparation of an attention call, and the comparison of its results. */
#include "attention_call.h"

#include <math.h>
#include <string.h>

/* ---- comparison ------------------------------------------------------------------------------ */

/* Return whether a value is right. It must be NaN if it depends on a NaN. The lse of a query that
 * sees no key is -inf. */
static int is_right(int type, wide got, double want, double bound, int has_infinity) {
    if (isnan(want)) return has_infinity || !isfinite(got);
    if (isinf(want)) return got == want;
    const wide error = fabsl(got - want);
    if (error <= bound) return 1;
    if (isnan(got)) return 0;
    if (isinf(got)) return rounded(type, want + copysignl(bound, got)) == got;
    return error <= bound + half_ulp(type, fabsl((wide)want) + bound);
}

int check_result(const char *what, const array *got, const bounded_matrix *want, int has_infinity) {
    if (!check_canaries(what, got)) return 0;
    int64_t wrong = 0, first = 0;
    for (int64_t n = 0; n < want->rows * want->cols; n++) {
        const wide value = get(got, n / want->cols, n % want->cols, 0);
        if (is_right(got->type, value, want->value[n], want->bound[n], has_infinity)) continue;
        if (!wrong++) first = n;
    }
    if (!wrong) return 1;
    const int64_t i = first / want->cols, j = first % want->cols;
    const wide value = get(got, i, j, 0);
    fail(
        "%s: %lld of %lld wrong, first [%lld][%lld]: got %.9Lg, want %.9g, error %.3Lg, allowed "
        "%.3g",
        what, (long long)wrong, (long long)(want->rows * want->cols), (long long)i, (long long)j,
        value, want->value[first], fabsl(value - want->value[first]), want->bound[first]);
    return 0;
}

kept_bits new_bits(const array *x) {
    return (kept_bits){NULL, scratch((size_t)count_of(x) * type_size(x->type) + 1)};
}

/* Compare values, so that -0 equals 0: a sum that underflowed to -0 becomes 0 in a variant that
 * adds zeros of more padding rows. */
static void compare_values(const char *what, const array *x, const void *bits) {
    array kept = *x;
    for (int64_t i = 0, n = 0; i < x->shape[0]; i++)
        for (int64_t j = 0; j < x->shape[1]; j++, n++) {
            kept.data = (char *)bits + n * (int64_t)type_size(x->type);
            const wide now = get(x, i, j, 0), before = get(&kept, 0, 0, 0);
            if (now == before || (isnan(now) && isnan(before))) continue;
            return fail("%s: [%lld][%lld] is %.17Lg, and %.17Lg in another variant", what,
                        (long long)i, (long long)j, now, before);
        }
}

void compare_variants(const char *what, const wpe_kernels *k, const array *x, kept_bits *kept) {
    if (kept->of && same_arithmetic(k, kept->of)) return compare_values(what, x, kept->bits);
    kept->of = k;
    keep_bits(x, kept->bits);
}

int is_called(const attention_call *c, const wpe_kernels *k) {
    return c->all_variants || strcmp(k->name, "avx2x2");
}

/* ---- preparation --------------------------------------------------------------------------- */

packing draw_packing(void) { return (packing){random_int(0, 2), chance(0.5)}; }

static int pack_keys(const wpe_kernels *k, const attention_call *c, const array *packed,
                     packing how) {
    const int64_t n = c->a[0].keys, step = how.tiles ? how.tiles * WPE_KEY_BLOCK : n;
    for (volatile int64_t done = 0; done < n; done += step) {
        const int64_t begin = how.backwards ? (n - 1) / step * step - done : done;
        const int64_t end = begin + step < n ? begin + step : n;
        if (!CALL(k, KERNEL(c, pack), &c->a[0], packed->data, c->pass, begin, end)) return 0;
    }
    return 1;
}

static int pack_zone(const wpe_kernels *k, const attention_call *c, int z, wpe_zone *zone) {
    const drawn_table *t = &c->table;
    const int64_t d = c->a[0].table_size;
    int64_t size = 0;
    *zone = t->zones[z];
    if (!CALL_FOR(size, k, KERNEL(c, zone_size), zone->rows, zone->rank, d, c->pass)) return 0;
    const array memory = new_block(c->compute_type, size);
    const wpe_matrix none = {NULL, 0, 0};
    if (!CALL(k, KERNEL(c, pack_zone), zone, memory.data, c->storage, d, matrix_of(&t->rows[z]),
              t->has_basis[z] ? matrix_of(&t->basis[z]) : none, c->pass))
        return 0;
    seal(&memory);
    return check_canaries("zone", &memory);
}

int pack_table(const wpe_kernels *k, attention_call *c, wpe_zone *zones) {
    const wpe_relative *p = c->a[0].relative;
    for (int z = 0; p && z < p->zone_count; z++)
        if (!pack_zone(k, c, z, &zones[z])) return 0;
    c->table.relative.zones = zones;
    return 1;
}

int prepare(const wpe_kernels *k, attention_call *c, packing how, prepared *to) {
    if (!pack_table(k, c, to->zones)) return 0;
    if (!CALL_FOR(to->sizes, k, KERNEL(c, sizes), &c->a[0], c->pass)) return 0;
    to->workspace = new_block(c->compute_type, to->sizes.workspace);
    to->packed = new_block(c->compute_type, to->sizes.packed);
    if (!pack_keys(k, c, &to->packed, how)) return 0;
    seal(&to->packed);
    return check_canaries("packed", &to->packed);
}
