/* attention_decode.c: attention of few queries, as in generation.
 *
 * A row is a query of a query head. All rows of the query heads that share a key head are computed
 * in one pass over its keys and values. They are read where they are, a few at a time, and
 * converted if they are not dense and of type REAL. For more than FEW_ROWS rows keys are
 * transposed. Then every sum runs in forward's order, and a row has the bits of forward's row, if
 * all its keys are one part. For few rows that would take longer than the products. So the sums of
 * q . k run in 16 lanes. */

/* Room before a row of scores: relative terms come in whole panels, and those of later queries lie
 * further on. */
#define SCORE_MARGIN 48
#define SCORE_STRIDE (SCORE_MARGIN + WPE_KEY_BLOCK + 64)
#define FEW_ROWS     8  /* up to so many rows of a key head, keys are not transposed */
#define VALUE_KEYS   64 /* the values that are converted at once */

typedef struct {
    const wpe_attention *a; /* the query heads */
    int64_t queries, rows;  /* row r is query r % queries of head r / queries */
    int is_few;             /* whether keys are multiplied without transposing them */
    int64_t padded_d, padded_dv, padded_r;
    REAL *q, *r;     /* times scale: (rows, padded_d) and (rows, padded_r) */
    REAL *projected; /* R U of all zones with a basis, one behind the other: (rows, all_ranks) */
    int64_t all_ranks;
    REAL *edge;   /* WPE_EDGE: r . p of the table's first and last row, for each row */
    REAL *scores; /* a tile's: (rows, SCORE_STRIDE), from column SCORE_MARGIN on */
    REAL *saved;  /* the sums before the tile, if it has hidden pairs: (rows, padded_dv) */
    REAL *panel;  /* transposed keys: (head_size, PANEL) */
    REAL *values; /* converted values: (VALUE_KEYS, padded_dv) */
    REAL *sums;   /* the results: (rows, sums_stride) */
    int64_t sums_stride;
} NAME(decoder);
#define DECODER NAME(decoder)

/* A tile of keys. Columns begin..end-1 hold all that some row sees. work_begin..work_end is that
 * range rounded outwards to KEY_STEP. */
typedef struct {
    int64_t first_key, begin, end, work_begin, work_end;
    int has_hidden; /* whether some row may not see all of these columns */
} NAME(decode_tile);
#define DECODE_TILE NAME(decode_tile)

/* A row of sums is followed by the row's maximum and by the sum of its weights. */
INLINE REAL *NAME(row_sums)(const DECODER *c, int64_t row) {
    return c->sums + row * c->sums_stride;
}
INLINE REAL *NAME(row_scores)(const DECODER *c, int64_t row) {
    return c->scores + row * SCORE_STRIDE + SCORE_MARGIN;
}

static void NAME(decode_memory)(DECODER *c, const wpe_attention *a, int64_t heads, MEMORY *memory) {
    c->a = a;
    c->queries = a->queries;
    c->rows = heads * a->queries;
    c->is_few = a->group * a->queries <= FEW_ROWS;
    c->padded_d = round_up(a->head_size, KEY_STEP); /* gemm_dots needs a multiple of 16 */
    c->padded_dv = round_up(a->value_size, PANEL);
    c->sums_stride = c->padded_dv + 16;
    c->q = NAME(take)(memory, c->rows * c->padded_d);
    c->padded_r = a->r.data ? round_up(a->table_size, PANEL) : c->padded_d;
    c->r = a->r.data ? NAME(take)(memory, c->rows * c->padded_r) : c->q;
    c->all_ranks = 0;
    for (int z = 0; a->relative && z < a->relative->zone_count; z++)
        if (a->relative->zones[z].basis)
            c->all_ranks += round_up(a->relative->zones[z].rank, PANEL);
    c->projected = NAME(take)(memory, c->rows * c->all_ranks);
    c->edge = NAME(take)(memory, round_up(2 * c->rows, 16));
    c->scores = NAME(take)(memory, c->rows * SCORE_STRIDE);
    c->saved = NAME(take)(memory, c->rows * c->padded_dv);
    c->panel = NAME(take)(memory, c->padded_d * PANEL);
    c->values = NAME(take)(memory, VALUE_KEYS * c->padded_dv);
}

