/* attention_decode.c: attention of one query, as in generation.
 *
 * Keys and values are read once, where they are. Packing them would cost more than the products. */

#define DECODE_KEYS LANES /* the dot products that are reduced together */

/* Return a vector whose lane k is the sum of the lanes of x[k]. */
INLINE V NAME(sum_each)(V x[DECODE_KEYS]) {
#pragma GCC unroll 8
    for (int count = DECODE_KEYS / 2; count; count /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < count; k++) {
            V a = x[2 * k], b = x[2 * k + 1];
            x[k] = __builtin_shufflevector(a, b, REAL_ORDER(EVENS)) +
                   __builtin_shufflevector(a, b, REAL_ORDER(ODDS));
        }
    return x[0];
}

/* s[j] = x . row j of m, or s[j] += it if `add`, for j in begin..end-1. */
static void NAME(dots)(REAL *s, const REAL *x, wpe_matrix m, int storage, int64_t begin,
                       int64_t end, int64_t d, int add) {
    for (int64_t j = begin; j < end; j += DECODE_KEYS) {
        V sum[DECODE_KEYS] = {0};
        int64_t c = 0;
#define DOT(storage, type)                                                                        \
    case storage: {                                                                               \
        const type *row[DECODE_KEYS]; /* rows past the end repeat the last: not stored */         \
        for (int k = 0; k < DECODE_KEYS; k++)                                                     \
            row[k] = (const type *)m.data + smaller(j + k, end - 1) * m.row_stride;               \
        for (; m.col_stride == 1 && c + LANES <= d; c += LANES) {                                 \
            V factor = LOAD_REAL(x + c, 1, LANES);                                                \
            _Pragma("GCC unroll 16") for (int k = 0; k < DECODE_KEYS; k++) sum[k] +=              \
                factor * PASTE2(load_, type)(row[k] + c, 1, LANES);                               \
        }                                                                                         \
        for (; c < d; c += LANES) {                                                               \
            int lanes = (int)smaller(LANES, d - c);                                               \
            V factor = LOAD_REAL(x + c, 1, lanes);                                                \
            for (int k = 0; k < DECODE_KEYS; k++)                                                 \
                sum[k] +=                                                                         \
                    factor * PASTE2(load_, type)(row[k] + c * m.col_stride, m.col_stride, lanes); \
        }                                                                                         \
        break;                                                                                    \
    }
        switch (storage) { EACH_STORAGE(DOT) }
#undef DOT
        V dots = NAME(sum_each)(sum);
        int lanes = (int)smaller(LANES, end - j);
        if (add) dots += LOAD_REAL(s + j, 1, lanes);
        STORE_REAL(s + j, 1, lanes, dots);
    }
}

/* Add the relative term to the scores s[begin..end-1] of the tile that begins with first_key. Key
 * first_key + j reads the table's row first_key_row - j. */
static void NAME(decode_table)(REAL *s, const wpe_attention *a, const REAL *r, wpe_matrix table,
                               int64_t first_key, int64_t begin, int64_t end) {
    const wpe_relative *p = a->relative;
    int64_t first_key_row = a->offset - p->first_delta - first_key;
    /* the keys that read a row of the table; those before them have a delta past its last row */
    int64_t inside_begin = larger(first_key_row - (p->rows - 1), begin),
            inside_end = smaller(first_key_row + 1, end);
    inside_begin = smaller(inside_begin, end);
    inside_end = larger(inside_end, inside_begin);
    if (inside_begin < inside_end) {
        wpe_matrix falling = {NAME(element)(table, a->storage, first_key_row - inside_begin, 0),
                              -table.row_stride, table.col_stride};
        NAME(dots)(s + inside_begin, r, falling, a->storage, 0, inside_end - inside_begin,
                   a->head_size, 1);
    }
    if (p->beyond != WPE_EDGE) return;
    REAL last_row_score = 0, first_row_score = 0;
    wpe_matrix last = {NAME(element)(table, a->storage, p->rows - 1, 0), 0, table.col_stride};
    NAME(dots)(&last_row_score, r, last, a->storage, 0, 1, a->head_size, 0);
    NAME(dots)(&first_row_score, r, table, a->storage, 0, 1, a->head_size, 0);
    for (int64_t j = begin; j < inside_begin; j++) s[j] += last_row_score;
    for (int64_t j = inside_end; j < end; j++) s[j] += first_row_score;
}

