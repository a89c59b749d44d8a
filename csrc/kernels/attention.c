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
        REAL *row = sums + i * b->padded_dv;
        lse[b->begin + i] = NAME(finish_row)(row, b->padded_dv, max[i], sum[i]);
    }
    NAME(attention_store)(NAME(from_row)(out, a->storage, b->begin), a->storage, sums, b->rows,
                          a->value_size, b->padded_dv, 1, 0);
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

#include "attention_backward.c"
#include "attention_decode.c"

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
