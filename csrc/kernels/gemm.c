/* gemm.c: the matrix products C = A B of attention and relative_bias.
 *
 * Rows come in groups of GROUP, columns in panels of PANEL. One group times one panel is a tile,
 * whose sums stay in registers. Rows and columns are padded to whole groups and panels, so no
 * product has a tail. Every element is summed over the depth in order, whatever the grouping. A may
 * be read by rows or by columns, so it is never transposed. B lies in panels (panel, depth, PANEL):
 * its element (k, x) is b[x / PANEL * b_panel_stride + k * b_row_stride + x % PANEL]. */

/* A tile has GROUP x 2 vectors of sums. 6 x 2 fill the 16 registers of AVX2. AVX-512 and NEON have
 * 32. Fewer rows may have more vectors, up to MOST_SUMS in all. EACH_REST is DO(rows) for each
 * number of rows below GROUP. */
#if VECTOR_BYTES == 64 || defined(__aarch64__)
#define GROUP         8
#define MOST_SUMS     24
#define EACH_REST(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#else
#define GROUP         6
#define MOST_SUMS     12
#define EACH_REST(DO) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif
#define PANEL  (2 * LANES)
#define WIDEST 8 /* the most vectors of a tile's row */

/* One tile: C (rows, vectors * LANES) = A B, or C += A B if `add`. Element (r, k) of A is
 * a[r * a_row_stride + k * a_col_stride]. `rows`, `vectors` and `add` are constants where this is
 * inlined. Requires: rows <= GROUP; vectors <= WIDEST, and its sums fit into the registers. */
INLINE void NAME(micro)(REAL *c, int64_t c_row_stride, const REAL *a, int64_t a_row_stride,
                        int64_t a_col_stride, const REAL *b, int64_t b_panel_stride,
                        int64_t b_row_stride, int64_t depth, int rows, int vectors, int add) {
    V sum[GROUP][WIDEST];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[r][v] = add ? LOAD_REAL(c + r * c_row_stride + v * LANES, 1, LANES) : (V){0};
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++, a += a_col_stride, b += b_row_stride) {
        V y[WIDEST];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            y[v] = LOAD_REAL(b + v / 2 * b_panel_stride + v % 2 * LANES, 1, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            REAL x = a[r * a_row_stride];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[r][v] += x * y[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            STORE_REAL(c + r * c_row_stride + v * LANES, 1, LANES, sum[r][v]);
}

/* Multiply row group g of A by the columns column[g] of B: C = A B, or C += A B if `add`. While a
 * panel of B is multiplied, each row group asks for its share of the next one.
 * Requires: ranges that are not empty begin and end at multiples of PANEL.
 * Writes: columns column[g] of row group g of C. */
static NOINLINE void NAME(gemm_columns)(REAL *c, int64_t c_row_stride, const REAL *a,
                                        int64_t a_row_stride, const REAL *b, int64_t b_panel_stride,
                                        int64_t depth, int64_t groups, const wpe_range *column,
                                        int add) {
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t g = 0; g < groups; g++) {
        if (column[g].begin >= column[g].end) continue;
        assert(column[g].begin % PANEL == 0 && column[g].end % PANEL == 0);
        begin = smaller(begin, column[g].begin);
        end = larger(end, column[g].end);
    }
    const int64_t panel_bytes = depth * PANEL * (int64_t)sizeof(REAL);
    const int64_t share = round_up((panel_bytes + groups - 1) / groups, 64);
    for (int64_t x = begin; x < end; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            if (x < column[g].begin || x >= column[g].end) continue;
            REAL *to = c + g * GROUP * c_row_stride + x;
            const REAL *from = a + g * GROUP * a_row_stride,
                       *panel = b + x / PANEL * b_panel_stride;
            prefetch(panel + b_panel_stride, g * share, smaller((g + 1) * share, panel_bytes));
            if (add)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, PANEL, depth, GROUP,
                            2, 1);
            else
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, PANEL, depth, GROUP,
                            2, 0);
        }
}

/* C += A B. Of row group g of A only the columns depth[g] are used; the others count as zero.
 * Requires: cols is a multiple of LANES.
 * Writes: `cols` columns of C. */
