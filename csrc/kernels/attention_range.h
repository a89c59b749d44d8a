/* attention_range.h: which keys a query sees, and the checks that do not depend on a type. */
#ifndef WAVEPE_ATTENTION_RANGE_H
#define WAVEPE_ATTENTION_RANGE_H

#include "template.h"

/* Return the keys that query i sees if masks and segments are ignored. As i grows, neither end of
 * the range gets smaller. An empty range has begin = end, in first_key..end_key. */
INLINE wpe_range key_range_of(const wpe_attention *a, int64_t i) {
    int64_t position = i + a->offset;
    wpe_range seen = {a->first_key, a->end_key};
    if (a->causal) seen.end = smaller(seen.end, position + 1);
    seen.begin = larger(seen.begin, position - a->window + 1);
    if (a->run_begin) {
        seen.begin = larger(seen.begin, a->run_begin[i]);
        seen.end = smaller(seen.end, a->run_end[i]);
    }
    seen.end = larger(seen.end, a->first_key);
    seen.begin = smaller(seen.begin, seen.end);
    return seen;
}

/* Return whether neither a mask nor a segment hides key j from query i.
 * Requires: j lies in key_range_of(i). */
INLINE int unmasked(const wpe_attention *a, int64_t i, int64_t j) {
    return !((a->segments && a->segments[i] != a->segments[j]) ||
             (a->key_mask && !a->key_mask[j * a->key_mask_stride]) ||
             (a->mask && !a->mask[i * a->mask_row_stride + j * a->mask_col_stride]));
}

/* Check what every attention kernel requires of a head. */
INLINE void check_attention(const wpe_attention *a) {
    const int64_t limit = INT64_C(1) << 60;
    assert(a->queries >= 0 && a->keys >= 0 && a->head_size >= 0 && a->value_size >= 0);
    assert(a->offset >= -limit && a->offset <= limit && a->window >= 0 && a->window <= limit);
    assert(a->table_size >= 0);
    assert(!a->relative || a->r.data || a->table_size == a->head_size);
    assert(a->first_key >= 0 && a->first_key <= a->end_key && a->end_key <= a->keys);
    assert(isfinite(a->scale) && isfinite(a->softcap) && a->softcap >= 0);
    assert(!a->run_begin == !a->run_end && (!a->segments || a->queries == a->keys));
    assert(!a->relative || (a->relative->rows > 0 && a->relative->first_delta >= -2 * limit &&
                            a->relative->first_delta <= 2 * limit));
    assert(a->bias.rows >= 0);
    assert(a->bias.first_delta >= -2 * limit && a->bias.first_delta <= 2 * limit);
    assert(a->drop_below <= UINT64_C(1) << 32);
    (void)a, (void)limit;
}

/* Check that queries begin..end-1 are whole query blocks. */
INLINE void check_blocks(const wpe_attention *a, int64_t begin, int64_t end) {
    assert(begin >= 0 && begin <= end && end <= a->queries && begin % WPE_QUERY_BLOCK == 0);
    assert(end % WPE_QUERY_BLOCK == 0 || end == a->queries);
    (void)a, (void)begin, (void)end;
}

#endif
