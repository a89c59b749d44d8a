/* attention_block.c: one block of queries, the tiles of its scores, and its scratch memory. */

#define GROUPS (WPE_QUERY_BLOCK / GROUP)

typedef struct {
    const wpe_attention *a;
    int64_t begin, rows, groups; /* first query, queries, groups of GROUP rows (the last padded) */
    int64_t padded_d, padded_dv; /* sizes of head and value, to whole panels */
    wpe_range key_range;         /* seen by any query of the block */
    wpe_range seen[WPE_QUERY_BLOCK]; /* by each query; padding rows see none */
    REAL *q, *r;                     /* times scale: (rows, padded_d) */
    REAL *scores;                    /* a tile that lies outside the table's band */
    REAL *projected;                 /* (rows, rank) of a zone */
    REAL *table;                     /* the band, see attention_table.c */
    int64_t table_row_stride;
    int64_t origin;             /* table column of (query 0 of the block, key 0) */
    int64_t first_column, cols; /* the table's columns in the band; cols 0: no band */
    int64_t column;             /* where the first one stands in memory's rows */
    wpe_range band;             /* keys of the tiles that overlap the band */
    /* beyond=edge: r . p of the table's last and first row, for keys past either end */
    REAL of_last_row[WPE_QUERY_BLOCK], of_first_row[WPE_QUERY_BLOCK];
} NAME(query_block);
#define BLOCK NAME(query_block)

#define BIAS_ROW (WPE_QUERY_BLOCK - 1) /* see attention_bias.c */
#define BIAS_RUN (BIAS_ROW + WPE_KEY_BLOCK)

/* A tile of scores: element (i, j) at s[i * row_stride + j], j counted from first_key. What s holds
 * changes on the way: relative terms (or nothing), scores, then weights in forward, and the scores'
 * gradient in backward. */
typedef struct {
    int64_t first_key;
    REAL *s;
    int64_t row_stride;
    int in_band;             /* s is the band's own memory */
    wpe_range exact[GROUPS]; /* columns that some row of a group sees */
    wpe_range part[GROUPS];  /* columns that a group works on: `exact`, rounded to STEP */
    REAL bias[BIAS_RUN];     /* of the tile's deltas, falling */
} NAME(key_tile);
#define TILE NAME(key_tile)

/* Row stride of the band's memory: room for the widest band and for the tiles that stick out at
 * both ends. Scores are read with stride - 1, kept off powers of two and on whole cache lines. */
static int64_t NAME(table_row_stride)(const wpe_attention *a) {
    int64_t widest = a->relative->rows;
    if (a->relative->beyond == WPE_ZERO) widest = smaller(widest, a->keys + WPE_QUERY_BLOCK);
    return round_up(widest + 2 * (WPE_KEY_BLOCK + WPE_QUERY_BLOCK + PANEL) + STEP, 64) + 16 + 1;
}

static int64_t NAME(largest_rank)(const wpe_relative *p) {
    int64_t rank = 0;
    for (int z = 0; z < p->zone_count; z++) rank = larger(rank, p->zones[z].rank);
    return round_up(rank, PANEL);
}

/* Takes the block's scratch from memory. Decode works on one group of rows, without a band. */
static void NAME(block_memory)(BLOCK *b, const wpe_attention *a, enum wpe_pass pass,
                               MEMORY *memory) {
    int has_band = pass != WPE_DECODE && a->relative;
    int64_t rows = pass == WPE_DECODE ? GROUP : WPE_QUERY_BLOCK;
    b->a = a;
    b->padded_d = round_up(a->head_size, PANEL);
    b->padded_dv = round_up(a->value_size, PANEL);
    b->q = NAME(take)(memory, rows * b->padded_d);
    b->r = a->r.data ? NAME(take)(memory, rows * b->padded_d) : b->q;
    b->scores = NAME(take)(memory, rows * WPE_KEY_BLOCK);
    b->projected = NULL;
    b->table = NULL;
    b->table_row_stride = b->cols = 0;
    if (!has_band) return;
    b->projected = NAME(take)(memory, rows * NAME(largest_rank)(a->relative));
    b->table_row_stride = NAME(table_row_stride)(a);
    b->table = NAME(take)(memory, rows * b->table_row_stride + STEP);
}

/* Queries begin..end-1, loaded. */
static void NAME(begin_block)(BLOCK *b, int64_t begin, int64_t end) {
    const wpe_attention *a = b->a;
    b->begin = begin;
    b->rows = end - begin;
    b->groups = (b->rows + GROUP - 1) / GROUP;
    b->key_range = (wpe_range){keys_of(a, begin).begin, keys_of(a, end - 1).end};
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        wpe_range none = {b->key_range.end, b->key_range.end};
        b->seen[i] = i < b->rows ? keys_of(a, begin + i) : none;
    }
    REAL scale = (REAL)a->scale;
    NAME(load_rows)(b->q, b->padded_d, a->q, a->storage, begin, b->rows, b->groups * GROUP,
                    a->head_size, scale);
    if (b->r != b->q)
        NAME(load_rows)(b->r, b->padded_d, a->r, a->storage, begin, b->rows, b->groups * GROUP,
                        a->head_size, scale);
}

/* Begins the tile of keys key.. . Its memory is the band's own where they overlap. */
static void NAME(begin_tile)(TILE *t, const BLOCK *b, int64_t key) {
    t->first_key = key;
    t->in_band = b->cols && key >= b->band.begin && key < b->band.end;
    t->s = t->in_band ? b->table + b->origin + key : b->scores;
    t->row_stride = t->in_band ? b->table_row_stride - 1 : WPE_KEY_BLOCK;
    for (int64_t g = 0; g < b->groups; g++) {
        int64_t last = smaller(g * GROUP + GROUP, b->rows) - 1;
        int64_t begin = smaller(larger(b->seen[g * GROUP].begin - key, 0), WPE_KEY_BLOCK);
        int64_t end = larger(smaller(b->seen[last].end - key, WPE_KEY_BLOCK), begin);
        t->exact[g] = t->part[g] = (wpe_range){begin, end}; /* neither falls with g */
        if (begin < end) t->part[g] = (wpe_range){round_down(begin, STEP), round_up(end, STEP)};
    }
}

/* Whether segments that are no runs hide the whole tile: their ranges are disjoint. */
static int NAME(other_segments)(const BLOCK *b, int64_t key) {
    const int64_t *id = b->a->segments;
    if (!id) return 0;
    int64_t end = smaller(key + WPE_KEY_BLOCK, b->a->keys);
    int64_t low = INT64_MAX, high = INT64_MIN, key_low = INT64_MAX, key_high = INT64_MIN;
    for (int64_t i = b->begin; i < b->begin + b->rows; i++) {
        low = smaller(low, id[i]);
        high = larger(high, id[i]);
    }
    for (int64_t j = key; j < end; j++) {
        key_low = smaller(key_low, id[j]);
        key_high = larger(key_high, id[j]);
    }
    return high < key_low || key_high < low;
}
