/* attention_backward.c: a block of queries, backward: see the head of attention.c. */

/* Scratch of backward beside the block's. */
typedef struct {
    REAL *grad_out, *dq, *dr; /* (rows, dv), (rows, d) twice; dr may be dq */
    REAL *weights;            /* a tile: first dW, then W */
    REAL lse[WPE_QUERY_BLOCK], row_term[WPE_QUERY_BLOCK]; /* dO . O - d lse */
    /* gradients of keys past the table's ends, which belong to its last and first row */
    REAL to_last_row[WPE_QUERY_BLOCK], to_first_row[WPE_QUERY_BLOCK];
    int not_finite; /* some query, its gradient, or its lse */
} NAME(scratch);
#define SCRATCH NAME(scratch)

static void NAME(scratch_memory)(SCRATCH *w, const BLOCK *b, MEMORY *memory) {
    w->grad_out = NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_dv);
    w->dq = NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_d);
    w->dr = b->a->r.data ? NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_d) : w->dq;
    w->weights = NAME(take)(memory, WPE_QUERY_BLOCK * WPE_KEY_BLOCK);
}

/* The sum over dO . O of row i, in 16 fixed lanes. */
static REAL NAME(dot_out)(const BLOCK *b, const SCRATCH *w, wpe_matrix out, int64_t i) {
    const wpe_attention *a = b->a;
    REAL chunk[CHUNK], sum = 0;
    for (int64_t x = 0; x < a->value_size; x += CHUNK) {
        int64_t count = smaller(CHUNK, a->value_size - x);
        NAME(read_row)(chunk, NAME(element)(out, a->storage, b->begin + i, x), a->storage,
                       out.col_stride, count, 1);
        V sums[SUMS] = {0};
        for (int64_t c = 0; c < count; c += LANES) {
            int lanes = (int)smaller(LANES, count - c);
            sums[c / LANES % SUMS] += LOAD_REAL(chunk + c, 1, lanes) *
                                      LOAD_REAL(w->grad_out + i * b->padded_dv + x + c, 1, lanes);
        }
        sum += NAME(sum_lanes)(sums);
    }
    return sum;
}

/* dO, and per row lse and dO . O - d lse. A row that saw nothing takes part with weights of 0: its
 * lse becomes +inf, and it is cleared, as it may hold NaN. */
static void NAME(begin_backward)(const BLOCK *b, SCRATCH *w, const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    const REAL *lse = (const REAL *)g->lse + b->begin, *grad_lse = g->grad_lse;
    int64_t rows = b->groups * GROUP, d = b->padded_d, dv = b->padded_dv;
    NAME(load_rows)(w->grad_out, dv, g->grad_out, a->storage, b->begin, b->rows, rows,
                    a->value_size, 1);
    REAL check = 0;
    for (int64_t i = 0; i < rows; i++) {
        w->lse[i] = INFINITY;
        w->row_term[i] = w->to_last_row[i] = w->to_first_row[i] = 0;
        if (i >= b->rows) continue;
        if (lse[i] == -(REAL)INFINITY) {
            memset(b->q + i * d, 0, (size_t)d * sizeof(REAL));
            memset(b->r + i * d, 0, (size_t)d * sizeof(REAL));
            memset(w->grad_out + i * dv, 0, (size_t)dv * sizeof(REAL));
            continue;
        }
        w->lse[i] = lse[i];
        w->row_term[i] = NAME(dot_out)(b, w, g->out, i) - (grad_lse ? grad_lse[b->begin + i] : 0);
        check += (w->lse[i] + w->row_term[i]) * 0;
    }
    w->not_finite = check != 0 || NAME(any_not_finite)(b->q, rows * d) ||
                    NAME(any_not_finite)(b->r, rows * d) ||
                    NAME(any_not_finite)(w->grad_out, rows * dv);
    memset(w->dq, 0, (size_t)(rows * d) * sizeof(REAL));
    if (w->dr != w->dq) memset(w->dr, 0, (size_t)(rows * d) * sizeof(REAL));
}

