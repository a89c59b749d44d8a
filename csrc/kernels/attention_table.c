/* attention_table.c: the relative term r . p[delta - first_delta] of a block of queries.
 *
 * One product T = R P^T gives the term for all deltas. The table's rows are in falling delta:
 * column c of T belongs to delta = first_delta + rows - 1 - c. So in row i, key j reads column c =
 * j + constant - i. Hence the memory of T, read with its row stride less 1, is a tile of scores.
 * The product q . k is added in place. In backward the gradient of the scores is written there, and
 * is then the gradient of T. Nothing is copied, gathered or scattered. Each element of T belongs to
 * one pair (i, j). Where a tile reaches beyond an end of the table, the values are filled in
 * afterwards. A zone with a basis costs rank instead of table_size: T = (R U) C^T. */

/* Set the band: which columns of T the block needs, and where they lie in memory. */
static void NAME(place_band)(BLOCK *b) {
    const wpe_relative *p = b->a->relative;
    b->band_width = 0;
    if (!p || b->key_range.begin >= b->key_range.end) return;
    /* the column of T that (query 0 of the block, key 0) reads; it may lie outside the table */
    int64_t zero_column = p->rows - 1 + p->first_delta - (b->begin + b->a->offset);
    int64_t begin = zero_column + b->key_range.begin - (b->rows - 1);
    int64_t end = zero_column + b->key_range.end;
    b->past_last = p->beyond == WPE_EDGE && begin < 0;
    b->before_first = p->beyond == WPE_EDGE && end > p->rows;
    if (p->beyond == WPE_EDGE) { /* at least the row that stands for those outside the table */
        begin = smaller(begin, p->rows - 1);
        end = larger(end, 1);
    }
    begin = larger(begin, 0);
    end = smaller(end, p->rows);
    if (begin >= end) return;
    b->first_column = begin;
    b->band_width = end - begin;
    /* the keys that read a column of the band in some row, and the tiles that hold them */
    int64_t key_begin = larger(begin - zero_column, b->key_range.begin);
    int64_t key_end = smaller(end - zero_column + b->rows - 1, b->key_range.end);
    b->band_keys.begin = round_down(key_begin, WPE_KEY_BLOCK);
    b->band_keys.end = key_end;
    if (key_begin >= key_end) /* no key does: all tiles lie before the band, or after it */
        b->band_keys.begin = b->band_keys.end = key_begin >= b->key_range.end
                                                    ? round_up(b->key_range.end, WPE_KEY_BLOCK)
                                                    : round_down(b->key_range.begin, WPE_KEY_BLOCK);
    b->band_start = WPE_KEY_BLOCK + WPE_QUERY_BLOCK + PANEL;
    b->origin = b->band_start + zero_column - begin;
    /* shift the columns so that tiles begin on whole cache lines */
    int64_t shift = (16 - ((b->origin % 16) + 16) % 16) % 16;
    b->band_start += shift;
    b->origin += shift;
}

/* Return the memory columns of row `row` that its tiles in the band cover. Only these columns get
 * scores and gradients. */
INLINE wpe_range NAME(covered)(const BLOCK *b, int64_t row) {
    int64_t g = row / GROUP * GROUP, last = smaller(g + GROUP, b->rows) - 1;
    int64_t begin = larger(b->seen[g].begin, b->band_keys.begin);
    int64_t end = smaller(b->seen[last].end, round_up(b->band_keys.end, WPE_KEY_BLOCK));
    if (b->seen[g].begin >= b->seen[last].end || begin >= end)
        return (wpe_range){b->band_start, b->band_start};
    return (wpe_range){b->origin + round_down(begin, KEY_STEP) - row,
                       b->origin + round_up(end, KEY_STEP) - row};
}

/* Return the memory columns of the band that row group g reads. */
static wpe_range NAME(group_columns)(const BLOCK *b, int64_t g) {
    wpe_range first = NAME(covered)(b, g * GROUP), last = NAME(covered)(b, g * GROUP + GROUP - 1);
    wpe_range band = {b->band_start, b->band_start + b->band_width};
    int64_t begin = larger(last.begin, band.begin), end = smaller(first.end, band.end);
    if (b->past_last) {
        begin = band.begin;
        end = larger(end, band.begin + 1);
    }
    if (b->before_first) {
        begin = smaller(begin, band.end - 1);
        end = band.end;
    }
    return (wpe_range){begin, larger(begin, end)};
}