/* Return the first row after `row` whose head has another table. */
static int64_t NAME(end_of_table)(const DECODER *c, int64_t row) {
    const wpe_zone *zones = c->a[row / c->queries].relative->zones;
    while (row < c->rows && c->a[row / c->queries].relative->zones == zones) row += c->queries;
    return row;
}

/* Ask for rows begin..end-1 of m, which are read soon. The CPU by itself does not look so far
 * ahead. It makes a pass over memory a third faster, and costs a few percent in the caches. Few
 * rows read whole keys and values one after the other, which the CPU foresees. */
static void NAME(prefetch_rows)(const DECODER *c, wpe_matrix m, int64_t begin, int64_t end,
                                int64_t cols) {
    if (c->is_few) return;
    int storage = c->a->storage;
    int64_t bytes = NAME(element)(m, storage, 0, cols) - NAME(element)(m, storage, 0, 0);
    for (int64_t r = begin; r < end && m.col_stride == 1; r++)
        prefetch(NAME(element)(m, storage, r, 0), 0, bytes);
}

/* ---- the scores of a tile -------------------------------------------------------------------- */

/* add_keys for few rows: keys are not transposed, but converted if they are not dense and of type
 * REAL. */
static void NAME(add_dots)(const DECODER *c, int64_t first_key, int64_t begin, int64_t end) {
    const wpe_attention *a = c->a;
    int64_t d = a->head_size, size = sizeof(REAL);
    int is_dense = a->storage == REAL_STORAGE && a->k.col_stride == 1;
    for (int64_t j = begin; j < end; j += LANES) {
        int64_t count = smaller(end - j, LANES), stride = c->padded_d;
        const REAL *keys = c->panel;
        if (is_dense && count == LANES) {
            keys = (const REAL *)NAME(element)(a->k, a->storage, first_key + j, 0);
            stride = a->k.row_stride;
            for (int64_t l = 2 * LANES; l < 3 * LANES; l++) /* in memory it saves up to a fifth */
                prefetch(keys, l * stride * size, (l * stride + d) * size);
        } else {
            NAME(load_rows)(c->panel, stride, a->k, a->storage, first_key + j, count, LANES, d, 1);
        }
        NAME(gemm_dots)(c->scores + SCORE_MARGIN + j, SCORE_STRIDE, c->q, c->padded_d, keys, stride,
                        d, c->rows);
    }
}

/* Add q . k to columns begin..end-1 of all rows. Up to PANEL columns behind them are overwritten.
 */
static void NAME(add_keys)(const DECODER *c, int64_t first_key, int64_t begin, int64_t end) {
    const wpe_attention *a = c->a;
    int64_t d = a->head_size, end_key = first_key + end;
    if (c->is_few) return NAME(add_dots)(c, first_key, begin, end);
    for (int64_t j = begin; j < end; j += PANEL) {
        int64_t key = first_key + j, next = key + PANEL;
        wpe_matrix keys = {NAME(element)(a->k, a->storage, key, 0), a->k.row_stride,
                           a->k.col_stride};
        NAME(prefetch_rows)(c, a->k, next, smaller(next + PANEL, end_key), d);
        NAME(pack_columns)(c->panel, keys, a->storage, 0, smaller(end - j, PANEL), PANEL, d);
        NAME(gemm_rows)(c->scores + SCORE_MARGIN + j, SCORE_STRIDE, c->q, c->padded_d, c->panel, 0,
                        PANEL, d, PANEL, c->rows);
    }
}

