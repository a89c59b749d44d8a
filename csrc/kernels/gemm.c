/* gemm.c: the matrix products of attention and relative_bias, on one tile of registers.
 *
 * Rows come in groups of GROUP, columns in panels of PANEL: what is read in between is padded, so
 * no product sees a tail. Every element is summed over the depth in order, whatever the grouping. A
 * may be read by rows or by columns: no transposing. B comes in panels, (panel, depth, PANEL): its
 * element (k, x) lies at b[x / PANEL * b_panel + k * b_row_stride + x % PANEL]. */

#define GROUP (VECTOR_BYTES == 64 ? 8 : 6) /* 6 x 2 sums fill AVX2's 16 registers; 8 x 2 of 32 */
#define PANEL (2 * LANES)

/* C (rows x PANEL) := or += A B; A element (r, k) lies at a[r * a_row_stride + k * a_col_stride].
 * `rows`, at most GROUP, and `add` are constants where this is inlined. */
INLINE void NAME(micro)(REAL *c, int64_t c_row_stride, const REAL *a, int64_t a_row_stride,
                        int64_t a_col_stride, const REAL *b, int64_t b_row_stride, int64_t depth,
                        int rows, int add) {
    V sum[GROUP][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sum[r][0] = add ? LOAD_REAL(c + r * c_row_stride, 1, LANES) : (V){0};
        sum[r][1] = add ? LOAD_REAL(c + r * c_row_stride + LANES, 1, LANES) : (V){0};
    }
    for (int64_t k = 0; k < depth; k++, a += a_col_stride, b += b_row_stride) {
        V b0 = LOAD_REAL(b, 1, LANES), b1 = LOAD_REAL(b + LANES, 1, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            REAL x = a[r * a_row_stride];
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        STORE_REAL(c + r * c_row_stride, 1, LANES, sum[r][0]);
        STORE_REAL(c + r * c_row_stride + LANES, 1, LANES, sum[r][1]);
    }
}

/* Multiplies row group g of A by the columns column[g] of B: C := A B, or C += A B if `add`.
 * Requires: ranges that are not empty begin and end at multiples of PANEL.
 * Writes: these columns of the group's rows of C. */
static NOINLINE void NAME(gemm_columns)(REAL *c, int64_t c_row_stride, const REAL *a,
                                        int64_t a_row_stride, const REAL *b, int64_t b_panel,
                                        int64_t depth, int64_t groups, const wpe_range *column,
                                        int add) {
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t g = 0; g < groups; g++) {
        if (column[g].begin >= column[g].end) continue;
        assert(column[g].begin % PANEL == 0 && column[g].end % PANEL == 0);
        begin = smaller(begin, column[g].begin);
        end = larger(end, column[g].end);
    }
    for (int64_t x = begin; x < end; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            if (x < column[g].begin || x >= column[g].end) continue;
            REAL *to = c + g * GROUP * c_row_stride + x;
            const REAL *from = a + g * GROUP * a_row_stride, *panel = b + x / PANEL * b_panel;
            if (add)
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, depth, GROUP, 1);
            else
                NAME(micro)(to, c_row_stride, from, a_row_stride, 1, panel, PANEL, depth, GROUP, 0);
        }
}

/* C += A B, where row group g of A counts in its columns depth[g] only.
 * Writes: `cols` columns of C, a multiple of PANEL. */
static NOINLINE void NAME(gemm_depth)(REAL *c, int64_t c_row_stride, const REAL *a,
                                      int64_t a_row_stride, const REAL *b, int64_t b_panel,
                                      int64_t cols, int64_t groups, const wpe_range *depth) {
    assert(cols % PANEL == 0);
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            if (count > 0)
                NAME(micro)(c + g * GROUP * c_row_stride + x, c_row_stride,
                            a + g * GROUP * a_row_stride + k, a_row_stride, 1,
                            b + x / PANEL * b_panel + k * PANEL, PANEL, count, GROUP, 1);
        }
}

/* C += A^T B: row r of C sums a[k][r] * B[k] over the k of depth[r / GROUP]. B lies as a matrix of
 * b_row_stride columns.
 * Writes: `cols` columns of C, a multiple of PANEL. */
static NOINLINE void NAME(gemm_transposed)(REAL *c, int64_t c_row_stride, const REAL *a,
                                           int64_t a_row_stride, const REAL *b,
                                           int64_t b_row_stride, int64_t cols, int64_t groups,
                                           const wpe_range *depth) {
    assert(cols % PANEL == 0);
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            if (count > 0)
                NAME(micro)(c + g * GROUP * c_row_stride + x, c_row_stride,
                            a + k * a_row_stride + g * GROUP, 1, a_row_stride,
                            b + k * b_row_stride + x, b_row_stride, count, GROUP, 1);
        }
}