/* Return which columns of a zone lie in the band. The zone has columns zone_begin..zone_begin +
 * zone_rows - 1 of T; the result counts from zone_begin. */
INLINE wpe_range NAME(zone_columns)(const BLOCK *b, int64_t zone_begin, int64_t zone_rows) {
    int64_t begin = larger(b->first_column - zone_begin, 0);
    int64_t end = smaller(b->first_column + b->band_width - zone_begin, zone_rows);
    return (wpe_range){begin, larger(begin, end)};
}

/* Compute the band: T in its memory, and the scores of the table's end rows. */
static void NAME(table_scores)(BLOCK *b) {
    NAME(place_band)(b);
    if (!b->band_width) return;
    const wpe_relative *p = b->a->relative;
    wpe_range all[GROUPS];
    int64_t zone_begin = 0;
    for (int z = 0; z < p->zone_count; zone_begin += p->zones[z++].rows) {
        const wpe_zone *zone = &p->zones[z];
        wpe_range c = NAME(zone_columns)(b, zone_begin, zone->rows);
        if (c.begin == c.end) continue;
        const REAL *r = b->r;
        int64_t r_row_stride = b->padded_r;
        if (zone->basis) {
            r = b->projected;
            r_row_stride = round_up(zone->rank, PANEL);
            for (int64_t g = 0; g < b->groups; g++) all[g] = (wpe_range){0, r_row_stride};
            NAME(gemm_columns)(b->projected, r_row_stride, b->r, b->padded_r, zone->basis,
                               b->a->table_size * PANEL, b->a->table_size, b->groups, all, 0);
        }
        /* Whole panels are computed. The next zone overwrites what lies past this zone's end. */
        int64_t start = b->band_start + zone_begin - b->first_column;
        for (int64_t g = 0; g < b->groups; g++) {
            wpe_range read = NAME(group_columns)(b, g);
            int64_t begin = larger(read.begin - start, c.begin);
            int64_t end = larger(smaller(read.end - start, c.end), begin);
            all[g] = (wpe_range){round_down(begin, PANEL), round_up(end, PANEL)};
            if (begin == end) all[g].end = all[g].begin;
        }
        NAME(gemm_columns)(b->table + start, b->table_row_stride, r, r_row_stride,
                           zone->coefficients_t, zone->rank * PANEL, zone->rank, b->groups, all, 0);
    }
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        REAL *row = b->table + i * b->table_row_stride;
        b->last_row_score[i] = b->past_last ? row[b->band_start] : 0;
        b->first_row_score[i] = b->before_first ? row[b->band_start + b->band_width - 1] : 0;
        wpe_range c = NAME(covered)(b, i);
        for (int64_t x = c.begin; x < smaller(b->band_start, c.end); x++)
            row[x] = b->last_row_score[i];
        for (int64_t x = larger(b->band_start + b->band_width, c.begin); x < c.end; x++)
            row[x] = b->first_row_score[i];
    }
}

/* Write the relative term of a tile outside the band: with WPE_EDGE each row is a constant. Return
 * whether there is such a term. */
static int NAME(constant_scores)(const BLOCK *b, const TILE *t) {
    if (!b->band_width || b->a->relative->beyond != WPE_EDGE) return 0;
    const REAL *value = t->first_key < b->band_keys.begin ? b->last_row_score : b->first_row_score;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->work_columns[i / GROUP].begin; j < t->work_columns[i / GROUP].end; j++)
            t->scores[i * t->row_stride + j] = value[i];
    return 1;
}

/* ---- backward: where tiles covered T, its memory holds the gradient of the scores ----------- */

/* Complete dT: set the columns to zero that no tile covered, and add the gradients of the keys
 * beyond either end of the table to its first or last row. last_row_grad and first_row_grad hold
 * the part from the tiles outside the band. */
