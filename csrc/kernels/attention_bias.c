/* attention_bias.c: the bias of a tile: one number for each delta, the same for every query.
 *
 * The values of the tile's deltas are first copied into one array, the run, in falling order of
 * delta. Row i, column j of the tile reads element j + BIAS_ORIGIN - i of the run. So a row of
 * scores reads consecutive numbers and needs no bound checks. */

/* Return the delta of the run's first element, for the tile that begins with key `first_key`. */
INLINE int64_t NAME(run_first_delta)(const BLOCK *b, int64_t first_key) {
    return b->begin + b->a->offset - first_key + BIAS_ORIGIN;
}

/* Return the elements of the run that have a value of their own. `delta` is that of element 0. The
 * elements before this range have deltas past the last value, those after it before the first. */
INLINE wpe_range NAME(inside_run)(const wpe_delta_bias *bias, int64_t delta) {
    int64_t first_value = delta - bias->first_delta; /* the element of value 0 */
    int64_t begin = smaller(larger(first_value - (bias->rows - 1), 0), BIAS_RUN_SIZE);
    return (wpe_range){begin, larger(smaller(first_value + 1, BIAS_RUN_SIZE), begin)};
}

/* Fill the tile's run, if there is a bias. */
static void NAME(load_bias)(TILE *t, const BLOCK *b) {
    const wpe_delta_bias *bias = &b->a->bias;
    if (!bias->rows) return;
    const REAL *value = bias->values;
    REAL *run = t->bias;
    int edge = bias->beyond == WPE_EDGE;
    int64_t delta = NAME(run_first_delta)(b, t->first_key), first_value = delta - bias->first_delta;
    wpe_range inside = NAME(inside_run)(bias, delta);
    /* the first element that a row of the block reads */
    int64_t x = WPE_QUERY_BLOCK - b->groups * GROUP;
    for (; x < inside.begin; x++) run[x] = edge ? value[(bias->rows - 1) * bias->stride] : 0;
    for (; x < inside.end; x++) run[x] = value[(first_value - x) * bias->stride];
    for (; x < BIAS_RUN_SIZE; x++) run[x] = edge ? value[0] : 0;
}

/* Add to dbias, for each delta, the sum of the scores' gradient over the tile's pairs with it. */
static void NAME(bias_gradient)(const BLOCK *b, const TILE *t, REAL *dbias) {
    const wpe_delta_bias *bias = &b->a->bias;
    REAL run[BIAS_RUN_SIZE];
    memset(run, 0, sizeof run);
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        const REAL *s = t->scores + i * t->row_stride;
        REAL *to = run + BIAS_ORIGIN - i;
        for (int64_t j = t->work_columns[i / GROUP].begin; j < t->work_columns[i / GROUP].end;
             j += LANES)
            STORE_REAL(to + j, 1, LANES, LOAD_REAL(to + j, 1, LANES) + LOAD_REAL(s + j, 1, LANES));
    }
    int64_t delta = NAME(run_first_delta)(b, t->first_key), first_value = delta - bias->first_delta;
    wpe_range inside = NAME(inside_run)(bias, delta);
    for (int64_t x = inside.begin; x < inside.end; x++) dbias[first_value - x] += run[x];
    if (bias->beyond != WPE_EDGE) return;
    REAL past_last = 0, before_first = 0;
    for (int64_t x = 0; x < inside.begin; x++) past_last += run[x];
    for (int64_t x = inside.end; x < BIAS_RUN_SIZE; x++) before_first += run[x];
    dbias[bias->rows - 1] += past_last;
    dbias[0] += before_first;
}
