/* relative_bias.c: out[i][j] = q[i] . p[i + shift - j], the query-dependent relative term [W][S].
 *
 * It is a matrix product T = q p^T whose rows are stored shifted. With the table's rows reversed,
 * row i of T is row i of out, from column i + shift - (rows - 1) on. So each tile of T is computed
 * in registers and stored in its place in out. T is never stored, and nothing is gathered. Each
 * element sums over the head size in order, whatever the tiling. The product and the packing are
 * attention's (gemm.c, attention_pack.c). */

static int64_t NAME(packed_size)(int64_t rows, int64_t head_size) {
    return round_up(rows, PANEL) * head_size;
}

static NOINLINE void NAME(pack_reversed)(REAL *packed, wpe_matrix p, int64_t rows,
                                         int64_t head_size) {
    NAME(pack_columns)(packed, NAME(reversed)(p, REAL_STORAGE, rows), REAL_STORAGE, 0, rows,
                       round_up(rows, PANEL), head_size);
}

static void NAME(pack_table)(void *packed, const void *p, int64_t rows, int64_t head_size,
                             int64_t row_stride, int64_t col_stride) {
    assert(rows >= 0 && head_size >= 0 && is_aligned(packed, 64));
    if (rows == 0 || head_size == 0) return;
    FLUSHED(NAME(pack_reversed)(packed, (wpe_matrix){p, row_stride, col_stride}, rows, head_size));
}

/* Set columns begin..end-1 of a row to value. */
INLINE void NAME(fill)(REAL *row, int64_t col_stride, int64_t begin, int64_t end, REAL value) {
    for (int64_t j = begin; j < end; j++) row[j * col_stride] = value;
}

/* Fill the keys of row i whose delta lies outside the table: on the left those past its last row,
 * on the right those before its first row. */
static void NAME(fill_outside)(REAL *out, const REAL *q, const REAL *packed,
                               const wpe_bias_shape *s, int64_t i) {
    REAL *row = out + i * s->out_row_stride;
    /* the keys inside the table */
    int64_t begin = i + s->shift - (s->rows - 1), end = i + s->shift + 1;
    begin = begin < 0 ? 0 : begin > s->keys ? s->keys : begin;
    end = end < begin ? begin : end > s->keys ? s->keys : end;
    REAL last_row_score = 0, first_row_score = 0; /* q[i] . p of the table's last and first row */
    if (s->beyond == WPE_EDGE) {
        int64_t last = s->rows - 1, panel = last / PANEL * PANEL * s->head_size;
        for (int64_t k = 0; k < s->head_size; k++) {
            REAL a = q[i * s->q_row_stride + k * s->q_col_stride];
            last_row_score += a * packed[k * PANEL];
            first_row_score += a * packed[panel + k * PANEL + last % PANEL];
        }
    }
    NAME(fill)(row, s->out_col_stride, 0, begin, last_row_score);
    NAME(fill)(row, s->out_col_stride, end, s->keys, first_row_score);
}

/* Store the columns 0..count-1 of a tile's row that lie on keys 0..keys-1. Column x belongs to key
 * first_key + x. */
INLINE void NAME(store_row)(REAL *row, int64_t col_stride, const REAL *tile, int64_t first_key,
                            int64_t count, int64_t keys) {
    int64_t x = first_key < 0 ? -first_key : 0;
    int64_t end = keys - first_key < count ? keys - first_key : count;
    REAL *dst = row + first_key * col_stride;
    if (col_stride == 1 && x == 0 && end == PANEL)
        memcpy(dst, tile, PANEL * sizeof(REAL));
    else
        for (; x < end; x++) dst[x * col_stride] = tile[x];
}

/* Compute and store queries i..i+rows-1 times one panel of the table. Column 0 of the panel belongs
 * to key `first_key` of query 0, and to key first_key + i of query i. `rows` is GROUP or 1. It is a
 * constant where this is inlined. */
INLINE void NAME(bias_tile)(REAL *out, const REAL *q, const REAL *panel, const wpe_bias_shape *s,
                            int64_t i, int rows, int64_t first_key, int64_t count) {
    REAL tile[GROUP * PANEL];
    if (i + rows - 1 + first_key + count <= 0 || i + first_key >= s->keys) return;
    NAME(micro)(tile, PANEL, q + i * s->q_row_stride, s->q_row_stride, s->q_col_stride, panel, 0,
                PANEL, s->head_size, rows, 2, 0);
    for (int r = 0; r < rows; r++)
        NAME(store_row)(out + (i + r) * s->out_row_stride, s->out_col_stride, tile + r * PANEL,
                        i + r + first_key, count, s->keys);
}

