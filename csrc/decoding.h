/* decoding.h: attention of few queries as all bindings run it, and the packing of its tables.
 *
 * A task computes one part of the keys for a range of query heads. The parts follow from the number
 * of keys alone, and no sum runs across heads. So a binding may give any ranges to its threads, and
 * their number changes no bit. */
#ifndef WPE_DECODING_H
#define WPE_DECODING_H

#include <string.h>

#include "wavepe.h"

/* Where the coefficients of a zone are, in rising delta, and its basis (data NULL: none). */
typedef struct {
    wpe_matrix rows, basis;
} wpe_zone_source;

/* The rows of a table that queries reach, not packed. relative.rows 0: no table. */
typedef struct {
    wpe_relative relative; /* its zones, in falling delta, have rows and rank */
    const wpe_zone_source *sources;
    int64_t columns; /* table_size */
    int storage;
} wpe_table;

static inline size_t wpe_round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static inline size_t wpe_compute_item(int storage) { return storage == WPE_F64 ? 8 : 4; }

static inline size_t wpe_zone_bytes(const wpe_attention_kernels *kernels, const wpe_table *t,
                                    int64_t rows, int64_t rank, enum wpe_pass pass) {
    return wpe_round_up((size_t)kernels->zone_size(rows, rank, t->columns, pass) *
                        wpe_compute_item(t->storage));
}

/* Return an upper bound of the bytes that `rows` packed rows of a table need. */
static inline size_t wpe_table_bytes(const wpe_attention_kernels *kernels, const wpe_table *t,
                                     int64_t rows, enum wpe_pass pass) {
    size_t sum = 0;
    for (int z = 0; z < t->relative.zone_count; z++) {
        const wpe_zone *zone = &t->relative.zones[z];
        sum += wpe_zone_bytes(kernels, t, rows < zone->rows ? rows : zone->rows, zone->rank, pass);
    }
    return sum;
}

/* Pack rows begin..end-1 of a head's table, in rising delta, and return what was packed. `shift` is
 * where the head's rows lie, in bytes from `sources`.
 * Requires: `zones` holds as many zones as the table, `memory` wpe_table_bytes of these rows.
 * Writes: zones and memory. */
static inline wpe_relative wpe_pack_rows(const wpe_attention_kernels *kernels, const wpe_table *t,
                                         int64_t shift, wpe_range read, wpe_zone *zones,
                                         char *memory, enum wpe_pass pass) {
    const int64_t item = t->storage == WPE_F64 ? 8 : t->storage == WPE_F32 ? 4 : 2;
    wpe_relative packed = t->relative;
    int64_t zone_begin = t->relative.rows;
    packed.first_delta += read.begin;
    packed.rows = read.end - read.begin;
    packed.zones = zones;
    packed.zone_count = 0;
    for (int z = 0; z < t->relative.zone_count; z++) {
        wpe_zone zone = t->relative.zones[z];
        wpe_matrix rows = t->sources[z].rows;
        zone_begin -= zone.rows;
        const int64_t first = read.begin > zone_begin ? read.begin - zone_begin : 0;
        const int64_t end = read.end - zone_begin;
        zone.rows = (end < zone.rows ? end : zone.rows) - first;
        if (zone.rows <= 0) continue;
        rows.data = (const char *)rows.data + shift + first * rows.row_stride * item;
        kernels->pack_zone(&zone, memory, t->storage, t->columns, rows, t->sources[z].basis, pass);
        memory += wpe_zone_bytes(kernels, t, zone.rows, zone.rank, pass);
        zones[packed.zone_count++] = zone;
    }
    return packed;
}

/* A call that decode computes. Its binding sets the first members, and wpe_plan_decoding the rest.
 */