static void NAME(finish_gradient)(BLOCK *b, const REAL *last_row_grad, const REAL *first_row_grad) {
    int64_t begin = b->band_start, end = b->band_start + b->band_width;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        REAL *row = b->table + i * b->table_row_stride;
        wpe_range c = NAME(covered)(b, i);
        for (int64_t x = begin; x < smaller(c.begin, end); x++) row[x] = 0;
        for (int64_t x = larger(c.end, begin); x < end; x++) row[x] = 0;
        if (b->past_last) {
            REAL last = last_row_grad[i];
            for (int64_t x = c.begin; x < smaller(begin, c.end); x++) last += row[x];
            row[begin] += last;
        }
        if (b->before_first) {
            REAL first = first_row_grad[i];
            for (int64_t x = larger(end, c.begin); x < c.end; x++) first += row[x];
            row[end - 1] += first;
        }
        /* gemm_transposed reads whole groups of columns */
        for (int64_t x = end; x < end + GROUP; x++) row[x] = 0;
    }
}

/* dr += dT P */
static void NAME(table_gradient_r)(BLOCK *b, REAL *dr) {
    const wpe_relative *p = b->a->relative;
    int64_t zone_begin = 0;
    for (int z = 0; z < p->zone_count; zone_begin += p->zones[z++].rows) {
        const wpe_zone *zone = &p->zones[z];
        /* the memory column of the zone's first row */
        int64_t start = b->band_start + zone_begin - b->first_column;
        if (zone->not_finite) {
            wpe_range c = NAME(zone_columns)(b, zone_begin, zone->rows);
            NAME(seen_gradient_r)(dr, b, zone, c.begin, start + c.begin, start + c.end);
            continue;
        }
        wpe_range depth[GROUPS], all[GROUPS];
        for (int64_t g = 0; g < b->groups; g++) {
            wpe_range read = NAME(group_columns)(b, g);
            depth[g].begin = larger(read.begin - start, 0);
            depth[g].end = smaller(read.end - start, zone->rows);
            all[g] = (wpe_range){0, zone->rank};
        }
        if (!zone->basis) {
            NAME(gemm_depth)(dr, b->padded_r, b->table + start, b->table_row_stride,
                             zone->coefficients, zone->rows * PANEL, b->table_cols, b->groups,
                             depth);
            continue;
        }
        int64_t rank = round_up(zone->rank, PANEL);
        memset(b->projected, 0, (size_t)(b->groups * GROUP * rank) * sizeof(REAL));
        NAME(gemm_depth)(b->projected, rank, b->table + start, b->table_row_stride,
                         zone->coefficients, zone->rows * PANEL, rank, b->groups, depth);
        NAME(gemm_depth)(dr, b->padded_r, b->projected, rank, zone->basis_t, zone->rank * PANEL,
                         b->table_cols, b->groups, all);
    }
}

/* Return whether `read` holds one of the GROUP columns from `column` on. */
INLINE int NAME(reads)(wpe_range read, int64_t column) {
    return read.begin < column + GROUP && read.end > column;
}

/* dp += dT^T R. The rows of dp are in falling delta. */
static void NAME(table_gradient_p)(const BLOCK *b, REAL *dp, int not_finite) {
    if (not_finite) return NAME(seen_gradient_p)(dp, b);
    wpe_range read[GROUPS];
    for (int64_t g = 0; g < b->groups; g++) read[g] = NAME(group_columns)(b, g);
    for (int64_t x = 0; x < b->band_width; x += GROUP) {
        int64_t column = b->band_start + x;
        wpe_range rows = {0, b->groups}; /* without the groups at either end that do not read x */
        while (rows.begin < rows.end && !NAME(reads)(read[rows.begin], column)) rows.begin++;
        while (rows.begin < rows.end && !NAME(reads)(read[rows.end - 1], column)) rows.end--;
        rows = (wpe_range){rows.begin * GROUP, rows.end * GROUP};
        NAME(gemm_transposed)(dp + (b->first_column + x) * b->padded_r, b->padded_r,
                              b->table + column, b->table_row_stride, b->r, b->padded_r,
                              b->table_cols, 1, &rows);
    }
}
