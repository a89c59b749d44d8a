/* attention_nonfinite.c: attention's products where an input holds NaN or Inf.
 *
 * A hidden pair of query and key has weight 0. In a matrix product this 0 times NaN or Inf would
 * give NaN. So these functions visit only the pairs that are seen, one by one. */

#define EACH_SEEN_PAIR(i, j)                                                       \
    for (int64_t i = 0; i < b->rows; i++)                                          \
        for (int64_t j = larger(b->seen[i].begin, t->first_key),                   \
                     end_ = smaller(b->seen[i].end, t->first_key + WPE_KEY_BLOCK); \
             j < end_; j++)                                                        \
            if (unmasked(b->a, b->begin + i, j))

/* C[i] += sum over seen keys j of weight[i][j] * row j of the panels. */
static void NAME(accumulate_seen)(REAL *c, int64_t c_row_stride, const BLOCK *b, const TILE *t,
                                  const REAL *rows, int64_t panel_stride, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL weight = t->scores[i * t->row_stride + j - t->first_key];
        for (int64_t x = 0; x < cols; x++)
            c[i * c_row_stride + x] +=
                weight * rows[x / PANEL * panel_stride + j * PANEL + x % PANEL];
    }
}

/* C[j] += sum over queries i that see j of weight[i][j] * row i. */
static void NAME(accumulate_seen_keys)(REAL *c, const BLOCK *b, const TILE *t, const REAL *weight,
                                       int64_t weight_row_stride, const REAL *rows, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL factor = weight[i * weight_row_stride + j - t->first_key];
        for (int64_t x = 0; x < cols; x++) c[j * cols + x] += factor * rows[i * cols + x];
    }
}

/* Set the weights and gradients of hidden pairs to 0. They may be NaN here. */
static void NAME(clear_hidden)(const BLOCK *b, const TILE *t, REAL *weights) {
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->work_columns[i / GROUP].begin; j < t->work_columns[i / GROUP].end;
             j++) {
            int64_t key = t->first_key + j;
            if (key < b->seen[i].begin || key >= b->seen[i].end ||
                !unmasked(b->a, b->begin + i, key))
                t->scores[i * t->row_stride + j] = weights[i * WPE_KEY_BLOCK + j] = 0;
        }
}

/* ---- gradients of the table's rows --------------------------------------------------------- */

/* Return whether query i sees a key that reads memory column x of the band. All keys past
 * the table's last row also read the band's first column, those before its first row the last. */
static int NAME(sees_column)(const BLOCK *b, int64_t i, int64_t x) {
    int64_t begin = x - b->origin + i, end = begin + 1;
    if (b->past_last && x == b->band_start) begin = b->seen[i].begin;
    if (b->before_first && x == b->band_start + b->band_width - 1) end = b->seen[i].end;
    begin = larger(begin, b->seen[i].begin);
    end = smaller(end, b->seen[i].end);
    for (int64_t j = begin; j < end; j++)
        if (unmasked(b->a, b->begin + i, j)) return 1;
    return 0;
}

/* dr[i] += sum of dT[i][x] * p[x] over the memory columns x in begin..end-1 that query i reads.
 * Column begin is row `zone_row` of the zone. A zone with a basis sums its coefficients first, into
 * `projected`, and then multiplies by the basis. */
static void NAME(seen_gradient_r)(REAL *dr, const BLOCK *b, const wpe_zone *zone, int64_t zone_row,
                                  int64_t begin, int64_t end) {
    const REAL *rows = zone->coefficients, *transposed = zone->basis_t;
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *sum = zone->basis ? b->projected : dr + i * b->padded_r;
        int any_seen = 0;
        if (zone->basis) memset(sum, 0, (size_t)round_up(zone->rank, PANEL) * sizeof(REAL));
        for (int64_t x = begin; x < end; x++) {
            if (!NAME(sees_column)(b, i, x)) continue;
            REAL factor = b->table[i * b->table_row_stride + x];
            int64_t row = zone_row + x - begin;
            any_seen = 1;
            for (int64_t k = 0; k < zone->rank; k++)
                sum[k] += factor * rows[(k / PANEL * zone->rows + row) * PANEL + k % PANEL];
        }
        if (!any_seen || !zone->basis) continue;
        for (int64_t k = 0; k < zone->rank; k++)
            for (int64_t c = 0; c < b->a->table_size; c++)
                dr[i * b->padded_r + c] +=
                    sum[k] * transposed[(c / PANEL * zone->rank + k) * PANEL + c % PANEL];
    }
}

/* dp[x] += sum of dT[i][x] * r_i over the queries i that read memory column x of the band. */
static void NAME(seen_gradient_p)(REAL *dp, const BLOCK *b) {
    for (int64_t i = 0; i < b->rows; i++)
        for (int64_t x = b->band_start; x < b->band_start + b->band_width; x++) {
            if (!NAME(sees_column)(b, i, x)) continue;
            REAL factor = b->table[i * b->table_row_stride + x];
            REAL *to = dp + (b->first_column + x - b->band_start) * b->padded_r;
            for (int64_t k = 0; k < b->padded_r; k++) to[k] += factor * b->r[i * b->padded_r + k];
        }
}
