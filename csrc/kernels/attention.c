/* attention.c: softmax attention with a relative term, forward and backward [W][S][X][A].
 *
 * Included by variant.c once per real type; made of the parts included here. A block of queries
 * meets its keys tile by tile, nothing of size (queries, keys) is kept: forward with a running
 * maximum and sum, backward in one pass from lse, in five products a tile: S = R P^T + Q K^T     dP
 * = dO V^T     dV += P^T dO     dK += dS^T Q     dQ += dS K and, after all tiles, dR += dT P (dT is
 * dS, see attention_table.c) and dTable += dT^T R. Query blocks are outermost: keys outermost cost
 * the same, and a second pass over the tiles a quarter more. Rows are trimmed to the keys they see
 * by groups of GROUP. */

#include "gemm.c"
#include "attention_pack.c"
#include "attention_block.c"
#include "attention_table.c"
#include "attention_softmax.c"

/* ---- keys and values that are not finite ---------------------------------------------------- */

/* C[i] += sum of weight[i][j] * row j, for the pairs that see each other only: where a row is not
 * finite, a product with the weight 0 of a hidden one would be NaN. */
static void NAME(accumulate_seen)(REAL *c, int64_t c_row, const BLOCK *b, const TILE *t,
                                  const REAL *rows, int64_t panel, int64_t cols) {
    for (int64_t i = 0; i < b->rows; i++) {
        int64_t end = smaller(b->seen[i].end, t->key + WPE_KEY_BLOCK);
        for (int64_t j = larger(b->seen[i].begin, t->key); j < end; j++) {
            if (!unmasked(b->a, b->begin + i, j)) continue;
            REAL weight = t->s[i * t->row + j - t->key];
            for (int64_t x = 0; x < cols; x++)
                c[i * c_row + x] += weight * rows[x / PANEL * panel + j * PANEL + x % PANEL];
        }
    }
}

static void NAME(accumulate)(REAL *c, int64_t c_row, const BLOCK *b, const TILE *t,
                             const REAL *rows, int64_t panel, int64_t cols, int infinite) {
    if (infinite)
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
    NAME(gemm_columns)(t->s, t->row, b->q, b->d, keys_t + t->key * d, PANEL, d * PANEL, d,
                       b->groups, t->part, add);
    for (int64_t i = 0; i < b->groups * GROUP; i++) NAME(adjust_row)(b, t, i);
}

static void NAME(softmax_tile)(const BLOCK *b, const TILE *t, REAL *max, REAL *sum, REAL *out) {
    REAL keep[WPE_KEY_BLOCK];
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range part = t->part[i / GROUP];
        if (part.begin == part.end) continue;
        REAL *s = t->s + i * t->row, *o = out + i * b->dv;
        REAL factor = NAME(softmax_row)(s, part.begin, part.end, &max[i], &sum[i]);
        if (factor != 1)
            for (int64_t x = 0; x < b->dv; x++) o[x] *= factor;
        if (!b->a->drop_below) continue;
        NAME(keep_row)(keep, b->a, b->begin + i, t->key, part.begin, part.end);
        for (int64_t j = part.begin; j < part.end; j++) s[j] *= keep[j];
    }
}