/* Compute R U of the zones that have a basis. */
static void NAME(project)(DECODER *c) {
    const wpe_attention *a = c->a;
    memset(c->projected, 0, (size_t)(c->rows * c->all_ranks) * sizeof(REAL));
    for (int64_t row = 0; c->all_ranks && row < c->rows; row += c->queries) {
        const wpe_relative *p = a[row / c->queries].relative;
        REAL *to = c->projected + row * c->all_ranks;
        for (int z = 0; z < p->zone_count; z++) {
            if (!p->zones[z].basis) continue;
            int64_t rank = round_up(p->zones[z].rank, PANEL);
            NAME(gemm_rows)(to, c->all_ranks, c->r + row * c->padded_r, c->padded_r,
                            p->zones[z].basis, a->table_size * PANEL, PANEL, a->table_size, rank,
                            c->queries);
            to += rank;
        }
    }
}

/* Add r . p of the table's rows begin..end-1, in falling delta, to the rows row..end_row-1, which
 * share the table. Row x of the table goes to column x - zero; with `later` to column x - zero + i
 * of query i. Up to PANEL columns before and behind them are overwritten. */
static void NAME(add_table)(const DECODER *c, int64_t row, int64_t end_row, int64_t begin,
                            int64_t end, int64_t zero, int later) {
    const wpe_relative *p = c->a[row / c->queries].relative;
    int64_t each = later ? c->queries : end_row - row, rank_begin = 0, zone_begin = 0, cols;
    for (int z = 0; z < p->zone_count; zone_begin += p->zones[z++].rows) {
        const wpe_zone *zone = &p->zones[z];
        const REAL *left = zone->basis ? c->projected + rank_begin : c->r;
        int64_t left_stride = zone->basis ? c->all_ranks : c->padded_r;
        if (zone->basis) rank_begin += round_up(zone->rank, PANEL);
        int64_t x = larger(begin - zone_begin, 0), past = smaller(end - zone_begin, zone->rows);
        if (x >= past) continue;
        for (x = round_down(x, PANEL); x < past; x += cols) {
            cols = smaller(round_up(past, PANEL) - x, WIDEST * LANES);
            const REAL *panels = (const REAL *)zone->coefficients_t + x * zone->rank;
            for (int64_t r = row; r < end_row; r += each)
                NAME(gemm_rows)(NAME(row_scores)(c, r) + zone_begin + x - zero,
                                SCORE_STRIDE + later, left + r * left_stride, left_stride, panels,
                                zone->rank * PANEL, PANEL, zone->rank, cols, each);
        }
        /* The padding of the last panel is 0, but 0 times Inf is NaN. The next zone adds to it. */
        for (int64_t r = row; past == zone->rows && r < end_row; r++)
            for (int64_t pad = past; pad < x; pad++)
                NAME(row_scores)(c, r)[zone_begin + pad - zero + later * (r % c->queries)] = 0;
    }
}

/* Compute r . p of the end rows of the tables. */
static void NAME(edge_scores)(DECODER *c) {
    const wpe_relative *p = c->a->relative;
    if (!p || p->beyond != WPE_EDGE) return;
    const int64_t ends[2] = {p->rows - 1, 0}; /* in falling delta */
    for (int64_t row = 0, end_row; row < c->rows; row = end_row) {
        end_row = NAME(end_of_table)(c, row);
        for (int e = 0; e < 2; e++) {
            for (int64_t r = row; r < end_row; r++) NAME(row_scores)(c, r)[0] = 0;
            NAME(add_table)(c, row, end_row, ends[e], ends[e] + 1, ends[e], 0);
            for (int64_t r = row; r < end_row; r++) c->edge[2 * r + e] = NAME(row_scores)(c, r)[0];
        }
    }
}

