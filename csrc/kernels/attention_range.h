/* attention_range.h: which keys a query sees, whatever the types. */
#ifndef WAVEPE_ATTENTION_RANGE_H
#define WAVEPE_ATTENTION_RANGE_H

#include "../wavepe.h"
#include "simd.h"

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
INLINE int64_t round_down(int64_t x, int64_t step) { return x / step * step; }

/* The keys that query i may see, but for masks and segments; neither bound ever falls with i. */
INLINE wpe_range keys_of(const wpe_attention *a, int64_t i) {
    int64_t position = i + a->offset;
    wpe_range seen = {a->first_key, a->end_key};
    if (a->causal) seen.end = smaller(seen.end, position + 1);
    seen.begin = larger(seen.begin, position - a->window + 1);
    if (a->run_first) {
        seen.begin = larger(seen.begin, a->run_first[i]);
        seen.end = smaller(seen.end, a->run_end[i]);
    }
    seen.end = larger(seen.end, a->first_key);
    seen.begin =
        smaller(seen.begin, seen.end); /* empty: begin = end, one of the keys or past them */
    return seen;
}

/* Whether key j, one of keys_of(i), is not hidden by a mask or a segment. */
INLINE int unmasked(const wpe_attention *a, int64_t i, int64_t j) {
    return !((a->segments && a->segments[i] != a->segments[j]) ||
             (a->key_mask && !a->key_mask[j * a->key_mask_stride]) ||
             (a->mask && !a->mask[i * a->mask_row + j * a->mask_col]));
}

INLINE int has_masks(const wpe_attention *a) { return a->segments || a->key_mask || a->mask; }

#endif