static NOINLINE void NAME(bias_rows)(REAL *out, const REAL *q, const REAL *packed,
                                     const wpe_bias_shape *s, int64_t begin, int64_t end) {
    for (int64_t i0 = begin; i0 < end; i0 += WPE_BIAS_BLOCK) {
        int64_t i1 = smaller(i0 + WPE_BIAS_BLOCK, end);
        for (int64_t c = 0; c < s->rows; c += PANEL) {
            int64_t count = smaller(PANEL, s->rows - c), first_key = s->shift - (s->rows - 1) + c;
            const REAL *panel = packed + c * s->head_size;
            int64_t i = i0;
            for (; i + GROUP <= i1; i += GROUP)
                NAME(bias_tile)(out, q, panel, s, i, GROUP, first_key, count);
            for (; i < i1; i++) NAME(bias_tile)(out, q, panel, s, i, 1, first_key, count);
        }
        for (int64_t i = i0; i < i1; i++) NAME(fill_outside)(out, q, packed, s, i);
    }
}

static void NAME(relative_bias)(void *out, const void *q, const void *packed,
                                const wpe_bias_shape *s, int64_t begin, int64_t end) {
    assert(begin >= 0 && begin <= end && end <= s->queries && s->keys >= 0 && s->head_size >= 0);
    assert(s->rows > 0 || (s->rows == 0 && s->beyond == WPE_ZERO));
    assert(is_aligned(packed, 64));
    if (s->keys == 0) return; /* such rows may be too many to count */
    FLUSHED(NAME(bias_rows)(out, q, packed, s, begin, end));
}

/* skewed[i][j] = t[i][i + shift - j] */
static void NAME(skew)(void *skewed, const void *t, const wpe_skew_shape *s) {
    assert(s->queries >= 0 && s->keys >= 0);
    assert(s->rows > 0 || (s->rows == 0 && s->beyond == WPE_ZERO));
    if (s->keys == 0) return;
    for (int64_t i = 0; i < s->queries; i++) {
        REAL *row = (REAL *)skewed + i * s->skewed_row_stride;
        const REAL *t_row = (const REAL *)t + i * s->t_row_stride;
        for (int64_t j = 0; j < s->keys; j++) {
            int64_t c = i + s->shift - j;
            int inside = c >= 0 && c < s->rows;
            if (s->beyond == WPE_EDGE) c = c < 0 ? 0 : c >= s->rows ? s->rows - 1 : c;
            row[j * s->skewed_col_stride] =
                inside || s->beyond == WPE_EDGE ? t_row[c * s->t_col_stride] : 0;
        }
    }
}

/* The transpose of skew: t[i][c] is the sum of skewed[i][j] over the keys j that read t[i][c]. */
static void NAME(unskew)(void *t, const void *skewed, const wpe_skew_shape *s) {
    assert(s->queries >= 0 && s->keys >= 0);
    assert(s->rows > 0 || (s->rows == 0 && s->beyond == WPE_ZERO));
    if (s->rows == 0) return;
    for (int64_t i = 0; i < s->queries; i++) {
        const REAL *row = (const REAL *)skewed + i * s->skewed_row_stride;
        REAL *t_row = (REAL *)t + i * s->t_row_stride;
        for (int64_t c = 0; c < s->rows; c++) {
            int64_t j = i + s->shift - c;
            t_row[c * s->t_col_stride] = j >= 0 && j < s->keys ? row[j * s->skewed_col_stride] : 0;
        }
        if (s->beyond != WPE_EDGE) continue;
        for (int64_t j = i + s->shift + 1 > 0 ? i + s->shift + 1 : 0; j < s->keys; j++)
            t_row[0] += row[j * s->skewed_col_stride]; /* keys with c < 0 */
        int64_t past = i + s->shift - (s->rows - 1);   /* keys j < past have c > rows - 1 */
        for (int64_t j = 0; j < past && j < s->keys; j++)
            t_row[(s->rows - 1) * s->t_col_stride] += row[j * s->skewed_col_stride];
    }
}
