/* attention_backward.c: backward of one block of queries (see attention.c). */

/* The scratch memory that backward needs beside the block's. */
typedef struct {
    REAL *grad_out; /* (rows, padded_dv) */
    REAL *dq, *dr;  /* (rows, padded_d) and (rows, padded_r); dr is dq if r is q */
    REAL *weights;  /* (rows, WPE_KEY_BLOCK): first dW, then W */
    REAL lse[WPE_QUERY_BLOCK];
    REAL row_term[WPE_QUERY_BLOCK]; /* dO . O - grad_lse of each row */
    /* sums of the scores' gradient over the tiles outside the band, for the table's end rows */
    REAL last_row_grad[WPE_QUERY_BLOCK], first_row_grad[WPE_QUERY_BLOCK];
    int not_finite; /* whether some q, r, grad_out, lse or row_term is NaN or Inf */
} NAME(scratch);
#define SCRATCH NAME(scratch)

static void NAME(scratch_memory)(SCRATCH *w, const BLOCK *b, MEMORY *memory) {
    w->grad_out = NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_dv);
    w->dq = NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_d);
    w->dr = b->a->r.data ? NAME(take)(memory, WPE_QUERY_BLOCK * b->padded_r) : w->dq;
    w->weights = NAME(take)(memory, WPE_QUERY_BLOCK * WPE_KEY_BLOCK);
}

/* Return dO . O of row i, summed in 16 fixed lanes. */
static REAL NAME(dot_out)(const BLOCK *b, const SCRATCH *w, wpe_matrix out, int64_t i) {
    const wpe_attention *a = b->a;
    REAL buffer[BUFFER_SIZE], sum = 0;
    for (int64_t x = 0; x < a->value_size; x += BUFFER_SIZE) {
        int64_t count = smaller(BUFFER_SIZE, a->value_size - x);
        wpe_matrix row = {NAME(element)(out, a->storage, b->begin + i, x), 0, out.col_stride};
        NAME(read_rows)(buffer, 0, row, a->storage, 0, 1, count, 1);
        V sums[SUM_VECTORS] = {0};
        for (int64_t c = 0; c < count; c += LANES) {
            int lanes = (int)smaller(LANES, count - c);
            V o = LOAD_REAL(buffer + c, 1, lanes);
            V grad = LOAD_REAL(w->grad_out + i * b->padded_dv + x + c, 1, lanes);
            V product = o * grad, total = sums[c / LANES % SUM_VECTORS];
            FENCE4(o, grad, product, total); /* no FMA, wherever this is inlined */
            sums[c / LANES % SUM_VECTORS] = total + product;
        }
        sum += NAME(sum_lanes)(sums);
    }
    return sum;
}

/* Load dO, and lse and the row term of each row. A row that saw no key must get weights of 0, so
 * its lse is set to +inf, unless it is the sink. It may hold NaN, so its q, r and dO are set to 0.
 */
static void NAME(begin_backward)(const BLOCK *b, SCRATCH *w, const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    const REAL *lse = (const REAL *)g->lse + b->begin, *grad_lse = g->grad_lse;
    int64_t rows = b->groups * GROUP, d = b->padded_d, dv = b->padded_dv;
    int64_t dr = b->padded_r;
    NAME(load_rows)(w->grad_out, dv, g->grad_out, a->storage, b->begin, b->rows, rows,
                    a->value_size, 1);
    REAL check = 0;
    for (int64_t i = 0; i < rows; i++) {
        w->lse[i] = INFINITY;
        w->row_term[i] = w->last_row_grad[i] = w->first_row_grad[i] = 0;
        if (i >= b->rows) continue;
        if (lse[i] == -(REAL)INFINITY) {
            memset(b->q + i * d, 0, (size_t)d * sizeof(REAL));
            memset(b->r + i * dr, 0, (size_t)dr * sizeof(REAL));
            memset(w->grad_out + i * dv, 0, (size_t)dv * sizeof(REAL));
            continue;
        }
        w->lse[i] = lse[i];
        w->row_term[i] = NAME(dot_out)(b, w, g->out, i) - (grad_lse ? grad_lse[b->begin + i] : 0);
        check += (w->lse[i] + w->row_term[i]) * 0;
    }
    w->not_finite = check != 0 || NAME(any_not_finite)(b->q, rows * d) ||
                    NAME(any_not_finite)(b->r, rows * dr) ||
                    NAME(any_not_finite)(w->grad_out, rows * dv);
    memset(w->dq, 0, (size_t)(rows * d) * sizeof(REAL));
    if (a->r.data) memset(w->dr, 0, (size_t)(rows * dr) * sizeof(REAL));
}

