/* attention_table.c: the relative term r . p[delta - first_delta] of a block of queries.
 *
 * One product T = R P^T gives it for all deltas, with the table's rows in falling delta: column c
 * belongs to delta = first_delta + rows - 1 - c, so that in row i key j meets column c = j +
 * constant - i. Hence T's memory, read with its row stride less one, is a tile of scores: the
 * product q . k is added in place, and in backward the gradient of the scores, written there, is
 * the gradient of T. No copy, gather or scatter. Each element of T belongs to one (i, j); what
 * tiles cover beyond either end of the table is filled by hand. A zone of low rank costs rank
 * instead of head_size: T = (R U) C^T. */

/* Says where the band lies in memory: columns column..column+cols-1 are the table's columns
 * first_column.. . */
static void NAME(place_band)(BLOCK *b) {
    const wpe_relative *p = b->a->relative;
    b->cols = 0;
    if (!p || b->key_range.begin >= b->key_range.end) return;
    /* column of (query 0, key 0), counted from the table's first */
    int64_t zero = p->rows - 1 + p->first_delta - (b->begin + b->a->offset);
    int64_t begin = 0, end = p->rows;
    if (p->beyond == WPE_ZERO) { /* only what a tile reaches */
        begin = larger(begin, zero + b->key_range.begin - (b->rows - 1));
        end = smaller(end, zero + b->key_range.end);
    }
    if (begin >= end) return;
    b->first_column = begin;
    b->cols = end - begin;
    /* Tiles that hold a key of the band, for some row. */
    int64_t key_begin = larger(begin - zero, b->key_range.begin);
    int64_t key_end = smaller(end - zero + b->rows - 1, b->key_range.end);
    b->band.begin = round_down(key_begin, WPE_KEY_BLOCK);
    b->band.end = key_end;
    if (key_begin >= key_end) /* no key: all tiles lie before the band, or after it */
        b->band.begin = b->band.end = key_begin >= b->key_range.end
                                          ? round_up(b->key_range.end, WPE_KEY_BLOCK)
                                          : round_down(b->key_range.begin, WPE_KEY_BLOCK);
    b->column = WPE_KEY_BLOCK + WPE_QUERY_BLOCK + PANEL;
    b->origin = b->column + zero - begin;
    /* Tiles begin on whole cache lines. */
    int64_t shift = (16 - ((b->origin % 16) + 16) % 16) % 16;
    b->column += shift;
    b->origin += shift;
}

/* Columns of T that group g's tiles in the band cover: those that get scores and gradients. */
INLINE wpe_range NAME(covered)(const BLOCK *b, int64_t row) {
    int64_t g = row / GROUP * GROUP, last = smaller(g + GROUP, b->rows) - 1;
    int64_t begin = larger(b->seen[g].begin, b->band.begin);
    int64_t end = smaller(b->seen[last].end, round_up(b->band.end, WPE_KEY_BLOCK));
    if (b->seen[g].begin >= b->seen[last].end || begin >= end)
        return (wpe_range){b->column, b->column};
    return (wpe_range){b->origin + round_down(begin, STEP) - row,
                       b->origin + round_up(end, STEP) - row};
}

/* The columns [begin, end) of zone z that lie in the band, as columns of the zone. */
INLINE wpe_range NAME(zone_columns)(const BLOCK *b, int64_t zone_begin, int64_t zone_rows) {
    int64_t begin = larger(b->first_column - zone_begin, 0);
    int64_t end = smaller(b->first_column + b->cols - zone_begin, zone_rows);
    return (wpe_range){begin, larger(begin, end)};
}

static void NAME(table_scores)(BLOCK *b) {
    NAME(place_band)(b);
    if (!b->cols) return;
    const wpe_relative *p = b->a->relative;
    wpe_range all[GROUPS];
    int64_t zone_begin = 0;
    for (int z = 0; z < p->zone_count; zone_begin += p->zones[z++].rows) {
        const wpe_zone *zone = &p->zones[z];
        wpe_range c = NAME(zone_columns)(b, zone_begin, zone->rows);
        if (c.begin == c.end) continue;
        const REAL *r = b->r;
        int64_t r_row = b->padded_d;
        if (zone->basis) {
            r = b->projected;
            r_row = round_up(zone->rank, PANEL);
            for (int64_t g = 0; g < b->groups; g++) all[g] = (wpe_range){0, r_row};
            NAME(gemm_columns)(b->projected, r_row, b->r, b->padded_d, zone->basis,
                               b->a->head_size * PANEL, b->a->head_size, b->groups, all, 0);
        }
        /* Whole panels: what is written past the zone's end is overwritten by the next. */
        wpe_range panels = {round_down(c.begin, PANEL), round_up(c.end, PANEL)};
        for (int64_t g = 0; g < b->groups; g++) all[g] = panels;
        NAME(gemm_columns)(b->table + b->column + zone_begin - b->first_column, b->table_row_stride,
                           r, r_row, zone->scores, zone->rank * PANEL, zone->rank, b->groups, all,
                           0);
    }
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        REAL *row = b->table + i * b->table_row_stride;
        int edge = p->beyond == WPE_EDGE;
        b->of_last_row[i] = edge ? row[b->column] : 0;
        b->of_first_row[i] = edge ? row[b->column + b->cols - 1] : 0;
        wpe_range c = NAME(covered)(b, i);
        for (int64_t x = c.begin; x < smaller(b->column, c.end); x++) row[x] = b->of_last_row[i];
        for (int64_t x = larger(b->column + b->cols, c.begin); x < c.end; x++)
            row[x] = b->of_first_row[i];
    }
}