static void NAME(forward_block)(BLOCK *b, const PACKED *keys, REAL *sums, wpe_matrix_out out,
                                REAL *lse) {
    const wpe_attention *a = b->a;
    REAL max[WPE_QUERY_BLOCK], sum[WPE_QUERY_BLOCK];
    TILE t;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        max[i] = -(REAL)INFINITY;
        sum[i] = 0;
    }
    memset(sums, 0, (size_t)(b->groups * GROUP * b->dv) * sizeof(REAL));
    NAME(table_scores)(b);
    int64_t panel = round_up(a->keys, STEP) * PANEL;
    for (int64_t j = round_down(b->keys.begin, WPE_KEY_BLOCK); j < b->keys.end;
         j += WPE_KEY_BLOCK) {
        if (NAME(other_segments)(b, j)) continue;
        NAME(begin_tile)(&t, b, j);
        NAME(tile_scores)(b, &t, keys->keys_t);
        NAME(softmax_tile)(b, &t, max, sum, sums);
        NAME(accumulate)(sums, b->dv, b, &t, keys->values, panel, b->dv,
                         keys->infinite[j / WPE_KEY_BLOCK] != 0);
    }
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *o = sums + i * b->dv;
        int none = max[i] == -(REAL)INFINITY;
        for (int64_t x = 0; x < b->dv; x++) o[x] = none ? 0 : o[x] / sum[i];
        lse[b->begin + i] = none ? max[i] : max[i] + (REAL)log(sum[i]);
    }
    wpe_matrix_out rows = out;
    rows.data =
        (void *)NAME(element)((wpe_matrix){out.data, out.row, out.col}, a->storage, b->begin, 0);
    NAME(attention_store)(rows, a->storage, sums, b->rows, a->value_size, b->dv, 1, 0);
}

static void NAME(attention_forward)(const wpe_attention *a, const void *packed, wpe_matrix_out out,
                                    void *lse, int64_t begin, int64_t end, void *workspace) {
    PACKED keys = NAME(packed_parts)(a, (void *)packed, 0);
    BLOCK b;
    REAL *sums = NAME(block_memory)(&b, a, workspace);
    for (int64_t i = begin; i < end; i += WPE_QUERY_BLOCK) {
        NAME(begin_block)(&b, i, smaller(i + WPE_QUERY_BLOCK, end));
        NAME(forward_block)(&b, &keys, sums, out, lse);
    }
}

/* ---- backward ------------------------------------------------------------------------------ */

/* Scratch of backward beside the block's. */
typedef struct {
    REAL *grad_out, *dq, *dr; /* (rows, dv), (rows, d) twice; dr may be dq */
    REAL *weights;            /* a tile: first dP, then P */
    REAL lse[WPE_QUERY_BLOCK], delta[WPE_QUERY_BLOCK];
    REAL far[WPE_QUERY_BLOCK], near[WPE_QUERY_BLOCK];
} NAME(scratch);
#define SCRATCH NAME(scratch)

static REAL *NAME(scratch_memory)(SCRATCH *w, const BLOCK *b, REAL *memory) {
    w->grad_out = memory;
    memory += WPE_QUERY_BLOCK * b->dv;
    w->dq = memory;
    memory += WPE_QUERY_BLOCK * b->d;
    w->dr = b->r == b->q ? w->dq : memory;
    memory += w->dr == w->dq ? 0 : WPE_QUERY_BLOCK * b->d;
    w->weights = memory;
    return memory + WPE_QUERY_BLOCK * WPE_KEY_BLOCK;
}

/* dO, and per row lse and Delta = dO . O - d lse. A row that saw nothing gets lse = +inf: weights
 * of 0. */
static void NAME(begin_backward)(const BLOCK *b, SCRATCH *w, const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    const REAL *lse = g->lse, *grad_lse = g->grad_lse;
    int64_t rows = b->groups * GROUP, dv = a->value_size;
    REAL *out = w->weights; /* not in use yet */
    NAME(load_rows)(w->grad_out, b->dv, g->grad_out, a->storage, b->begin, b->rows, rows, dv, 1);
    for (int64_t i = 0; i < rows; i++) {
        w->lse[i] = INFINITY;
        w->delta[i] = w->far[i] = w->near[i] = 0;
        if (i >= b->rows) continue;
        REAL sum = 0;
        for (int64_t x = 0; x < dv; x += WPE_KEY_BLOCK) {
            int64_t count = smaller(WPE_KEY_BLOCK, dv - x);
            NAME(load_rows)(out, round_up(count, 16),
                            (wpe_matrix){NAME(element)(g->out, a->storage, b->begin + i, x),
                                         g->out.row, g->out.col},
                            a->storage, 0, 1, 1, count, 1);
            V sums[SUMS] = {0};
            for (int64_t c = 0; c < count; c += LANES) {
                int lanes = (int)smaller(LANES, count - c);
                sums[c / LANES % SUMS] += LOAD_REAL(out + c, 1, lanes) *
                                          LOAD_REAL(w->grad_out + i * b->dv + x + c, 1, lanes);
            }
            sum += NAME(sum_lanes)(sums);
        }
        REAL of_row = lse[b->begin + i];
        w->lse[i] = of_row == -(REAL)INFINITY ? (REAL)INFINITY : of_row;
        w->delta[i] = sum - (grad_lse && of_row > -(REAL)INFINITY ? grad_lse[b->begin + i] : 0);
    }
    memset(w->dq, 0, (size_t)(rows * b->d) * sizeof(REAL));
    if (w->dr != w->dq) memset(w->dr, 0, (size_t)(rows * b->d) * sizeof(REAL));
}

