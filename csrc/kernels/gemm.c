/* gemm.c: the matrix products C = A B of attention and relative_bias.
 *
 * Rows come in groups of GROUP, columns in panels of PANEL. One group times one panel is a tile,
 * whose sums stay in registers. Rows and columns are padded to whole groups and panels, so no
 * product has a tail. Every element is summed over the depth in order, whatever the grouping. A may
 * be read by rows or by columns, so it is never transposed. B lies in panels (panel, depth, PANEL):
 * its element (k, x) is b[x / PANEL * b_panel_stride + k * b_row_stride + x % PANEL]. */

/* A tile has GROUP x 2 vectors of sums. 6 x 2 fill the 16 registers of AVX2. AVX-512 and NEON have
 * 32. EACH_GROUP is DO(rows) for each number of rows of a group. */
#if VECTOR_BYTES == 64 || defined(__aarch64__)
#define GROUP          8
#define EACH_GROUP(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#else
#define GROUP          6
#define EACH_GROUP(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif
#define PANEL (2 * LANES)

/* One tile: C (rows, PANEL) = A B, or C += A B if `add`. With vectors = 1 it is only the first half
 * of these columns. Element (r, k) of A is a[r * a_row_stride + k * a_col_stride]. `rows`,
 * `vectors` and `add` are constants where this is inlined. Requires: rows <= GROUP. */
INLINE void NAME(micro)(REAL *c, int64_t c_row_stride, const REAL *a, int64_t a_row_stride,
                        int64_t a_col_stride, const REAL *b, int64_t b_row_stride, int64_t depth,
                        int rows, int vectors, int add) {
    V sum[GROUP][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sum[r][0] = add ? LOAD_REAL(c + r * c_row_stride, 1, LANES) : (V){0};
        if (vectors == 2)
            sum[r][1] = add ? LOAD_REAL(c + r * c_row_stride + LANES, 1, LANES) : (V){0};
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++, a += a_col_stride, b += b_row_stride) {
        V b0 = LOAD_REAL(b, 1, LANES), b1 = b0;
        if (vectors == 2) b1 = LOAD_REAL(b + LANES, 1, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            REAL x = a[r * a_row_stride];
            sum[r][0] += x * b0;
            if (vectors == 2) sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        STORE_REAL(c + r * c_row_stride, 1, LANES, sum[r][0]);
        if (vectors == 2) STORE_REAL(c + r * c_row_stride + LANES, 1, LANES, sum[r][1]);
    }
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
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, depth, GROUP, 2,
                            1);
            else
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, depth, GROUP, 2,
                            0);
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
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, count, GROUP, 2,
                            1);
            else if (count > 0)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, count, GROUP, 1,
                            1);
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
                NAME(micro)(to, c_row_stride, from, 1, a_row_stride, row, b_row_stride, count,
                            GROUP, 2, 1);
            else if (count > 0)
                NAME(micro)(to, c_row_stride, from, 1, a_row_stride, row, b_row_stride, count,
                            GROUP, 1, 1);
        }
}

/* C (rows, cols) += A B for any number of rows. Panel x of B begins at b + x * b_panel_stride, so B
 * may also be a matrix: then b_panel_stride is PANEL.
 * Requires: cols is a multiple of PANEL. */
static NOINLINE void NAME(gemm_rows)(REAL *c, int64_t c_row_stride, const REAL *a,
                                     int64_t a_row_stride, const REAL *b, int64_t b_panel_stride,
                                     int64_t b_row_stride, int64_t depth, int64_t cols,
                                     int64_t rows) {
    assert(cols % PANEL == 0);
#define TILE_OF(rows)                                                                             \
    case rows:                                                                                    \
        NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, b_row_stride, depth, rows, 2, \
                    1);                                                                           \
        break;
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t r = 0; r < rows; r += GROUP) {
            REAL *to = c + r * c_row_stride + x;
            const REAL *from = a + r * a_row_stride, *panel = b + x / PANEL * b_panel_stride;
            switch (smaller(rows - r, GROUP)) { EACH_GROUP(TILE_OF) }
        }
#undef TILE_OF
}