static NOINLINE void NAME(gemm_depth)(REAL *c, int64_t c_row_stride, const REAL *a,
                                      int64_t a_row_stride, const REAL *b, int64_t b_panel_stride,
                                      int64_t cols, int64_t groups, const wpe_range *depth) {
    assert(cols % LANES == 0);
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            REAL *to = c + g * GROUP * c_row_stride + x;
            const REAL *from = a + g * GROUP * a_row_stride + k,
                       *panel = b + x / PANEL * b_panel_stride + k * PANEL;
            if (count > 0 && cols - x >= PANEL)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, PANEL, count, GROUP,
                            2, 1);
            else if (count > 0)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, PANEL, count, GROUP,
                            1, 1);
        }
}

/* C += A^T B. Row r of C adds a[k][r] * B[k] over the rows k of depth[r / GROUP]. Here B is a
 * matrix with row stride b_row_stride, not panels. C is large and used once, so the next rows of it
 * are asked for.
 * Requires: cols is a multiple of LANES.
 * Writes: `cols` columns of C. */
static NOINLINE void NAME(gemm_transposed)(REAL *c, int64_t c_row_stride, const REAL *a,
                                           int64_t a_row_stride, const REAL *b,
                                           int64_t b_row_stride, int64_t cols, int64_t groups,
                                           const wpe_range *depth) {
    assert(cols % LANES == 0);
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            REAL *to = c + g * GROUP * c_row_stride + x;
            const REAL *from = a + k * a_row_stride + g * GROUP, *row = b + k * b_row_stride + x;
#pragma GCC unroll 8
            for (int64_t r = (g + 1) * GROUP; r < (g + 2) * GROUP; r++)
                prefetch(c, (r * c_row_stride + x) * (int64_t)sizeof(REAL),
                         (r * c_row_stride + x + PANEL) * (int64_t)sizeof(REAL));
            if (count > 0 && cols - x >= PANEL)
                NAME(micro)(to, c_row_stride, from, 1, a_row_stride, row, 0, b_row_stride, count,
                            GROUP, 2, 1);
            else if (count > 0)
                NAME(micro)(to, c_row_stride, from, 1, a_row_stride, row, 0, b_row_stride, count,
                            GROUP, 1, 1);
        }
}

/* C (rows, cols) += A B for less than GROUP rows: as many columns at once as the registers hold. So
 * each row of B is read in long pieces, and enough sums run side by side. */
INLINE void NAME(gemm_few)(REAL *c, int64_t c_row_stride, const REAL *a, int64_t a_row_stride,
                           const REAL *b, int64_t b_panel_stride, int64_t b_row_stride,
                           int64_t depth, int64_t cols, int rows) {
    int64_t x = 0;
#define TILES_OF(vectors)                                                                    \
    for (; rows * vectors <= MOST_SUMS && x + vectors * LANES <= cols; x += vectors * LANES) \
        NAME(micro)(c + x, c_row_stride, a, a_row_stride, 1, b + x / PANEL * b_panel_stride, \
                    b_panel_stride, b_row_stride, depth, rows, vectors, 1);
    TILES_OF(8)
    TILES_OF(4)
    TILES_OF(2)
    TILES_OF(1)
#undef TILES_OF
}

/* C (rows, cols) += A B for any number of rows. Panel x of B begins at b + x * b_panel_stride, so B
 * may also be a matrix: then b_panel_stride is PANEL.
 * Requires: cols is a multiple of LANES. */
static NOINLINE void NAME(gemm_rows)(REAL *c, int64_t c_row_stride, const REAL *a,
                                     int64_t a_row_stride, const REAL *b, int64_t b_panel_stride,
                                     int64_t b_row_stride, int64_t depth, int64_t cols,
                                     int64_t rows) {
    assert(cols % LANES == 0);
    int64_t whole = round_down(rows, GROUP);
    for (int64_t x = 0; x < cols && whole; x += PANEL)
        for (int64_t r = 0; r < whole; r += GROUP) {
            REAL *to = c + r * c_row_stride + x;
            const REAL *from = a + r * a_row_stride, *panel = b + x / PANEL * b_panel_stride;
            if (cols - x >= PANEL)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, b_row_stride, depth,
                            GROUP, 2, 1);
            else
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, 0, b_row_stride, depth,
                            GROUP, 1, 1);
        }
    a += whole * a_row_stride;
    c += whole * c_row_stride;