typedef struct {
    const wpe_attention_kernels *kernels;
    const wpe_table *table;
    int64_t group; /* query heads of a key head */
    int64_t slots; /* how many different tables the heads of a key head can have; 0: `head` returns
                      tables that are packed already */
    const void *call;
    /* Return a query head, whose table is not packed, and `shift` of its table. With slots 0 the
     * table is packed. */
    wpe_attention (*head)(const void *call, int64_t head, int64_t *shift);

    int64_t keys, parts;
    int64_t item;      /* bytes of an element of the compute type */
    int64_t head_sums; /* elements of the sums of a head, over one part */
    size_t workspace_bytes, table_bytes;
    size_t task_bytes; /* scratch memory of a task */
} wpe_decoding;

/* Rows of a head's table that a task has packed. */
typedef struct {
    int64_t shift;
    wpe_range read;
    wpe_relative relative;
} wpe_packed_rows;

static inline void wpe_plan_decoding(wpe_decoding *d) {
    int64_t shift;
    const wpe_attention any = d->head(d->call, 0, &shift);
    const wpe_decode_sizes sizes = d->kernels->decode_sizes(&any, d->group);
    d->keys = any.keys;
    d->parts = wpe_decode_parts(any.keys);
    d->item = (int64_t)wpe_compute_item(any.storage);
    d->head_sums = sizes.sums;
    d->workspace_bytes = wpe_round_up((size_t)(sizes.workspace * d->item));
    d->table_bytes = wpe_table_bytes(d->kernels, d->table,
                                     wpe_decode_most_rows(any.queries, any.keys), WPE_FORWARD);
    const size_t zones = (size_t)d->table->relative.zone_count * sizeof(wpe_zone);
    d->task_bytes = d->workspace_bytes + (size_t)d->slots * d->table_bytes +
                    wpe_round_up((size_t)d->group * sizeof(wpe_attention)) +
                    wpe_round_up((size_t)d->slots * (sizeof(wpe_packed_rows) + zones));
}

/* Compute one part of the keys for query heads begin..end-1. The table of a head is packed unless
 * the head before has read the same rows.
 * Requires: `scratch` holds task_bytes and is aligned to 64 bytes.
 * Writes: the sums of these heads. */
static inline void wpe_decode_heads(const wpe_decoding *d, int64_t part, int64_t begin, int64_t end,
                                    char *sums, char *scratch) {
    const wpe_range keys = wpe_decode_part(d->keys, part);
    const int zone_count = d->table->relative.zone_count;
    char *workspace = scratch, *tables = scratch + d->workspace_bytes;
    wpe_attention *heads = (wpe_attention *)(tables + (size_t)d->slots * d->table_bytes);
    wpe_packed_rows *packed =
        (wpe_packed_rows *)((char *)heads + wpe_round_up((size_t)d->group * sizeof *heads));
    wpe_zone *zones = (wpe_zone *)(packed + d->slots);
    int64_t slot = 0; /* of the last table; a key head's tables fill at most all slots once */
    for (int64_t s = 0; s < d->slots; s++) packed[s].read.begin = -1;
    for (int64_t head = begin, next; head < end; head = next) {
        next = (head / d->group + 1) * d->group;
        if (next > end) next = end;
        for (int64_t h = head; h < next; h++) {
            wpe_attention *a = &heads[h - head];
            int64_t shift = 0;
            *a = d->head(d->call, h, &shift);
            if (!a->relative || !d->slots) continue;
            const wpe_range read = wpe_decode_rows(a, keys.begin, keys.end);
            wpe_packed_rows *to = &packed[slot];
            if (to->read.begin != read.begin || to->read.end != read.end || to->shift != shift) {
                slot = (slot + 1) % d->slots;
                to = &packed[slot];
                to->shift = shift;
                to->read = read;
                to->relative =
                    wpe_pack_rows(d->kernels, d->table, shift, read, zones + slot * zone_count,
                                  tables + (size_t)slot * d->table_bytes, WPE_FORWARD);
            }
            a->relative = to->relative.rows ? &to->relative : NULL;
        }
        d->kernels->decode(heads, next - head, keys.begin, keys.end, sums, workspace);
        sums += (next - head) * d->head_sums * d->item;
    }
}

#endif
