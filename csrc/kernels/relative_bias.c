/* relative_bias.c: out[i][j] = q[i] . p[i + shift - j], the query-dependent relative term [W][S].
 *
 * Included by variant.c once per real type. A matrix product T = q p^T whose rows are stored
 * shifted: with the table's rows reversed, row i of T is row i of out from column i + shift -
 * (rows - 1) on. So a tile is computed in registers and stored where it belongs: no T in memory,
 * no gather. Each element sums over the head size in order, whatever the tiling. */

#define TILE_ROWS  6 /* 6 x 2 vectors of sums fill the 16 registers of AVX2 */
#define TILE_COLS  (2 * LANES)
#define BLOCK_ROWS 48 /* rows for which a panel of the table is used while it is in cache */

static int64_t NAME(packed_size)(int64_t rows, int64_t head_size) {
    return (rows + TILE_COLS - 1) / TILE_COLS * TILE_COLS * head_size;
}

/* packed: panels of TILE_COLS reversed table rows, (panel, head_size, TILE_COLS), zero-filled. */
static void NAME(pack_table)(void *packed, const void *p, int64_t rows, int64_t head_size,
                             int64_t row_stride, int64_t col_stride) {
    REAL *dst = packed;
    const REAL *src = p;
    for (int64_t c = 0; c < rows; c += TILE_COLS)
        for (int64_t k = 0; k < head_size; k++)
            for (int64_t x = c; x < c + TILE_COLS; x++)
                *dst++ = x < rows ? src[(rows - 1 - x) * row_stride + k * col_stride] : 0;
}

/* tile[r][x] = q_row[r] . panel column x */
INLINE void NAME(tile)(REAL tile[TILE_ROWS][TILE_COLS], const REAL *q_row[TILE_ROWS], int64_t q_col,
                       const REAL *panel, int64_t head_size) {
    V acc[TILE_ROWS][2] = {0};
    for (int64_t k = 0; k < head_size; k++, panel += TILE_COLS) {
        V b0 = LOAD_REAL(panel, 1, LANES), b1 = LOAD_REAL(panel + LANES, 1, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; r++) {
            REAL a = q_row[r][k * q_col];
            acc[r][0] += a * b0;
            acc[r][1] += a * b1;
        }
    }
    memcpy(tile, acc, sizeof acc);
}

/* Row i's columns [begin, end) := value */
INLINE void NAME(fill)(REAL *row, int64_t col, int64_t begin, int64_t end, REAL value) {
    for (int64_t j = begin; j < end; j++) row[j * col] = value;
}

/* What stands left of the table (distances past its last row) and right of it. */
static void NAME(fill_outside)(REAL *out, const REAL *q, const REAL *packed,
                               const wpe_bias_shape *s, int64_t i) {
    REAL *row = out + i * s->out_row;
    int64_t begin = i + s->shift - (s->rows - 1), end = i + s->shift + 1; /* the table's columns */
    begin = begin < 0 ? 0 : begin > s->keys ? s->keys : begin;
    end = end < begin ? begin : end > s->keys ? s->keys : end;
    REAL farthest = 0, nearest = 0; /* q . last row, q . first row */
    if (s->beyond == WPE_EDGE) {
        int64_t last = s->rows - 1, panel = last / TILE_COLS * TILE_COLS * s->head_size;
        for (int64_t k = 0; k < s->head_size; k++) {
            REAL a = q[i * s->q_row + k * s->q_col];
            farthest += a * packed[k * TILE_COLS];
            nearest += a * packed[panel + k * TILE_COLS + last % TILE_COLS];
        }
    }
    NAME(fill)(row, s->out_col, 0, begin, farthest);
    NAME(fill)(row, s->out_col, end, s->keys, nearest);
}

/* Stores tile columns that fall on keys 0..keys-1; column x of row i belongs to key first_key + x.
 */
