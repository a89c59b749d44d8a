/* attention.c: softmax attention with a relative term, forward and backward [W][S][X][A].
 *
 * Included by variant.c once per real type; made of the parts included here. A block of queries
 * meets its keys tile by tile, nothing of size (queries, keys) is kept: forward with a running
 * maximum and sum, backward in one pass from lse, in five products a tile. With T = R P^T the
 * relative term, S the scores, W the weights:
 *
 *     S = T + Q K^T      dW = dO V^T      dV += W^T dO      dK += dS^T Q      dQ += dS K
 *
 * and, after all tiles, dR += dT P (dT is dS, see attention_table.c) and dP += dT^T R. Query blocks
 * are outermost: keys outermost cost the same, and a second pass over the tiles a quarter more.
 * Rows are trimmed to the keys they see by groups of GROUP. */

#include "gemm.c"
#include "attention_pack.c"
#include "attention_block.c"
#include "attention_table.c"
#include "attention_softmax.c"

/* ---- what is not finite --------------------------------------------------------------------- */

/* The products below, over pairs that see each other only: beside a NaN or Inf the weight 0 of a
 * hidden pair would give NaN. */
#define EACH_SEEN_PAIR(i, j)                                                 \
    for (int64_t i = 0; i < b->rows; i++)                                    \
        for (int64_t j = larger(b->seen[i].begin, t->key),                   \
                     end_ = smaller(b->seen[i].end, t->key + WPE_KEY_BLOCK); \
             j < end_; j++)                                                  \
            if (unmasked(b->a, b->begin + i, j))

/* C[i] += sum of weight[i][j] * row j of the panels */
static void NAME(accumulate_seen)(REAL *c, int64_t c_row, const BLOCK *b, const TILE *t,
                                  const REAL *rows, int64_t panel, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL weight = t->s[i * t->row + j - t->key];
        for (int64_t x = 0; x < cols; x++)
            c[i * c_row + x] += weight * rows[x / PANEL * panel + j * PANEL + x % PANEL];
    }
}

/* C[j] += sum of weight[i][j] * row i */
static void NAME(accumulate_seen_keys)(REAL *c, const BLOCK *b, const TILE *t, const REAL *weight,
                                       int64_t weight_row, const REAL *rows, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL factor = weight[i * weight_row + j - t->key];
        for (int64_t x = 0; x < cols; x++) c[j * cols + x] += factor * rows[i * cols + x];
    }
}

static void NAME(accumulate)(REAL *c, int64_t c_row, const BLOCK *b, const TILE *t,
                             const REAL *rows, int64_t panel, int64_t cols, int not_finite) {
    if (not_finite)
        NAME(accumulate_seen)(c, c_row, b, t, rows, panel, cols);
    else
        NAME(gemm_depth)(c, c_row, t->s, t->row, rows + t->key * PANEL, PANEL, panel, cols,
                         b->groups, t->exact);
}

/* ---- forward ------------------------------------------------------------------------------- */

/* Scores of the tile: q . k on top of the relative term, then what hides and bends them. */
static void NAME(tile_scores)(const BLOCK *b, const TILE *t, const REAL *keys_t) {
    int64_t d = b->a->head_size;
    int add = t->in_band || NAME(constant_scores)(b, t);
    NAME(gemm_columns)(t->s, t->row, b->q, b->padded_d, keys_t + t->key * d, PANEL, d * PANEL, d,
                       b->groups, t->part, add);
    for (int64_t i = 0; i < b->groups * GROUP; i++) NAME(adjust_row)(b, t, i);
}

static void NAME(softmax_tile)(const BLOCK *b, const TILE *t, REAL *max, REAL *sum, REAL *out) {
    REAL keep[WPE_KEY_BLOCK];
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range part = t->part[i / GROUP];
        if (part.begin == part.end) continue;
        REAL *s = t->s + i * t->row, *o = out + i * b->padded_dv;
        REAL factor = NAME(softmax_row)(s, part.begin, part.end, &max[i], &sum[i]);
        if (factor != 1)
            for (int64_t x = 0; x < b->padded_dv; x++) o[x] *= factor;
        if (!b->a->drop_below) continue;
        NAME(keep_row)(keep, b->a, b->begin + i, t->key, part.begin, part.end);
        for (int64_t j = part.begin; j < part.end; j++) s[j] *= keep[j];
    }
}