/* Zeroes around the columns that a group worked on, as far as gemm_transposed reads: whole groups
 * of keys. */
INLINE void NAME(clear_around)(REAL *s, wpe_range part) {
    for (int64_t j = larger(part.begin - GROUP, 0); j < part.begin; j++) s[j] = 0;
    for (int64_t j = part.end; j < smaller(part.end + GROUP, WPE_KEY_BLOCK); j++) s[j] = 0;
}

/* Rows of the tile: scores become their gradient, dW becomes W. */
static void NAME(gradient_tile)(const BLOCK *b, const TILE *t, SCRATCH *w) {
    const wpe_attention *a = b->a;
    REAL keep[WPE_KEY_BLOCK], inverse_cap = a->softcap != 0 ? 1 / (REAL)a->softcap : 0;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range part = t->part[i / GROUP]; /* empty: only cleared around */
        REAL *s = t->s + i * t->row_stride, *dw = w->weights + i * WPE_KEY_BLOCK;
        REAL lse = w->lse[i], term = w->row_term[i];
        if (a->drop_below) {
            NAME(keep_row)(keep, a, b->begin + i, t->first_key, part.begin, part.end);
            NAME(gradient_row)(s, dw, part.begin, part.end, lse, term, keep, inverse_cap);
        } else if (inverse_cap != 0) {
            NAME(gradient_row)(s, dw, part.begin, part.end, lse, term, NULL, inverse_cap);
        } else {
            NAME(gradient_row)(s, dw, part.begin, part.end, lse, term, NULL, 0);
        }
        NAME(clear_around)(s, part);
        NAME(clear_around)(dw, part);
    }
}

/* Which rows of the block have worked on each group of keys of the tile. */
static int64_t NAME(rows_of_keys)(const BLOCK *b, const TILE *t, wpe_range *rows) {
    int64_t count = 0;
    for (int64_t g = 0; g < b->groups; g++)
        count = larger(count, (t->exact[g].end + GROUP - 1) / GROUP);
    int64_t first = 0, last = 0;
    for (int64_t k = 0; k < count; k++) {
        int64_t begin = k * GROUP, end = begin + GROUP;
        while (first < b->groups && t->exact[first].end <= begin) first++;
        last = larger(last, first);
        while (last < b->groups && t->exact[last].begin < end) last++;
        rows[k] = (wpe_range){first * GROUP, last * GROUP};
    }
    return count;
}

/* dV += W^T dO, dK += dS^T Q */
static void NAME(key_sums)(const BLOCK *b, const TILE *t, const SCRATCH *w,
                           const wpe_attention_sums *sums) {
    REAL *dv = sums->dv, *dk = sums->dk;
    if (w->not_finite) {
        NAME(accumulate_seen_keys)(dv, b, t, w->weights, WPE_KEY_BLOCK, w->grad_out, b->padded_dv);
        NAME(accumulate_seen_keys)(dk, b, t, t->s, t->row_stride, b->q, b->padded_d);
        return;
    }
    wpe_range rows[WPE_KEY_BLOCK / GROUP + 1];
    int64_t groups = NAME(rows_of_keys)(b, t, rows);
    NAME(gemm_transposed)(dv + t->first_key * b->padded_dv, b->padded_dv, w->weights, WPE_KEY_BLOCK,
                          w->grad_out, b->padded_dv, b->padded_dv, groups, rows);
    NAME(gemm_transposed)(dk + t->first_key * b->padded_d, b->padded_d, t->s, t->row_stride, b->q,
                          b->padded_d, b->padded_d, groups, rows);
}

