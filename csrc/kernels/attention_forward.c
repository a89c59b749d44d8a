/* attention_forward.c: forward of one block of queries (see attention.c). */

/* C[i] += sum over the tile's keys j of weight[i][j] * row j of the panels. */
static void NAME(accumulate)(REAL *c, int64_t c_row_stride, const BLOCK *b, const TILE *t,
                             const REAL *rows, int64_t panel_stride, int64_t cols, int not_finite) {
    if (not_finite)
        NAME(accumulate_seen)(c, c_row_stride, b, t, rows, panel_stride, cols);
    else
        NAME(gemm_depth)(c, c_row_stride, t->scores, t->row_stride, rows + t->first_key * PANEL,
                         panel_stride, cols, b->groups, t->seen_columns);
}

/* Compute the scores of the tile: add q . k to the relative term, then the bias, the softcap and so
 * on (adjust_tile). */
static void NAME(tile_scores)(const BLOCK *b, TILE *t, const REAL *k_t_panels) {
    int64_t d = b->a->head_size;
    int add = t->in_band || NAME(constant_scores)(b, t);
    NAME(gemm_columns)(t->scores, t->row_stride, b->q, b->padded_d, k_t_panels + t->first_key * d,
                       d * PANEL, d, b->groups, t->work_columns, add);
    NAME(load_bias)(t, b);
    NAME(adjust_tile)(b, t);
}

/* Turn the tile's scores into weights, and rescale the sums `out` where a row has a new maximum. */
static void NAME(softmax_tile)(const BLOCK *b, const TILE *t, REAL *max, REAL *sum, REAL *out) {
    REAL keep[WPE_KEY_BLOCK], tile_max[GROUP];
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range columns = t->work_columns[i / GROUP];
        if (columns.begin == columns.end) continue;
        REAL *s = t->scores + i * t->row_stride, *o = out + i * b->padded_dv;
        /* A maximum takes long, but those of several rows do not wait for each other. */
        for (int64_t r = 0; i % GROUP == 0 && r < GROUP; r++)
            tile_max[r] = NAME(row_max)(s + r * t->row_stride, columns.begin, columns.end);
        REAL factor =
            NAME(softmax_row)(s, columns.begin, columns.end, tile_max[i % GROUP], &max[i], &sum[i]);
        if (factor != 1)
            for (int64_t x = 0; x < b->padded_dv; x++) o[x] *= factor;
        if (!b->a->drop_below) continue;
        NAME(keep_row)(keep, b->a, b->begin + i, t->first_key, columns.begin, columns.end);
        for (int64_t j = columns.begin; j < columns.end; j++) s[j] *= keep[j];
    }
}

static void NAME(forward_block)(BLOCK *b, const PACKED *packed, REAL *sums, wpe_matrix_out out,
                                REAL *lse) {
    const wpe_attention *a = b->a;
    REAL max[WPE_QUERY_BLOCK], sum[WPE_QUERY_BLOCK];
    TILE t;
    for (int64_t i = 0; i < b->groups * GROUP; i++) NAME(begin_row)(a, &max[i], &sum[i]);
    memset(sums, 0, (size_t)(b->groups * GROUP * b->padded_dv) * sizeof(REAL));
    NAME(table_scores)(b);
    int64_t panel_stride = round_up(a->keys, KEY_STEP) * PANEL;
    for (int64_t j = round_down(b->key_range.begin, WPE_KEY_BLOCK); j < b->key_range.end;
         j += WPE_KEY_BLOCK) {
        if (NAME(other_segments)(b, j)) continue;
        NAME(begin_tile)(&t, b, j);
        NAME(tile_scores)(b, &t, packed->k_t_panels);
        NAME(softmax_tile)(b, &t, max, sum, sums);
        NAME(accumulate)(sums, b->padded_dv, b, &t, packed->v_panels, panel_stride, b->padded_dv,
                         packed->not_finite[j / WPE_KEY_BLOCK] != 0);
    }
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *row = sums + i * b->padded_dv;
        lse[b->begin + i] = NAME(finish_row)(row, b->padded_dv, max[i], sum[i]);
    }
    NAME(store_rows)(NAME(from_row)(out, a->storage, b->begin), a->storage, sums, b->rows,
                     a->value_size, b->padded_dv, 1, 0);
}

static NOINLINE void NAME(forward_blocks)(const wpe_attention *a, const void *packed,
                                          wpe_matrix_out out, void *lse, int64_t begin, int64_t end,
                                          void *workspace) {
    PACKED parts = NAME(packed_parts)(a, (void *)packed, WPE_FORWARD);
    MEMORY memory = {workspace, 0};
    BLOCK b;
    NAME(block_memory)(&b, a, &memory);
    REAL *sums = NAME(take)(&memory, WPE_QUERY_BLOCK * b.padded_dv);
    for (int64_t i = begin; i < end; i += WPE_QUERY_BLOCK) {
        NAME(begin_block)(&b, i, smaller(i + WPE_QUERY_BLOCK, end));
        NAME(forward_block)(&b, &parts, sums, out, lse);
    }
}

static void NAME(attention_forward)(const wpe_attention *a, const void *packed, wpe_matrix_out out,
                                    void *lse, int64_t begin, int64_t end, void *workspace) {
    check_attention(a);
    check_blocks(a, begin, end);
    assert(is_aligned(packed, 64) && is_aligned(workspace, 64) && is_aligned(lse, sizeof(REAL)));
    FLUSHED(NAME(forward_blocks)(a, packed, out, lse, begin, end, workspace));
}