static void NAME(forward_block)(BLOCK *b, const PACKED *packed, REAL *sums, wpe_matrix_out out,
                                REAL *lse) {
    const wpe_attention *a = b->a;
    REAL max[WPE_QUERY_BLOCK], sum[WPE_QUERY_BLOCK];
    TILE t;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        max[i] = -(REAL)INFINITY;
        sum[i] = 0;
    }
    memset(sums, 0, (size_t)(b->groups * GROUP * b->padded_dv) * sizeof(REAL));
    NAME(table_scores)(b);
    int64_t panel = round_up(a->keys, STEP) * PANEL;
    for (int64_t j = round_down(b->keys.begin, WPE_KEY_BLOCK); j < b->keys.end;
         j += WPE_KEY_BLOCK) {
        if (NAME(other_segments)(b, j)) continue;
        NAME(begin_tile)(&t, b, j);
        NAME(tile_scores)(b, &t, packed->keys_t);
        NAME(softmax_tile)(b, &t, max, sum, sums);
        NAME(accumulate)(sums, b->padded_dv, b, &t, packed->values, panel, b->padded_dv,
                         packed->not_finite[j / WPE_KEY_BLOCK] != 0);
    }
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *o = sums + i * b->padded_dv;
        int none = max[i] == -(REAL)INFINITY;
        for (int64_t x = 0; x < b->padded_dv; x++) o[x] = none ? 0 : o[x] / sum[i];
        lse[b->begin + i] = none ? max[i] : max[i] + (REAL)log(sum[i]);
    }
    wpe_matrix_out rows = out;
    rows.data =
        (void *)NAME(element)((wpe_matrix){out.data, out.row, out.col}, a->storage, b->begin, 0);
    NAME(attention_store)(rows, a->storage, sums, b->rows, a->value_size, b->padded_dv, 1, 0);
}

static void NAME(attention_forward)(const wpe_attention *a, const void *packed, wpe_matrix_out out,
                                    void *lse, int64_t begin, int64_t end, void *workspace) {
    PACKED parts = NAME(packed_parts)(a, (void *)packed, 0);
    MEMORY memory = {workspace, 0};
    BLOCK b;
    NAME(block_memory)(&b, a, &memory);
    REAL *sums = NAME(take)(&memory, WPE_QUERY_BLOCK * b.padded_dv);
    for (int64_t i = begin; i < end; i += WPE_QUERY_BLOCK) {
        NAME(begin_block)(&b, i, smaller(i + WPE_QUERY_BLOCK, end));
        NAME(forward_block)(&b, &parts, sums, out, lse);
    }
}

/* ---- backward ------------------------------------------------------------------------------ */

/* Scratch of backward beside the block's. */
typedef struct {
    REAL *grad_out, *dq, *dr; /* (rows, dv), (rows, d) twice; dr may be dq */
    REAL *weights;            /* a tile: first dW, then W */
    REAL lse[WPE_QUERY_BLOCK], row_term[WPE_QUERY_BLOCK]; /* dO . O - d lse */
    REAL far[WPE_QUERY_BLOCK], near[WPE_QUERY_BLOCK];     /* gradients past the table's ends */
    int not_finite;                                       /* some query, its gradient, or its lse */
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
        NAME(read_row)(chunk, NAME(element)(out, a->storage, b->begin + i, x), a->storage, out.col,
                       count, 1);
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
        w->row_term[i] = w->far[i] = w->near[i] = 0;
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
        REAL *s = t->s + i * t->row, *dw = w->weights + i * WPE_KEY_BLOCK;
        REAL lse = w->lse[i], term = w->row_term[i];
        if (a->drop_below) {
            NAME(keep_row)(keep, a, b->begin + i, t->key, part.begin, part.end);
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

/* Beside what is not finite the weights and gradients of hidden pairs are not 0, but NaN. */
static void NAME(clear_hidden)(const BLOCK *b, const TILE *t, REAL *weights) {
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->part[i / GROUP].begin; j < t->part[i / GROUP].end; j++) {
            int64_t key = t->key + j;
            if (key < b->seen[i].begin || key >= b->seen[i].end ||
                !unmasked(b->a, b->begin + i, key))
                t->s[i * t->row + j] = weights[i * WPE_KEY_BLOCK + j] = 0;
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
        NAME(accumulate_seen_keys)(dk, b, t, t->s, t->row, b->q, b->padded_d);
        return;
    }
    wpe_range rows[WPE_KEY_BLOCK / GROUP + 1];
    int64_t groups = NAME(rows_of_keys)(b, t, rows);
    NAME(gemm_transposed)(dv + t->key * b->padded_dv, b->padded_dv, w->weights, WPE_KEY_BLOCK,
                          w->grad_out, b->padded_dv, PANEL, b->padded_dv, groups, rows);
    NAME(gemm_transposed)(dk + t->key * b->padded_d, b->padded_d, t->s, t->row, b->q, b->padded_d,
                          PANEL, b->padded_d, groups, rows);
}

static void NAME(backward_tile)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                const wpe_attention_sums *sums, int64_t key) {
    const wpe_attention *a = b->a;
    TILE t;
    NAME(begin_tile)(&t, b, key);
    if (NAME(other_segments)(b, key)) {
        for (int64_t i = 0; t.in_band && i < b->groups * GROUP; i++)
            for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
                t.s[i * t.row + j] = 0;
        return;
    }
    int of_keys = packed->not_finite[key / WPE_KEY_BLOCK] != 0;
    NAME(tile_scores)(b, &t, packed->keys_t);
    NAME(gemm_columns)(w->weights, WPE_KEY_BLOCK, w->grad_out, b->padded_dv,
                       packed->values_t + key * a->value_size, PANEL, a->value_size * PANEL,
                       a->value_size, b->groups, t.part, 0);
    NAME(gradient_tile)(b, &t, w);
    if (of_keys || w->not_finite) NAME(clear_hidden)(b, &t, w->weights);
    NAME(key_sums)(b, &t, w, sums);
    NAME(accumulate)(w->dq, b->padded_d, b, &t, packed->keys, round_up(a->keys, STEP) * PANEL,
                     b->padded_d, of_keys);
    if (t.in_band || !b->cols || a->relative->beyond != WPE_EDGE) return;
    REAL *end = key < b->band.begin ? w->far : w->near;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
            end[i] += t.s[i * t.row + j];
}

