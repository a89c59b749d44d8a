/* attention_seen.c: attention's products beside what is not finite: over the pairs that see each
 * other, one by one. In a product of matrices the weight 0 of a hidden pair would meet NaN or Inf,
 * and give NaN. */

#define EACH_SEEN_PAIR(i, j)                                                       \
    for (int64_t i = 0; i < b->rows; i++)                                          \
        for (int64_t j = larger(b->seen[i].begin, t->first_key),                   \
                     end_ = smaller(b->seen[i].end, t->first_key + WPE_KEY_BLOCK); \
             j < end_; j++)                                                        \
            if (unmasked(b->a, b->begin + i, j))

/* C[i] += sum of weight[i][j] * row j of the panels */
static void NAME(accumulate_seen)(REAL *c, int64_t c_row_stride, const BLOCK *b, const TILE *t,
                                  const REAL *rows, int64_t panel, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL weight = t->s[i * t->row_stride + j - t->first_key];
        for (int64_t x = 0; x < cols; x++)
            c[i * c_row_stride + x] += weight * rows[x / PANEL * panel + j * PANEL + x % PANEL];
    }
}

/* C[j] += sum of weight[i][j] * row i */
static void NAME(accumulate_seen_keys)(REAL *c, const BLOCK *b, const TILE *t, const REAL *weight,
                                       int64_t weight_row_stride, const REAL *rows, int64_t cols) {
    EACH_SEEN_PAIR(i, j) {
        REAL factor = weight[i * weight_row_stride + j - t->first_key];
        for (int64_t x = 0; x < cols; x++) c[j * cols + x] += factor * rows[i * cols + x];
    }
}

/* Clears the weights and gradients of hidden pairs, which are NaN beside what is not finite. */
static void NAME(clear_hidden)(const BLOCK *b, const TILE *t, REAL *weights) {
    for (int64_t i = 0; i < b->groups * GROUP; i++)
        for (int64_t j = t->part[i / GROUP].begin; j < t->part[i / GROUP].end; j++) {
            int64_t key = t->first_key + j;
            if (key < b->seen[i].begin || key >= b->seen[i].end ||
                !unmasked(b->a, b->begin + i, key))
                t->s[i * t->row_stride + j] = weights[i * WPE_KEY_BLOCK + j] = 0;
        }
}

/* ---- rows of the table ---- */

/* Whether query i sees a key that meets column x of the band's memory: with beyond=edge the first
 * and the last column stand for all keys past them. */
static int NAME(meets)(const BLOCK *b, int64_t i, int64_t x) {
    int edge = b->a->relative->beyond == WPE_EDGE;
    int64_t begin = x - b->origin + i, end = begin + 1;
    if (edge && x == b->column) begin = b->seen[i].begin;
    if (edge && x == b->column + b->cols - 1) end = b->seen[i].end;
    begin = larger(begin, b->seen[i].begin);
    end = smaller(end, b->seen[i].end);
    for (int64_t j = begin; j < end; j++)
        if (unmasked(b->a, b->begin + i, j)) return 1;
    return 0;
}

/* Columns begin..end-1 of the band's memory, a zone's rows from row `zone_row` on: dr[i] += sum of
 * dT[i][x] * the row of x; by way of `projected`, for a zone of low rank. */
static void NAME(accumulate_met)(REAL *dr, const BLOCK *b, const wpe_zone *zone, int64_t zone_row,
                                 int64_t begin, int64_t end) {
    const REAL *rows = zone->gradient, *transposed = zone->transposed_basis;
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *sum = zone->basis ? b->projected : dr + i * b->padded_d;
        int met = 0;
        if (zone->basis) memset(sum, 0, (size_t)round_up(zone->rank, PANEL) * sizeof(REAL));
        for (int64_t x = begin; x < end; x++) {
            if (!NAME(meets)(b, i, x)) continue;
            REAL factor = b->table[i * b->table_row_stride + x];
            int64_t row = zone_row + x - begin;
            met = 1;
            for (int64_t k = 0; k < zone->rank; k++)
                sum[k] += factor * rows[(k / PANEL * zone->rows + row) * PANEL + k % PANEL];
        }
        if (!met || !zone->basis) continue;
        for (int64_t k = 0; k < zone->rank; k++)
            for (int64_t c = 0; c < b->a->head_size; c++)
                dr[i * b->padded_d + c] +=
                    sum[k] * transposed[(c / PANEL * zone->rank + k) * PANEL + c % PANEL];
    }
}

/* dp[x] += sum of dT[i][x] * r_i, for a query, or its gradient, that is not finite. */
static void NAME(accumulate_met_rows)(REAL *dp, const BLOCK *b) {
    for (int64_t i = 0; i < b->rows; i++)
        for (int64_t x = b->column; x < b->column + b->cols; x++) {
            if (!NAME(meets)(b, i, x)) continue;
            REAL factor = b->table[i * b->table_row_stride + x];
            REAL *to = dp + (b->first_column + x - b->column) * b->padded_d;
            for (int64_t k = 0; k < b->padded_d; k++) to[k] += factor * b->r[i * b->padded_d + k];
        }
}
