/* attention_block.c: a block of queries, the tiles of its scores, and its scratch memory. */

#define GROUPS (WPE_QUERY_BLOCK / GROUP)

typedef struct {
    const wpe_attention *a;
    int64_t begin, rows, groups; /* first query; queries; groups of GROUP rows, the last padded */
    /* the head size, the value size and the table size, rounded up to whole panels */
    int64_t padded_d, padded_dv, padded_r;
    int64_t table_cols;              /* the table size, rounded up to whole vectors */
    wpe_range key_range;             /* holds all keys that some query of the block sees */
    wpe_range seen[WPE_QUERY_BLOCK]; /* key_range_of each query; padding rows see no key */
    REAL *q, *r;                     /* times scale: (rows, padded_d) and (rows, padded_r) */
    REAL *tile;                      /* memory for tiles that do not overlap the band */
    REAL *projected;                 /* (rows, rank), for a zone with a basis: R U, or dT C */
    /* The band: the part of T = R P^T that the block needs (see attention_table.c). */
    REAL *table;
    int64_t table_row_stride;
    int64_t origin;                   /* memory column of (query 0 of the block, key 0) */
    int64_t first_column, band_width; /* the band's columns in T; width 0: no band */
    int64_t band_start;               /* memory column of the band's first column */
    wpe_range band_keys;              /* the keys of the tiles that overlap the band */
    /* With WPE_EDGE: whether a key may lie past the table's last row, or before its first row, and
     * r . p of that row. */
    int past_last, before_first;
    REAL last_row_score[WPE_QUERY_BLOCK], first_row_score[WPE_QUERY_BLOCK];
} NAME(query_block);
#define BLOCK NAME(query_block)

/* The strip of a tile's bias (see attention_bias.c). */
#define BIAS_ORIGIN     (WPE_QUERY_BLOCK - 1)
#define BIAS_STRIP_SIZE (BIAS_ORIGIN + WPE_KEY_BLOCK)

/* A tile of scores. Element (i, j) is scores[i * row_stride + j]; column j is key first_key + j.
 * The same memory holds, one after the other, the relative terms (or nothing), the scores, and then
 * in forward the weights, in backward the gradient of the scores. */
typedef struct {
    int64_t first_key;
    REAL *scores;
    int64_t row_stride;
    int in_band;                    /* whether `scores` is part of the band's memory */
    wpe_range seen_columns[GROUPS]; /* holds all columns that some row of a group sees */
    wpe_range work_columns[GROUPS]; /* seen_columns, rounded outwards to KEY_STEP */
    REAL bias[BIAS_STRIP_SIZE];     /* the strip: the bias of the tile's deltas, in falling delta */
} NAME(key_tile);
#define TILE NAME(key_tile)

/* Return the row stride of the band's memory. A row has room for the widest band and for the tiles
 * that reach beyond both ends of it. A tile in the band has this stride less 1, which is a multiple
 * of the cache line (64 bytes) and no power of two. */
static int64_t NAME(table_row_stride)(const wpe_attention *a) {
    int64_t widest = smaller(a->relative->rows, a->keys + WPE_QUERY_BLOCK);
    return round_up(widest + 2 * (WPE_KEY_BLOCK + WPE_QUERY_BLOCK + PANEL) + KEY_STEP, 64) + 16 + 1;
}

static int64_t NAME(largest_rank)(const wpe_relative *p) {
    int64_t rank = 0;
    for (int z = 0; z < p->zone_count; z++) rank = larger(rank, p->zones[z].rank);
    return round_up(rank, PANEL);
}