#define REST_OF(rows)                                                                            \
    case rows:                                                                                   \
        NAME(gemm_few)(c, c_row_stride, a, a_row_stride, b, b_panel_stride, b_row_stride, depth, \
                       cols, rows);                                                              \
        break;
    switch (rows - whole) { EACH_REST(REST_OF) }
#undef REST_OF
}

/* ---- dot products ---------------------------------------------------------------------------- */

#define SUM_VECTORS (16 / LANES) /* the vectors that hold a sum of 16 lanes */

/* The rows of B that are multiplied at once. The registers hold their sums. With 16 rows AVX-512
 * would read so many places at once that memory is up to a tenth slower. */
#define DOT_ROWS (8 / SUM_VECTORS)

/* C (rows, LANES) += A B^T, where row l of B begins at b + l * b_row_stride. B is read where it is
 * and not transposed, which pays for few rows of A. An element is summed in 16 lanes. They are
 * added by halves, so wider registers give the same bits.
 * Requires: rows of A are padded with zeros to a multiple of 16. */
static NOINLINE void NAME(gemm_dots)(REAL *c, int64_t c_row_stride, const REAL *a,
                                     int64_t a_row_stride, const REAL *b, int64_t b_row_stride,
                                     int64_t depth, int64_t rows) {
    for (int64_t r = 0; r < rows; r++, a += a_row_stride, c += c_row_stride) {
        V dot[LANES];
#pragma GCC unroll 1
        for (int l = 0; l < LANES; l += DOT_ROWS) {
            V sum[DOT_ROWS][SUM_VECTORS] = {0};
            const REAL *row[DOT_ROWS > 4 ? DOT_ROWS / 4 : 1]; /* each fourth one */
            for (int i = 0; i < DOT_ROWS; i += 4) row[i / 4] = b + (l + i) * b_row_stride;
            int64_t k = 0;
#define ADD_VECTOR(u, lanes)                                                 \
    V x = LOAD_REAL(a + k + u * LANES, 1, LANES);                            \
    _Pragma("GCC unroll 16") for (int i = 0; i < DOT_ROWS; i++) sum[i][u] += \
        x * LOAD_REAL(row[i / 4] + i % 4 * b_row_stride + k + u * LANES, 1, lanes);
            for (; k + 16 <= depth; k += 16)
#pragma GCC unroll 8
                for (int u = 0; u < SUM_VECTORS; u++) {
                    ADD_VECTOR(u, LANES)
                }
#pragma GCC unroll 8
            for (int u = 0; u < SUM_VECTORS; u++) {
                if (k + u * LANES >= depth) continue;
                int lanes = (int)smaller(LANES, depth - k - u * LANES);
                ADD_VECTOR(u, lanes)
            }
#undef ADD_VECTOR
#pragma GCC unroll 16
            for (int i = 0; i < DOT_ROWS; i++) {
#pragma GCC unroll 8
                for (int half = SUM_VECTORS / 2; half; half /= 2)
                    for (int u = 0; u < half; u++) sum[i][u] += sum[i][u + half];
                dot[l + i] = sum[i][0];
            }
        }
        /* Add the lanes of each vector. Lane l of the result belongs to dot[l]. */
#define FOLD_BLOCKS(s)                                                                \
    _Pragma("GCC unroll 8") for (int i = 0; i < s && s < LANES; i++) dot[i] =         \
        __builtin_shufflevector(dot[i], dot[i + s], REAL_ORDER(EXCHANGE)(LOWER, s)) + \
        __builtin_shufflevector(dot[i], dot[i + s], REAL_ORDER(EXCHANGE)(UPPER, s));
        FOLD_BLOCKS(8)
        FOLD_BLOCKS(4)
        FOLD_BLOCKS(2)
        FOLD_BLOCKS(1)
#undef FOLD_BLOCKS
        STORE_REAL(c, 1, LANES, LOAD_REAL(c, 1, LANES) + dot[0]);
    }
}
