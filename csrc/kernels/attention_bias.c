/* attention_bias.c: the bias of a tile: one number for each delta, whatever the query.
 *
 * The tile's deltas, in falling order, are one run: row i, column j meets element j + BIAS_ROW - i
 * of it. So a row of scores reads consecutive numbers, and checks no bounds. */

/* The delta of the run's first element. */
INLINE int64_t NAME(first_of_run)(const BLOCK *b, int64_t key) {
    return b->begin + b->a->offset - key + BIAS_ROW;
}

/* The elements of the run that have a value: those before it lie past the last one. */
INLINE wpe_range NAME(run_inside)(const wpe_delta_bias *bias, int64_t delta) {
    int64_t zero = delta - bias->first_delta; /* element of the first value */
    int64_t begin = smaller(larger(zero - (bias->rows - 1), 0), BIAS_RUN);
    return (wpe_range){begin, larger(smaller(zero + 1, BIAS_RUN), begin)};
}

/* Fills the tile's run, if there is a bias. */
static void NAME(load_bias)(TILE *t, const BLOCK *b) {
    const wpe_delta_bias *bias = &b->a->bias;
    if (!bias->rows) return;
    const REAL *value = bias->values;
    REAL *run = t->bias;
    int edge = bias->beyond == WPE_EDGE;
    int64_t delta = NAME(first_of_run)(b, t->first_key), zero = delta - bias->first_delta;
    wpe_range inside = NAME(run_inside)(bias, delta);
    /* the elements that the block's rows meet */
    int64_t x = WPE_QUERY_BLOCK - b->groups * GROUP;
    for (; x < inside.begin; x++) run[x] = edge ? value[(bias->rows - 1) * bias->stride] : 0;
    for (; x < inside.end; x++) run[x] = value[(zero - x) * bias->stride];
    for (; x < BIAS_RUN; x++) run[x] = edge ? value[0] : 0;
}

/* dbias += the sums of the scores' gradient over the tile's pairs of each delta. */
static void NAME(bias_gradient)(const BLOCK *b, const TILE *t, REAL *dbias) {
    const wpe_delta_bias *bias = &b->a->bias;
    REAL run[BIAS_RUN];
    memset(run, 0, sizeof run);
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        const REAL *s = t->s + i * t->row_stride;
        REAL *to = run + BIAS_ROW - i;
        for (int64_t j = t->part[i / GROUP].begin; j < t->part[i / GROUP].end; j += LANES)
            STORE_REAL(to + j, 1, LANES, LOAD_REAL(to + j, 1, LANES) + LOAD_REAL(s + j, 1, LANES));
    }
    int64_t delta = NAME(first_of_run)(b, t->first_key), zero = delta - bias->first_delta;
    wpe_range inside = NAME(run_inside)(bias, delta);
    for (int64_t x = inside.begin; x < inside.end; x++) dbias[zero - x] += run[x];
    if (bias->beyond != WPE_EDGE) return;
    REAL past_last = 0, before_first = 0;
    for (int64_t x = 0; x < inside.begin; x++) past_last += run[x];
    for (int64_t x = inside.end; x < BIAS_RUN; x++) before_first += run[x];
    dbias[bias->rows - 1] += past_last;
    dbias[0] += before_first;
}