/* Set the columns next to a group's work columns to 0, as far as gemm_transposed reads them: it
 * reads whole groups of keys. */
INLINE void NAME(clear_around)(REAL *s, wpe_range columns) {
    for (int64_t j = larger(columns.begin - GROUP, 0); j < columns.begin; j++) s[j] = 0;
    for (int64_t j = columns.end; j < smaller(columns.end + GROUP, WPE_KEY_BLOCK); j++) s[j] = 0;
}

/* Turn the tile's scores into their gradient, and dW into W. */
static void NAME(gradient_tile)(const BLOCK *b, const TILE *t, SCRATCH *w) {
    const wpe_attention *a = b->a;
    REAL keep[WPE_KEY_BLOCK], inverse_cap = a->softcap != 0 ? 1 / (REAL)a->softcap : 0;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range columns = t->work_columns[i / GROUP]; /* may be empty */
        REAL *s = t->scores + i * t->row_stride, *dw = w->weights + i * WPE_KEY_BLOCK;
        REAL lse = w->lse[i], term = w->row_term[i];
        if (a->drop_below) {
            NAME(keep_row)(keep, a, b->begin + i, t->first_key, columns.begin, columns.end);
            NAME(gradient_row)(s, dw, columns.begin, columns.end, lse, term, keep, inverse_cap);
        } else if (inverse_cap != 0) {
            NAME(gradient_row)(s, dw, columns.begin, columns.end, lse, term, NULL, inverse_cap);
        } else {
            NAME(gradient_row)(s, dw, columns.begin, columns.end, lse, term, NULL, 0);
        }
        NAME(clear_around)(s, columns);
        NAME(clear_around)(dw, columns);
    }
}

/* Set rows[k] to the rows of the block that may see group k of the tile's keys. Return the number
 * of groups. */
static int64_t NAME(rows_of_keys)(const BLOCK *b, const TILE *t, wpe_range *rows) {
    int64_t count = 0;
    for (int64_t g = 0; g < b->groups; g++)
        count = larger(count, (t->seen_columns[g].end + GROUP - 1) / GROUP);
    int64_t first_group = 0, end_group = 0;
    for (int64_t k = 0; k < count; k++) {
        int64_t begin = k * GROUP, end = begin + GROUP;
        while (first_group < b->groups && t->seen_columns[first_group].end <= begin) first_group++;
        end_group = larger(end_group, first_group);
        while (end_group < b->groups && t->seen_columns[end_group].begin < end) end_group++;
        rows[k] = (wpe_range){first_group * GROUP, end_group * GROUP};
    }
    return count;
}

/* dV += W^T dO, dK += dS^T Q */
static void NAME(key_sums)(const BLOCK *b, const TILE *t, const SCRATCH *w,
                           const wpe_attention_sums *sums) {
    REAL *dv = sums->dv, *dk = sums->dk;
    if (w->not_finite) {
        NAME(accumulate_seen_keys)(dv, b, t, w->weights, WPE_KEY_BLOCK, w->grad_out, b->padded_dv);
        NAME(accumulate_seen_keys)(dk, b, t, t->scores, t->row_stride, b->q, b->padded_d);
        return;
    }
    wpe_range rows[WPE_KEY_BLOCK / GROUP + 1];
    int64_t groups = NAME(rows_of_keys)(b, t, rows);
    NAME(gemm_transposed)(dv + t->first_key * b->padded_dv, b->padded_dv, w->weights, WPE_KEY_BLOCK,
                          w->grad_out, b->padded_dv, b->padded_dv, groups, rows);
    NAME(gemm_transposed)(dk + t->first_key * b->padded_d, b->padded_d, t->scores, t->row_stride,
                          b->q, b->padded_d, b->padded_d, groups, rows);
}