/* Zeroes around the columns that a group worked on, as far as gemm_transposed reads: whole groups
 * of keys. */
INLINE void NAME(clear_around)(REAL *s, wpe_range part) {
    for (int64_t j = larger(part.begin - GROUP, 0); j < part.begin; j++) s[j] = 0;
    for (int64_t j = part.end; j < smaller(part.end + GROUP, WPE_KEY_BLOCK); j++) s[j] = 0;
}

/* Rows of the tile: scores become their gradient, dP becomes P. */
static void NAME(gradient_tile)(const BLOCK *b, const TILE *t, SCRATCH *w) {
    const wpe_attention *a = b->a;
    REAL keep[WPE_KEY_BLOCK], inverse_cap = a->softcap != 0 ? 1 / (REAL)a->softcap : 0;
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range part = t->part[i / GROUP]; /* empty: only cleared around */
        REAL *s = t->s + i * t->row, *y = w->weights + i * WPE_KEY_BLOCK;
        REAL lse = w->lse[i], delta = w->delta[i];
        if (a->drop_below) {
            NAME(keep_row)(keep, a, b->begin + i, t->key, part.begin, part.end);
            NAME(gradient_row)(s, y, part.begin, part.end, lse, delta, keep, inverse_cap);
        } else if (inverse_cap != 0) {
            NAME(gradient_row)(s, y, part.begin, part.end, lse, delta, NULL, inverse_cap);
        } else {
            NAME(gradient_row)(s, y, part.begin, part.end, lse, delta, NULL, 0);
        }
        NAME(clear_around)(s, part);
        NAME(clear_around)(y, part);
    }
}

/* dP of a value that is not finite makes the gradient of hidden scores 0 * NaN. */
static void NAME(clear_hidden)(const BLOCK *b, const TILE *t) {
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->part[i / GROUP].begin; j < t->part[i / GROUP].end; j++) {
            int64_t key = t->key + j;
            if (key < b->seen[i].begin || key >= b->seen[i].end ||
                !unmasked(b->a, b->begin + i, key))
                t->s[i * t->row + j] = 0;
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

static void NAME(backward_tile)(BLOCK *b, SCRATCH *w, const PACKED *keys,
                                const wpe_attention_sums *sums, int64_t key) {
    const wpe_attention *a = b->a;
    wpe_range rows[WPE_KEY_BLOCK / GROUP + 1];
    TILE t;
    NAME(begin_tile)(&t, b, key);
    if (NAME(other_segments)(b, key)) {
        for (int64_t i = 0; t.in_band && i < b->groups * GROUP; i++)
            for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
                t.s[i * t.row + j] = 0;
        return;
    }
    int infinite = keys->infinite[key / WPE_KEY_BLOCK] != 0;
    int64_t padded = round_up(a->keys, STEP);
    NAME(tile_scores)(b, &t, keys->keys_t);
    NAME(gemm_columns)(w->weights, WPE_KEY_BLOCK, w->grad_out, b->dv,
                       keys->values_t + key * a->value_size, PANEL, a->value_size * PANEL,
                       a->value_size, b->groups, t.part, 0);
    NAME(gradient_tile)(b, &t, w);
    if (infinite) NAME(clear_hidden)(b, &t);
    int64_t groups = NAME(rows_of_keys)(b, &t, rows);
    NAME(gemm_transposed)((REAL *)sums->dv + key * b->dv, b->dv, w->weights, WPE_KEY_BLOCK,
                          w->grad_out, b->dv, PANEL, b->dv, groups, rows);
    NAME(gemm_transposed)((REAL *)sums->dk + key * b->d, b->d, t.s, t.row, b->q, b->d, PANEL, b->d,
                          groups, rows);
    NAME(accumulate)(w->dq, b->d, b, &t, keys->keys, padded * PANEL, b->d, infinite);
    if (t.in_band || !b->cols || a->relative->beyond != WPE_EDGE) return;
    REAL *end = key < b->band.begin ? w->far : w->near;
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t.part[i / GROUP].begin; j < t.part[i / GROUP].end; j++)
            end[i] += t.s[i * t.row + j];
}