static void NAME(backward_tile)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                const wpe_attention_sums *sums, int64_t key) {
    const wpe_attention *a = b->a;
    TILE t;
    NAME(begin_tile)(&t, b, key);
    if (NAME(other_segments)(b, key)) {
        for (int64_t i = 0; t.in_band && i < b->groups * GROUP; i++)
            for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
                t.s[i * t.row_stride + j] = 0;
        return;
    }
    int of_keys = packed->not_finite[key / WPE_KEY_BLOCK] != 0;
    NAME(tile_scores)(b, &t, packed->keys_t);
    NAME(gemm_columns)(w->weights, WPE_KEY_BLOCK, w->grad_out, b->padded_dv,
                       packed->values_t + key * a->value_size, a->value_size * PANEL, a->value_size,
                       b->groups, t.part, 0);
    NAME(gradient_tile)(b, &t, w); /* t.s is dS, w->weights W from here on */
    if (of_keys || w->not_finite) NAME(clear_hidden)(b, &t, w->weights);
    if (sums->dbias) NAME(bias_gradient)(b, &t, sums->dbias);
    NAME(key_sums)(b, &t, w, sums);
    NAME(accumulate)(w->dq, b->padded_d, b, &t, packed->key_rows, round_up(a->keys, STEP) * PANEL,
                     b->padded_d, of_keys);
    if (t.in_band || !b->cols || a->relative->beyond != WPE_EDGE) return;
    REAL *end = key < b->band.begin ? w->to_last_row : w->to_first_row;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
            end[i] += t.s[i * t.row_stride + j];
}

static void NAME(backward_block)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                 const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    NAME(begin_backward)(b, w, g);
    NAME(table_scores)(b);
    for (int64_t j = round_down(b->key_range.begin, WPE_KEY_BLOCK); j < b->key_range.end;
         j += WPE_KEY_BLOCK)
        NAME(backward_tile)(b, w, packed, &g->sums, j);
    if (b->cols) {
        NAME(finish_gradient)(b, w->to_last_row, w->to_first_row);
        NAME(table_gradient_r)(b, w->dr);
        if (g->sums.dp) NAME(table_gradient_p)(b, g->sums.dp, w->not_finite);
    }
    for (int64_t x = 0; x < b->rows * b->padded_d; x++) w->dq[x] *= (REAL)a->scale;
    for (int64_t x = 0; w->dr != w->dq && x < b->rows * b->padded_d; x++)
        w->dr[x] *= (REAL)a->scale;
    const wpe_matrix_out *results[2] = {&g->dq, &g->dr};
    const REAL *from[2] = {w->dq, w->dr};
    for (int r = 0; r < 2; r++) {
        if (results[r]->data)
            NAME(store_rows)(NAME(from_row)(*results[r], a->storage, b->begin), a->storage, from[r],
                             b->rows, a->head_size, b->padded_d, 1, 0);
    }
}

static NOINLINE void NAME(backward_blocks)(const wpe_attention *a, const void *packed,
                                           const wpe_attention_gradients *gradients, int64_t begin,
                                           int64_t end, void *workspace) {
    PACKED parts = NAME(packed_parts)(a, (void *)packed, WPE_BACKWARD);
    MEMORY memory = {workspace, 0};
    BLOCK b;
    SCRATCH w;
    NAME(block_memory)(&b, a, WPE_BACKWARD, &memory);
    NAME(scratch_memory)(&w, &b, &memory);
    for (int64_t i = begin; i < end; i += WPE_QUERY_BLOCK) {
        NAME(begin_block)(&b, i, smaller(i + WPE_QUERY_BLOCK, end));
        NAME(backward_block)(&b, &w, &parts, gradients);
    }
}

static void NAME(attention_backward)(const wpe_attention *a, const void *packed,
                                     const wpe_attention_gradients *gradients, int64_t begin,
                                     int64_t end, void *workspace) {
    check_attention(a);
    check_blocks(a, begin, end);
    assert(a->keys > 0 && is_aligned(packed, 64) && is_aligned(workspace, 64));
    assert(gradients->sums.dk && gradients->sums.dv && (a->relative || !gradients->sums.dp));
    assert(a->bias.rows || !gradients->sums.dbias);
    FLUSHED(NAME(backward_blocks)(a, packed, gradients, begin, end, workspace));
}