static void NAME(backward_block)(BLOCK *b, SCRATCH *w, const PACKED *packed,
                                 const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    NAME(begin_backward)(b, w, g);
    NAME(table_scores)(b);
    for (int64_t j = round_down(b->keys.begin, WPE_KEY_BLOCK); j < b->keys.end; j += WPE_KEY_BLOCK)
        NAME(backward_tile)(b, w, packed, &g->sums, j);
    if (b->cols) {
        NAME(finish_gradient)(b, w->far, w->near);
        NAME(table_gradient_r)(b, w->dr);
        if (g->sums.dp) NAME(table_gradient_p)(b, g->sums.dp);
    }
    for (int64_t x = 0; x < b->rows * b->padded_d; x++) w->dq[x] *= (REAL)a->scale;
    for (int64_t x = 0; w->dr != w->dq && x < b->rows * b->padded_d; x++)
        w->dr[x] *= (REAL)a->scale;
    const wpe_matrix_out *results[2] = {&g->dq, &g->dr};
    const REAL *from[2] = {w->dq, w->dr};
    for (int r = 0; r < 2; r++) {
        if (results[r]->data)
            NAME(attention_store)(NAME(from_row)(*results[r], a->storage, b->begin), a->storage,
                                  from[r], b->rows, a->head_size, b->padded_d, 1, 0);
    }
}

static void NAME(attention_backward)(const wpe_attention *a, const void *packed,
                                     const wpe_attention_gradients *gradients, int64_t begin,
                                     int64_t end, void *workspace) {
    PACKED parts = NAME(packed_parts)(a, (void *)packed, 1);
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

/* ---- sizes --------------------------------------------------------------------------------- */

static wpe_range NAME(attention_keys)(const wpe_attention *a, int64_t begin, int64_t end) {
    wpe_range keys = {keys_of(a, begin).begin, keys_of(a, end - 1).end};
    return keys;
}

static wpe_attention_sizes NAME(attention_sizes)(const wpe_attention *a, int backward) {
    MEMORY memory = {NULL, 0};
    BLOCK b;
    SCRATCH w;
    wpe_attention_sizes sizes;
    NAME(block_memory)(&b, a, &memory);
    if (backward)
        NAME(scratch_memory)(&w, &b, &memory);
    else
        NAME(take)(&memory, WPE_QUERY_BLOCK * b.padded_dv);
    sizes.workspace = memory.used;
    sizes.packed = NAME(packed_parts)(a, NULL, backward).size;
    sizes.keys = round_up(a->keys, STEP) + GROUP;
    sizes.head_size = b.padded_d;
    sizes.value_size = b.padded_dv;
    sizes.table = a->relative ? a->relative->rows + GROUP : 0;
    return sizes;
}

#include "attention_decode.c"

#undef GROUP
#undef PANEL
#undef STEP
#undef CHUNK
#undef GROUPS
#undef BLOCK
#undef TILE
#undef PACKED
#undef SCRATCH
#undef EACH_SEEN_PAIR
#undef MEMORY
#undef SUMS
#undef DECODE_KEYS