/* Write the relative term of a tile. */
static void NAME(decode_table)(DECODER *c, const DECODE_TILE *t) {
    const wpe_relative *p = c->a->relative;
    /* The table's rows are in falling delta. Column x of query i reads row zero + x - i. */
    int64_t zero = p->rows - 1 + p->first_delta - (c->a->offset - t->first_key);
    int64_t begin = larger(zero + t->begin - (c->queries - 1), 0);
    int64_t end = smaller(zero + t->end, p->rows);
    for (int64_t row = 0, end_row; row < c->rows && begin < end; row = end_row) {
        end_row = NAME(end_of_table)(c, row);
        NAME(add_table)(c, row, end_row, begin, end, zero, c->queries > 1);
    }
    for (int64_t row = 0; row < c->rows; row++) {
        REAL *s = NAME(row_scores)(c, row);
        int edge = p->beyond == WPE_EDGE;
        REAL first_score = edge ? c->edge[2 * row] : 0,
             last_score = edge ? c->edge[2 * row + 1] : 0;
        int64_t i = row % c->queries;
        int64_t inside = smaller(larger(i - zero, t->work_begin), t->work_end);
        int64_t past = larger(smaller(p->rows + i - zero, t->work_end), inside);
        for (int64_t j = t->work_begin; j < inside; j++) s[j] = last_score;
        for (int64_t j = past; j < t->work_end; j++) s[j] = first_score;
    }
}

/* Compute the tile's scores, and finish them before softmax. */
static void NAME(decode_scores)(DECODER *c, const DECODE_TILE *t) {
    const wpe_attention *a = c->a;
    REAL strip[BIAS_STRIP_SIZE];
    memset(c->scores, 0, (size_t)(c->rows * SCORE_STRIDE) * sizeof(REAL));
    if (a->relative) NAME(decode_table)(c, t);
    NAME(add_keys)(c, t->first_key, t->begin, t->end);
    const void *loaded = NULL; /* the bias in the strip */
    for (int64_t row = 0; row < c->rows; row++) {
        int64_t i = row % c->queries;
        const wpe_attention *head = a + row / c->queries;
        if (head->bias.rows && head->bias.values != loaded)
            NAME(fill_strip)(strip, &head->bias, c->queries - 1 + a->offset - t->first_key, 0);
        loaded = head->bias.values;
        NAME(adjust_row)(NAME(row_scores)(c, row), head, i, t->first_key, t->work_begin,
                         t->work_end, key_range_of(head, i), strip + c->queries - 1 - i);
    }
}

/* Turn the tile's scores into weights, and rescale the sums of rows that have a new maximum. */
static void NAME(decode_softmax)(DECODER *c, const DECODE_TILE *t) {
    REAL keep[WPE_KEY_BLOCK];
    for (int64_t row = 0; row < c->rows; row++) {
        const wpe_attention *head = c->a + row / c->queries;
        REAL *s = NAME(row_scores)(c, row), *o = NAME(row_sums)(c, row), *max = o + c->padded_dv;
        REAL tile_max = NAME(row_max)(s, t->work_begin, t->work_end);
        REAL factor = NAME(softmax_row)(s, t->work_begin, t->work_end, tile_max, max, max + 1);
        for (int64_t x = 0; factor != 1 && x < c->padded_dv; x++) o[x] *= factor;
        if (!head->drop_below) continue;
        NAME(keep_row)(keep, head, row % c->queries, t->first_key, t->begin, t->end);
        for (int64_t j = t->begin; j < t->end; j++) s[j] *= keep[j];
    }
}

/* ---- the values of a tile -------------------------------------------------------------------- */

/* Add the values of the keys that each row sees, for the rows whose sums became NaN or Inf: a
 * hidden key's weight 0 times NaN may be the reason. */
static void NAME(decode_seen)(DECODER *c, const DECODE_TILE *t) {
    const wpe_attention *a = c->a;
    for (int64_t row = 0; row < c->rows; row++) {
        const wpe_attention *head = a + row / c->queries;
        const REAL *s = NAME(row_scores)(c, row);
        REAL *o = NAME(row_sums)(c, row);
        int64_t i = row % c->queries;
        wpe_range seen = key_range_of(head, i);
        if (!NAME(any_not_finite)(o, c->padded_dv)) continue;
        memcpy(o, c->saved + row * c->padded_dv, (size_t)c->padded_dv * sizeof(REAL));
        for (int64_t j = larger(seen.begin - t->first_key, t->begin);
             j < smaller(seen.end - t->first_key, t->end); j++) {
            if (!unmasked(head, i, t->first_key + j)) continue;
            NAME(read_rows)(c->values, 0, a->v, a->storage, t->first_key + j, 1, a->value_size, 1);
            for (int64_t x = 0; x < a->value_size; x++) o[x] += s[j] * c->values[x];
        }
    }
}