static void NAME(backward_block)(BLOCK *b, SCRATCH *w, const PACKED *keys,
                                 const wpe_attention_gradients *g) {
    const wpe_attention *a = b->a;
    NAME(begin_backward)(b, w, g);
    NAME(table_scores)(b);
    for (int64_t j = round_down(b->keys.begin, WPE_KEY_BLOCK); j < b->keys.end; j += WPE_KEY_BLOCK)
        NAME(backward_tile)(b, w, keys, &g->sums, j);
    if (b->cols) {
        NAME(finish_gradient)(b, w->far, w->near);
        NAME(table_gradient_r)(b, w->dr);
        if (g->sums.dp) NAME(table_gradient_p)(b, g->sums.dp);
    }
    for (int64_t x = 0; x < b->rows * b->d; x++) w->dq[x] *= (REAL)a->scale;
    for (int64_t x = 0; w->dr != w->dq && x < b->rows * b->d; x++) w->dr[x] *= (REAL)a->scale;
    const wpe_matrix_out *results[2] = {&g->dq, &g->dr};
    const REAL *from[2] = {w->dq, w->dr};
    for (int r = 0; r < 2; r++) {
        wpe_matrix_out to = *results[r];
        if (!to.data) continue;
        to.data =
            (void *)NAME(element)((wpe_matrix){to.data, to.row, to.col}, a->storage, b->begin, 0);
        NAME(attention_store)(to, a->storage, from[r], b->rows, a->head_size, b->d, 1, 0);
    }
}

static void NAME(attention_backward)(const wpe_attention *a, const void *packed,
                                     const wpe_attention_gradients *gradients, int64_t begin,
                                     int64_t end, void *workspace) {
    PACKED keys = NAME(packed_parts)(a, (void *)packed, 1);
    BLOCK b;
    SCRATCH w;
    NAME(scratch_memory)(&w, &b, NAME(block_memory)(&b, a, workspace));
    for (int64_t i = begin; i < end; i += WPE_QUERY_BLOCK) {
        NAME(begin_block)(&b, i, smaller(i + WPE_QUERY_BLOCK, end));
        NAME(backward_block)(&b, &w, &keys, gradients);
    }
}

/* ---- sizes --------------------------------------------------------------------------------- */

static wpe_range NAME(attention_keys)(const wpe_attention *a, int64_t begin, int64_t end) {
    wpe_range keys = {keys_of(a, begin).begin, keys_of(a, end - 1).end};
    return keys;
}

static wpe_attention_sizes NAME(attention_sizes)(const wpe_attention *a, int backward) {
    BLOCK b;
    SCRATCH w;
    wpe_attention_sizes sizes;
    REAL *end = NAME(block_memory)(&b, a, NULL);
    end = backward ? NAME(scratch_memory)(&w, &b, end) : end + WPE_QUERY_BLOCK * b.dv;
    sizes.workspace = end - (REAL *)NULL;
    sizes.packed = NAME(packed_parts)(a, NULL, backward).size;
    sizes.keys = round_up(a->keys, STEP) + GROUP;
    sizes.head_size = b.d;
    sizes.value_size = b.dv;
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
#undef SUMS
#undef DECODE_KEYS