/* out += sum over j in begin..end-1 of weight[j] * row first_key + j of v. Hidden rows are left
 * out: they may hold NaN, and 0 * NaN is NaN. */
static void NAME(decode_values)(REAL *out, const REAL *weight, const wpe_attention *a,
                                int64_t first_key, int64_t begin, int64_t end) {
    for (int64_t x = 0; x < a->value_size; x += BUFFER_SIZE) {
        int64_t cols = smaller(BUFFER_SIZE, a->value_size - x);
        V sum[BUFFER_SIZE / LANES] = {0};
#define ADD(storage, type)                                                                         \
    case storage:                                                                                  \
        for (int64_t j = begin; j < end; j++) {                                                    \
            if (weight[j] == 0 && !unmasked(a, 0, first_key + j)) continue;                        \
            const type *row =                                                                      \
                (const type *)a->v.data + (first_key + j) * a->v.row_stride + x * a->v.col_stride; \
            if (cols == BUFFER_SIZE && a->v.col_stride == 1) {                                     \
                _Pragma("GCC unroll 32") for (int c = 0; c < BUFFER_SIZE / LANES; c++) sum[c] +=   \
                    weight[j] * PASTE2(load_, type)(row + c * LANES, 1, LANES);                    \
            } else {                                                                               \
                for (int64_t c = 0; c < cols; c += LANES)                                          \
                    sum[c / LANES] += weight[j] * PASTE2(load_, type)(                             \
                                                      row + c * a->v.col_stride, a->v.col_stride,  \
                                                      (int)smaller(LANES, cols - c));              \
            }                                                                                      \
        }                                                                                          \
        break;
        switch (a->storage) { EACH_STORAGE(ADD) }
#undef ADD
        for (int64_t c = 0; c < cols; c += LANES) {
            int lanes = (int)smaller(LANES, cols - c);
            STORE_REAL(out + x + c, 1, lanes, LOAD_REAL(out + x + c, 1, lanes) + sum[c / LANES]);
        }
    }
}

/* attention_decode, without the change of mode. */
static NOINLINE void NAME(decode)(const wpe_attention *a, wpe_matrix table, wpe_matrix_out out,
                                  REAL *lse, void *workspace) {
    REAL max = -(REAL)INFINITY, sum = 0, keep[WPE_KEY_BLOCK];
    MEMORY memory = {workspace, 0};
    BLOCK b;
    TILE t;
    NAME(block_memory)(&b, a, WPE_DECODE, &memory);
    REAL *o = NAME(take)(&memory, b.padded_dv);
    NAME(begin_block)(&b, 0, 1);
    memset(o, 0, (size_t)b.padded_dv * sizeof(REAL));
    for (int64_t j = round_down(b.key_range.begin, WPE_KEY_BLOCK); j < b.key_range.end;
         j += WPE_KEY_BLOCK) {
        if (NAME(other_segments)(&b, j)) continue;
        NAME(begin_tile)(&t, &b, j);
        int64_t begin = t.seen_columns[0].begin, end = t.seen_columns[0].end;
        wpe_matrix tile_k = {NAME(element)(a->k, a->storage, j, 0), a->k.row_stride,
                             a->k.col_stride};
        NAME(dots)(t.scores, b.q, tile_k, a->storage, begin, end, a->head_size, 0);
        if (a->relative) NAME(decode_table)(t.scores, a, b.r, table, j, begin, end);
        NAME(load_bias)(&t, &b);
        NAME(adjust_row)(&b, &t, 0);
        REAL factor =
            NAME(softmax_row)(t.scores, t.work_columns[0].begin, t.work_columns[0].end, &max, &sum);
        for (int64_t x = 0; factor != 1 && x < b.padded_dv; x++) o[x] *= factor;
        if (a->drop_below) {
            NAME(keep_row)(keep, a, 0, j, begin, end);
            for (int64_t x = begin; x < end; x++) t.scores[x] *= keep[x];
        }
        NAME(decode_values)(o, t.scores, a, j, begin, end);
    }
    *lse = NAME(finish_row)(o, b.padded_dv, max, sum);
    NAME(store_rows)(out, a->storage, o, 1, a->value_size, b.padded_dv, 1, 0);
}

static void NAME(attention_decode)(const wpe_attention *a, wpe_matrix table, wpe_matrix_out out,
                                   void *lse, void *workspace) {
    check_attention(a);
    assert(a->queries == 1 && (!a->relative || table.data) && is_aligned(workspace, 64));
    FLUSHED(NAME(decode)(a, table, out, lse, workspace));
}