/* Add weight times value to the sums. Whole vectors of dense values of type REAL are read where
 * they are, and the other columns are converted. */
static void NAME(decode_values)(DECODER *c, const DECODE_TILE *t) {
    const wpe_attention *a = c->a;
    int is_dense = a->storage == REAL_STORAGE && a->v.col_stride == 1;
    int64_t whole = is_dense ? round_down(a->value_size, LANES) : 0, rest = a->value_size - whole;
    for (int64_t row = 0; t->has_hidden && row < c->rows; row++)
        memcpy(c->saved + row * c->padded_dv, NAME(row_sums)(c, row),
               (size_t)c->padded_dv * sizeof(REAL));
    for (int64_t j = t->begin; j < t->end; j += VALUE_KEYS) {
        int64_t count = smaller(VALUE_KEYS, t->end - j), key = t->first_key + j;
        int64_t next = key + VALUE_KEYS, end = t->first_key + t->end, cols = round_up(rest, LANES);
        const REAL *weights = c->scores + SCORE_MARGIN + j;
        NAME(prefetch_rows)(c, a->v, next, smaller(next + VALUE_KEYS, end), a->value_size);
        if (whole)
            NAME(gemm_rows)(c->sums, c->sums_stride, weights, SCORE_STRIDE,
                            (const REAL *)NAME(element)(a->v, a->storage, key, 0), PANEL,
                            a->v.row_stride, count, whole, c->rows);
        if (!rest) continue;
        wpe_matrix others = {NAME(element)(a->v, a->storage, 0, whole), a->v.row_stride,
                             a->v.col_stride};
        NAME(read_rows)(c->values, cols, others, a->storage, key, count, rest, 1);
        NAME(gemm_rows)(c->sums + whole, c->sums_stride, weights, SCORE_STRIDE, c->values, PANEL,
                        cols, count, cols, c->rows);
    }
    if (t->has_hidden) NAME(decode_seen)(c, t);
}

/* ---- the calls ------------------------------------------------------------------------------- */

/* Begin the tile whose first key is first_key, for keys of the range. Return whether a row sees one
 * of them. */
static int NAME(begin_decode_tile)(DECODE_TILE *t, const DECODER *c, int64_t first_key,
                                   wpe_range range) {
    int64_t end_key = smaller(first_key + WPE_KEY_BLOCK, range.end), begin = end_key, end = 0;
    int64_t common_begin = first_key, common_end = end_key; /* what all rows see */
    t->has_hidden = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        const wpe_attention *head = c->a + row / c->queries;
        wpe_range seen = key_range_of(head, row % c->queries);
        begin = smaller(begin, larger(seen.begin, first_key));
        end = larger(end, smaller(seen.end, end_key));
        common_begin = larger(common_begin, seen.begin);
        common_end = smaller(common_end, seen.end);
        t->has_hidden |= head->mask || head->key_mask || head->segments;
    }
    t->has_hidden |= common_begin > begin || common_end < end;
    t->first_key = first_key;
    t->begin = begin - first_key;
    t->end = end - first_key;
    t->work_begin = round_down(t->begin, KEY_STEP);
    t->work_end = round_up(t->end, KEY_STEP);
    return begin < end;
}