static void NAME(backward_tile)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                const wpe_attention_sums *sums, int64_t first_key) {
    const wpe_attention *a = b->a;
    TILE t;
    NAME(begin_tile)(&t, b, first_key);
    if (NAME(other_segments)(b, first_key)) {
        for (int64_t i = 0; t.in_band && i < b->groups * GROUP; i++)
            for (int64_t j = t.work_columns[i / GROUP].begin; j < t.work_columns[i / GROUP].end;
                 j++)
                t.scores[i * t.row_stride + j] = 0;
        return;
    }
    int keys_not_finite = packed->not_finite[first_key / WPE_KEY_BLOCK] != 0;
    NAME(tile_scores)(b, &t, packed->k_t_panels);
    NAME(gemm_columns)(w->weights, WPE_KEY_BLOCK, w->grad_out, b->padded_dv,
                       packed->v_t_panels + first_key * a->value_size, a->value_size * PANEL,
                       a->value_size, b->groups, t.work_columns, 0);
    NAME(gradient_tile)(b, &t, w); /* from here on t.scores is dS and w->weights is W */
    if (keys_not_finite || w->not_finite) NAME(clear_hidden)(b, &t, w->weights);
    if (sums->dbias) NAME(bias_gradient)(b, &t, sums->dbias);
    NAME(key_sums)(b, &t, w, sums);
    NAME(accumulate)(w->dq, b->padded_d, b, &t, packed->k_panels,
                     round_up(a->keys, KEY_STEP) * PANEL, b->padded_d, keys_not_finite);
    if (t.in_band || !b->band_width || a->relative->beyond != WPE_EDGE) return;
    REAL *edge_grad = first_key < b->band_keys.begin ? w->last_row_grad : w->first_row_grad;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t.work_columns[i / GROUP].begin; j < t.work_columns[i / GROUP].end; j++)
            edge_grad[i] += t.scores[i * t.row_stride + j];
}

static void NAME(backward_block)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                 const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    NAME(begin_backward)(b, w, g);
    NAME(table_scores)(b);
    for (int64_t j = round_down(b->key_range.begin, WPE_KEY_BLOCK); j < b->key_range.end;
         j += WPE_KEY_BLOCK)
        NAME(backward_tile)(b, w, packed, &g->sums, j);
    if (b->band_width) {
        NAME(finish_gradient)(b, w->last_row_grad, w->first_row_grad);
        NAME(table_gradient_r)(b, w->dr);
        if (g->sums.dp) NAME(table_gradient_p)(b, g->sums.dp, w->not_finite);
    }
    for (int64_t x = 0; x < b->rows * b->padded_d; x++) w->dq[x] *= (REAL)a->scale;
    for (int64_t x = 0; a->r.data && x < b->rows * b->padded_r; x++) w->dr[x] *= (REAL)a->scale;
    if (g->dq.data)
        NAME(store_rows)(NAME(from_row)(g->dq, a->storage, b->begin), a->storage, w->dq, b->rows,
                         a->head_size, b->padded_d, 1, 0);
    if (g->dr.data)
        NAME(store_rows)(NAME(from_row)(g->dr, a->storage, b->begin), a->storage, w->dr, b->rows,
                         a->table_size, b->padded_r, 1, 0);
}

static NOINLINE void NAME(backward_blocks)(const wpe_attention *a, const void *packed,
                                           const wpe_attention_gradients *gradients, int64_t begin,
                                           int64_t end, void *workspace) {
    PACKED parts = NAME(packed_parts)(a, (void *)packed, WPE_BACKWARD);
    MEMORY memory = {workspace, 0};
    BLOCK b;
    SCRATCH w;
    NAME(block_memory)(&b, a, &memory);
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