/* The tile's relative term, where it is not the band's own memory: constant rows. Whether there is
 * any. */
static int NAME(constant_scores)(const BLOCK *b, const TILE *t) {
    if (!b->cols || b->a->relative->beyond != WPE_EDGE) return 0;
    const REAL *value = t->first_key < b->band.begin ? b->of_last_row : b->of_first_row;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->part[i / GROUP].begin; j < t->part[i / GROUP].end; j++)
            t->s[i * t->row_stride + j] = value[i];
    return 1;
}

/* ---- backward: T's memory holds the scores' gradient where tiles covered it ----------------- */

/* Completes dT: zero where no tile covered it; and to_last_row and to_first_row, what tiles outside
 * the band gave to the table's ends. */
static void NAME(finish_gradient)(BLOCK *b, const REAL *to_last_row, const REAL *to_first_row) {
    int edge = b->a->relative->beyond == WPE_EDGE;
    int64_t begin = b->column, end = b->column + b->cols;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        REAL *row = b->table + i * b->table_row_stride;
        wpe_range c = NAME(covered)(b, i);
        for (int64_t x = begin; x < smaller(c.begin, end); x++) row[x] = 0;
        for (int64_t x = larger(c.end, begin); x < end; x++) row[x] = 0;
        if (edge) {
            REAL last = to_last_row[i], first = to_first_row[i];
            for (int64_t x = c.begin; x < smaller(begin, c.end); x++) last += row[x];
            for (int64_t x = larger(end, c.begin); x < c.end; x++) first += row[x];
            row[begin] += last;
            row[end - 1] += first;
        }
        /* gemm_transposed reads on to whole groups of columns */
        for (int64_t x = end; x < end + GROUP; x++) row[x] = 0;
    }
}

/* dr += dT P */
static void NAME(table_gradient_r)(BLOCK *b, REAL *dr) {
    const wpe_relative *p = b->a->relative;
    int edge = p->beyond == WPE_EDGE;
    int64_t zone_begin = 0, end = b->column + b->cols;
    for (int z = 0; z < p->zone_count; zone_begin += p->zones[z++].rows) {
        const wpe_zone *zone = &p->zones[z];
        /* memory column of the zone's first row */
        int64_t start = b->column + zone_begin - b->first_column;
        if (zone->not_finite) {
            wpe_range c = NAME(zone_columns)(b, zone_begin, zone->rows);
            NAME(accumulate_met)(dr, b, zone, c.begin, start + c.begin, start + c.end);
            continue;
        }
        wpe_range depth[GROUPS], all[GROUPS];
        for (int64_t g = 0; g < b->groups; g++) {
            wpe_range low = NAME(covered)(b, g * GROUP + GROUP - 1);
            wpe_range high = NAME(covered)(b, g * GROUP);
            int64_t from = edge ? b->column : larger(smaller(low.begin, high.begin), b->column);
            int64_t to = edge ? end : smaller(larger(low.end, high.end), end);
            depth[g].begin = larger(from - start, 0);
            depth[g].end = smaller(to - start, zone->rows);
            all[g] = (wpe_range){0, zone->rank};
        }
        if (!zone->basis) {
            NAME(gemm_depth)(dr, b->padded_d, b->table + start, b->table_row_stride, zone->gradient,
                             zone->rows * PANEL, b->padded_d, b->groups, depth);
            continue;
        }
        int64_t rank = round_up(zone->rank, PANEL);
        memset(b->projected, 0, (size_t)(b->groups * GROUP * rank) * sizeof(REAL));
        NAME(gemm_depth)(b->projected, rank, b->table + start, b->table_row_stride, zone->gradient,
                         zone->rows * PANEL, rank, b->groups, depth);
        NAME(gemm_depth)(dr, b->padded_d, b->projected, rank, zone->transposed_basis,
                         zone->rank * PANEL, b->padded_d, b->groups, all);
    }
}

/* dp += dT^T R, in falling delta. */
static void NAME(table_gradient_p)(const BLOCK *b, REAL *dp, int not_finite) {
    if (not_finite) return NAME(accumulate_met_rows)(dp, b);
    int64_t groups = (b->cols + GROUP - 1) / GROUP;
    wpe_range all[1] = {{0, b->groups * GROUP}};
    for (int64_t g = 0; g < groups; g++)
        NAME(gemm_transposed)(dp + (b->first_column + g * GROUP) * b->padded_d, b->padded_d,
                              b->table + b->column + g * GROUP, b->table_row_stride, b->r,
                              b->padded_d, b->padded_d, 1, all);
}