static NOINLINE void NAME(decode)(const wpe_attention *a, int64_t heads, int64_t begin, int64_t end,
                                  void *sums, void *workspace) {
    MEMORY memory = {workspace, 0};
    DECODER c;
    DECODE_TILE t;
    NAME(decode_memory)(&c, a, heads, &memory);
    c.sums = sums;
    for (int64_t row = 0; row < c.rows; row++) {
        REAL *o = NAME(row_sums)(&c, row);
        memset(o, 0, (size_t)c.sums_stride * sizeof(REAL));
        o[c.padded_dv] = -(REAL)INFINITY;
        if (begin == 0) /* the sink counts once */
            NAME(begin_row)(a + row / c.queries, &o[c.padded_dv], &o[c.padded_dv + 1]);
    }
    for (int64_t h = 0; h < heads; h++) {
        REAL *q = c.q + h * c.queries * c.padded_d, *r = c.r + h * c.queries * c.padded_r;
        NAME(load_rows)(q, c.padded_d, a[h].q, a->storage, 0, c.queries, c.queries, a->head_size,
                        (REAL)a[h].scale);
        if (a->r.data)
            NAME(load_rows)(r, c.padded_r, a[h].r, a->storage, 0, c.queries, c.queries,
                            a->table_size, (REAL)a[h].scale);
    }
    NAME(project)(&c);
    NAME(edge_scores)(&c);
    for (int64_t j = begin; j < end; j += WPE_KEY_BLOCK) {
        if (!NAME(begin_decode_tile)(&t, &c, j, (wpe_range){begin, end})) continue;
        NAME(decode_scores)(&c, &t);
        NAME(prefetch_rows)(&c, a->v, j + t.begin, j + smaller(t.begin + VALUE_KEYS, t.end),
                            a->value_size);
        NAME(decode_softmax)(&c, &t);
        int64_t next = j + WPE_KEY_BLOCK;
        NAME(prefetch_rows)(&c, a->k, next, smaller(next + PANEL, end), a->head_size);
        NAME(decode_values)(&c, &t);
    }
}

static wpe_decode_sizes NAME(attention_decode_sizes)(const wpe_attention *a, int64_t heads) {
    check_attention(a);
    MEMORY memory = {NULL, 0};
    DECODER c;
    NAME(decode_memory)(&c, a, heads, &memory);
    return (wpe_decode_sizes){.workspace = memory.used, .sums = a->queries * c.sums_stride};
}

static void NAME(attention_decode)(const wpe_attention *a, int64_t heads, int64_t begin,
                                   int64_t end, void *sums, void *workspace) {
    for (int64_t h = 0; h < heads; h++) check_attention(a + h);
    assert(heads > 0 && heads <= a->group);
    assert(a->queries > 0 && a->queries <= WPE_DECODE_QUERIES);
    assert(begin >= 0 && begin <= end && end <= a->keys && begin % WPE_KEY_BLOCK == 0);
    assert(is_aligned(workspace, 64) && is_aligned(sums, sizeof(REAL)));
    FLUSHED(NAME(decode)(a, heads, begin, end, sums, workspace));
}

/* attention_merge, without the change of mode. */
static NOINLINE void NAME(merge)(const wpe_attention *a, REAL *sums, int64_t parts,
                                 int64_t part_stride, wpe_matrix_out out, REAL *lse) {
    int64_t cols = round_up(a->value_size, PANEL), stride = cols + 16;
    for (int64_t i = 0; i < a->queries; i++) {
        REAL *o = sums + i * stride, max = -(REAL)INFINITY;
        for (int64_t part = 0; part < parts; part++) {
            REAL part_max = o[part * part_stride + cols];
            if (part_max > max || part_max != part_max) max = part_max;
        }
        for (int64_t part = 0; part < parts && parts > 1 && max != -(REAL)INFINITY; part++) {
            REAL *from = o + part * part_stride, factor = NAME(exp_one)(from[cols] - max);
            for (int64_t x = 0; x <= cols + 1; x++)
                if (x != cols) o[x] = (part ? o[x] : 0) + factor * from[x];
        }
        lse[i] = NAME(finish_row)(o, cols, max, o[cols + 1]);
    }
    NAME(store_rows)(out, a->storage, sums, a->queries, a->value_size, stride, 1, 0);
}

static void NAME(attention_merge)(const wpe_attention *a, void *sums, int64_t parts,
                                  int64_t part_stride, wpe_matrix_out out, void *lse) {
    check_attention(a);
    assert(parts > 0 && is_aligned(sums, sizeof(REAL)));
    FLUSHED(NAME(merge)(a, sums, parts, part_stride, out, lse));
}
