/* gemm.c: the matrix products of attention, on one tile of registers.
 *
 * Included by variant.c once per real type. Rows come in groups of GROUP, columns in panels of
 * PANEL: what is read in between is padded, so no product sees a tail. Every element is summed over
 * the depth in order, whatever the grouping. A may be read by rows or by columns: no transposing.
 * B element (k, x) of a panel lies at b[k * b_row + x]. */

#define GROUP (VECTOR_BYTES == 64 ? 8 : 6) /* 6 x 2 sums fill AVX2's 16 registers; 8 x 2 of 32 */
#define PANEL (2 * LANES)

/* C (GROUP x PANEL) := or += A B; A element (r, k) lies at a[r * a_row + k * a_col]. */
INLINE void NAME(micro)(REAL *c, int64_t c_row, const REAL *a, int64_t a_row, int64_t a_col,
                        const REAL *b, int64_t b_row, int64_t depth, int add) {
    V sum[GROUP][2];
#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++) {
        sum[r][0] = add ? LOAD_REAL(c + r * c_row, 1, LANES) : (V){0};
        sum[r][1] = add ? LOAD_REAL(c + r * c_row + LANES, 1, LANES) : (V){0};
    }
    for (int64_t k = 0; k < depth; k++, a += a_col, b += b_row) {
        V b0 = LOAD_REAL(b, 1, LANES), b1 = LOAD_REAL(b + LANES, 1, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < GROUP; r++) {
            REAL x = a[r * a_row];
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++) {
        STORE_REAL(c + r * c_row, 1, LANES, sum[r][0]);
        STORE_REAL(c + r * c_row + LANES, 1, LANES, sum[r][1]);
    }
}

/* C += or := A B for the columns in column[g] of each row group g, multiples of PANEL. */
static __attribute__((noinline)) void NAME(gemm_columns)(REAL *c, int64_t c_row, const REAL *a,
                                                         int64_t a_row, const REAL *b,
                                                         int64_t b_row, int64_t b_panel,
                                                         int64_t depth, int64_t groups,
                                                         const wpe_range *column, int add) {
    int64_t begin = column[0].begin, end = column[0].end;
    for (int64_t g = 1; g < groups; g++) {
        begin = column[g].begin < begin ? column[g].begin : begin;
        end = column[g].end > end ? column[g].end : end;
    }
    for (int64_t x = begin; x < end; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            if (x < column[g].begin || x >= column[g].end) continue;
            REAL *to = c + g * GROUP * c_row + x;
            const REAL *from = a + g * GROUP * a_row, *panel = b + x / PANEL * b_panel;
            if (add)
                NAME(micro)(to, c_row, from, a_row, 1, panel, b_row, depth, 1);
            else
                NAME(micro)(to, c_row, from, a_row, 1, panel, b_row, depth, 0);
        }
}

/* C += A B where row group g sums over depth[g] only. */
static __attribute__((noinline)) void NAME(gemm_depth)(REAL *c, int64_t c_row, const REAL *a,
                                                       int64_t a_row, const REAL *b, int64_t b_row,
                                                       int64_t b_panel, int64_t cols,
                                                       int64_t groups, const wpe_range *depth) {
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            if (count > 0)
                NAME(micro)(c + g * GROUP * c_row + x, c_row, a + g * GROUP * a_row + k, a_row, 1,
                            b + x / PANEL * b_panel + k * b_row, b_row, count, 1);
        }
}

/* C += A^T B: row r of C sums a[k * a_row + r] * B[k], over the k of depth[r / GROUP]. */
static __attribute__((noinline)) void NAME(gemm_transposed)(REAL *c, int64_t c_row, const REAL *a,
                                                            int64_t a_row, const REAL *b,
                                                            int64_t b_row, int64_t b_panel,
                                                            int64_t cols, int64_t groups,
                                                            const wpe_range *depth) {
    for (int64_t x = 0; x < cols; x += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = depth[g].begin, count = depth[g].end - k;
            if (count > 0)
                NAME(micro)(c + g * GROUP * c_row + x, c_row, a + k * a_row + g * GROUP, 1, a_row,
                            b + x / PANEL * b_panel + k * b_row, b_row, count, 1);
        }
}