/* Take the block's scratch memory. */
static void NAME(block_memory)(BLOCK *b, const wpe_attention *a, MEMORY *memory) {
    int64_t rows = WPE_QUERY_BLOCK;
    b->a = a;
    b->padded_d = round_up(a->head_size, PANEL);
    b->padded_dv = round_up(a->value_size, PANEL);
    b->q = NAME(take)(memory, rows * b->padded_d);
    b->padded_r = a->r.data ? round_up(a->table_size, PANEL) : b->padded_d;
    b->table_cols = round_up(a->table_size, LANES);
    b->r = a->r.data ? NAME(take)(memory, rows * b->padded_r) : b->q;
    b->tile = NAME(take)(memory, rows * WPE_KEY_BLOCK);
    b->projected = NULL;
    b->table = NULL;
    b->table_row_stride = b->band_width = 0;
    if (!a->relative) return;
    b->projected = NAME(take)(memory, rows * NAME(largest_rank)(a->relative));
    b->table_row_stride = NAME(table_row_stride)(a);
    b->table = NAME(take)(memory, rows * b->table_row_stride + KEY_STEP);
}

/* Load queries begin..end-1, and find the keys that they see. */
static void NAME(begin_block)(BLOCK *b, int64_t begin, int64_t end) {
    const wpe_attention *a = b->a;
    b->begin = begin;
    b->rows = end - begin;
    b->groups = (b->rows + GROUP - 1) / GROUP;
    b->key_range = (wpe_range){key_range_of(a, begin).begin, key_range_of(a, end - 1).end};
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range none = {b->key_range.end, b->key_range.end};
        b->seen[i] = i < b->rows ? key_range_of(a, begin + i) : none;
    }
    REAL scale = (REAL)a->scale;
    NAME(load_rows)(b->q, b->padded_d, a->q, a->storage, begin, b->rows, b->groups * GROUP,
                    a->head_size, scale);
    if (a->r.data)
        NAME(load_rows)(b->r, b->padded_r, a->r, a->storage, begin, b->rows, b->groups * GROUP,
                        a->table_size, scale);
}

/* Begin the tile whose first key is first_key. If it overlaps the band, it lies in the band's
 * memory, where its relative terms already are. */
static void NAME(begin_tile)(TILE *t, const BLOCK *b, int64_t first_key) {
    t->first_key = first_key;
    t->in_band = b->band_width && first_key >= b->band_keys.begin && first_key < b->band_keys.end;
    t->scores = t->in_band ? b->table + b->origin + first_key : b->tile;
    t->row_stride = t->in_band ? b->table_row_stride - 1 : WPE_KEY_BLOCK;
    for (int64_t g = 0; g < b->groups; g++) {
        int64_t last = smaller(g * GROUP + GROUP, b->rows) - 1;
        int64_t begin = smaller(larger(b->seen[g * GROUP].begin - first_key, 0), WPE_KEY_BLOCK);
        int64_t end = larger(smaller(b->seen[last].end - first_key, WPE_KEY_BLOCK), begin);
        /* as g grows, neither end gets smaller */
        t->seen_columns[g] = t->work_columns[g] = (wpe_range){begin, end};
        if (begin < end)
            t->work_columns[g] = (wpe_range){round_down(begin, KEY_STEP), round_up(end, KEY_STEP)};
    }
}

/* Return whether segments hide the whole tile, because all segment numbers of its keys lie below,
 * or all above, those of the block's queries. 0 does not mean that some pair is seen. */
static int NAME(other_segments)(const BLOCK *b, int64_t first_key) {
    const int64_t *id = b->a->segments;
    if (!id) return 0;
    int64_t end = smaller(first_key + WPE_KEY_BLOCK, b->a->keys);
    int64_t low = INT64_MAX, high = INT64_MIN, key_low = INT64_MAX, key_high = INT64_MIN;
    for (int64_t i = b->begin; i < b->begin + b->rows; i++) {
        low = smaller(low, id[i]);
        high = larger(high, id[i]);
    }
    for (int64_t j = first_key; j < end; j++) {
        key_low = smaller(key_low, id[j]);
        key_high = larger(key_high, id[j]);
    }
    return high < key_low || key_high < low;
}