INLINE void NAME(store_row)(REAL *row, int64_t col, const REAL *tile, int64_t first_key,
                            int64_t count, int64_t keys) {
    int64_t x = first_key < 0 ? -first_key : 0;
    int64_t end = keys - first_key < count ? keys - first_key : count;
    REAL *dst = row + first_key * col;
    if (col == 1 && x == 0 && end == TILE_COLS)
        memcpy(dst, tile, TILE_COLS * sizeof(REAL));
    else
        for (; x < end; x++) dst[x * col] = tile[x];
}

static void NAME(relative_bias)(void *out_, const void *q_, const void *packed_,
                                const wpe_bias_shape *s, int64_t begin, int64_t end) {
    REAL *out = out_;
    const REAL *q = q_, *packed = packed_;
    for (int64_t i0 = begin; i0 < end; i0 += BLOCK_ROWS) {
        int64_t i1 = i0 + BLOCK_ROWS < end ? i0 + BLOCK_ROWS : end;
        for (int64_t c = 0; c < s->rows; c += TILE_COLS) {
            int64_t count = s->rows - c < TILE_COLS ? s->rows - c : TILE_COLS;
            int64_t key = s->shift - (s->rows - 1) + c; /* of row 0, this panel's first column */
            for (int64_t i = i0; i < i1; i += TILE_ROWS) {
                int64_t rows = i1 - i < TILE_ROWS ? i1 - i : TILE_ROWS;
                if (i + rows - 1 + key + count <= 0 || i + key >= s->keys) continue;
                const REAL *q_row[TILE_ROWS]; /* rows past the end repeat the last: not stored */
                for (int r = 0; r < TILE_ROWS; r++)
                    q_row[r] = q + (i + (r < rows ? r : rows - 1)) * s->q_row;
                REAL tile[TILE_ROWS][TILE_COLS];
                NAME(tile)(tile, q_row, s->q_col, packed + c * s->head_size, s->head_size);
                for (int64_t r = 0; r < rows; r++)
                    NAME(store_row)(out + (i + r) * s->out_row, s->out_col, tile[r], i + r + key,
                                    count, s->keys);
            }
        }
        for (int64_t i = i0; i < i1; i++) NAME(fill_outside)(out, q, packed, s, i);
    }
}

/* out[i][j] = t[i][i + shift - j] */
static void NAME(skew)(void *skewed, const void *t, const wpe_skew_shape *s) {
    for (int64_t i = 0; i < s->queries; i++) {
        REAL *row = (REAL *)skewed + i * s->skewed_row;
        const REAL *t_row = (const REAL *)t + i * s->t_row;
        for (int64_t j = 0; j < s->keys; j++) {
            int64_t c = i + s->shift - j;
            int inside = c >= 0 && c < s->rows;
            if (s->beyond == WPE_EDGE) c = c < 0 ? 0 : c >= s->rows ? s->rows - 1 : c;
            row[j * s->skewed_col] = inside || s->beyond == WPE_EDGE ? t_row[c * s->t_col] : 0;
        }
    }
}

/* The transpose of skew: t[i][c] = sum of skewed[i][j] over the keys j that read t[i][c]. */
static void NAME(unskew)(void *t, const void *skewed, const wpe_skew_shape *s) {
    for (int64_t i = 0; i < s->queries; i++) {
        const REAL *row = (const REAL *)skewed + i * s->skewed_row;
        REAL *t_row = (REAL *)t + i * s->t_row;
        for (int64_t c = 0; c < s->rows; c++) {
            int64_t j = i + s->shift - c;
            t_row[c * s->t_col] = j >= 0 && j < s->keys ? row[j * s->skewed_col] : 0;
        }
        if (s->beyond != WPE_EDGE || s->rows == 0) continue;
        for (int64_t j = i + s->shift + 1 > 0 ? i + s->shift + 1 : 0; j < s->keys; j++)
            t_row[0] += row[j * s->skewed_col];      /* c < 0 */
        int64_t past = i + s->shift - (s->rows - 1); /* keys j < past have c > rows - 1 */
        for (int64_t j = 0; j < past && j < s->keys; j++)
            t_row[(s->rows - 1) * s->t_col] += row[j * s->skewed_col];
    }
}

#undef TILE_ROWS
#undef TILE_COLS
#undef BLOCK_ROWS
