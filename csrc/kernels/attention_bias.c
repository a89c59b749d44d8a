/* attention_bias.c: the bias of a tile: one number for each delta, the same for every query.
 *
 * The values of the tile's deltas are first copied into one array, the strip, in falling order of
 * delta. Row i, column j of the tile reads element j + BIAS_ORIGIN - i of the strip. So a row of
 * scores reads consecutive numbers and needs no bound checks. */

/* Return the delta of the strip's first element, for the tile that begins with key `first_key`. */
INLINE int64_t NAME(strip_first_delta)(const BLOCK *b, int64_t first_key) {
    return b->begin + b->a->offset - first_key + BIAS_ORIGIN;
}

/* Return the elements of the strip that have a value of their own. `delta` is the delta of element
 * 0. Elements before this range have deltas past the last value, elements after it have deltas
 * before the first value. */
INLINE wpe_range NAME(inside_strip)(const wpe_delta_bias *bias, int64_t delta) {
    int64_t first_value = delta - bias->first_delta; /* the element of value 0 */
    int64_t begin = smaller(larger(first_value - (bias->rows - 1), 0), BIAS_STRIP_SIZE);
    return (wpe_range){begin, larger(smaller(first_value + 1, BIAS_STRIP_SIZE), begin)};
}

/* Fill a strip from element x on. `delta` is the delta of element 0. */
static void NAME(fill_strip)(REAL *strip, const wpe_delta_bias *bias, int64_t delta, int64_t x) {
    const REAL *value = bias->values;
    int edge = bias->beyond == WPE_EDGE;
    int64_t first_value = delta - bias->first_delta;
    wpe_range inside = NAME(inside_strip)(bias, delta);
    for (; x < inside.begin; x++) strip[x] = edge ? value[(bias->rows - 1) * bias->stride] : 0;
    for (; x < inside.end; x++) strip[x] = value[(first_value - x) * bias->stride];
    for (; x < BIAS_STRIP_SIZE; x++) strip[x] = edge ? value[0] : 0;
}

/* Fill the tile's strip, if there is a bias. */
static void NAME(load_bias)(TILE *t, const BLOCK *b) {
    /* the first element that a row of the block reads */
    int64_t x = WPE_QUERY_BLOCK - b->groups * GROUP;
    if (b->a->bias.rows)
        NAME(fill_strip)(t->bias, &b->a->bias, NAME(strip_first_delta)(b, t->first_key), x);
}

/* Add to dbias, for each delta, the sum of the scores' gradient over the tile's pairs with it. */
static void NAME(bias_gradient)(const BLOCK *b, const TILE *t, REAL *dbias) {
    const wpe_delta_bias *bias = &b->a->bias;
    REAL strip[BIAS_STRIP_SIZE];
    memset(strip, 0, sizeof strip);
    for (int64_t i = 0; i < b->groups * GROUP; i++) {
        const REAL *s = t->scores + i * t->row_stride;
        REAL *to = strip + BIAS_ORIGIN - i;
        for (int64_t j = t->work_columns[i / GROUP].begin; j < t->work_columns[i / GROUP].end;
             j += LANES)
            STORE_REAL(to + j, 1, LANES, LOAD_REAL(to + j, 1, LANES) + LOAD_REAL(s + j, 1, LANES));
    }
    int64_t delta = NAME(strip_first_delta)(b, t->first_key),
            first_value = delta - bias->first_delta;
    wpe_range inside = NAME(inside_strip)(bias, delta);
    for (int64_t x = inside.begin; x < inside.end; x++) dbias[first_value - x] += strip[x];
    if (bias->beyond != WPE_EDGE) return;
    REAL past_last = 0, before_first = 0;
    for (int64_t x = 0; x < inside.begin; x++) past_last += strip[x];
    for (int64_t x = inside.end; x < BIAS_STRIP_SIZE; x++) before_first += strip[x];
    dbias[bias->rows - 1] += past_last;
    dbias[0] += before_first;
}
