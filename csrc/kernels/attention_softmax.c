/* attention_softmax.c: what is done to each score of a tile, forward and backward.
 *
 * Sums run in 16 fixed lanes, whatever the vector's width, over columns that begin at a multiple of
 * 16: so wider registers give the same bits. */

#define SUMS (16 / LANES)

INLINE REAL NAME(sum_lanes)(const V sums[SUMS]) {
    REAL lane[16];
    memcpy(lane, sums, sizeof lane);
    for (int width = 8; width; width /= 2)
        for (int l = 0; l < width; l++) lane[l] += lane[l + width];
    return lane[0];
}

INLINE REAL NAME(exp_one)(REAL x) { return EXP(SPLAT(x))[0]; }

/* The keep factors of dropout for keys key + [begin, end): 0 or keep_scale. */
static void NAME(keep_row)(REAL *keep, const wpe_attention *a, int64_t i, int64_t key,
                           int64_t begin, int64_t end) {
    uint64_t z = a->seed + 0x9E3779B97F4A7C15u * (a->drop_row + (uint64_t)i + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u; /* splitmix64 */
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    uint32_t low = (uint32_t)z, high = (uint32_t)(z >> 32);
    uint32_t all = a->drop_below >> 32 != 0, below = (uint32_t)a->drop_below;
    REAL scale = (REAL)a->keep_scale;
    for (int64_t j = begin; j < end; j++) {
        uint32_t x = (uint32_t)(key + j) * 0x9E3779B9u + low;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15 ^ high) * 0x846ca68bu;
        x ^= x >> 16;
        keep[j] = x >= below && !all ? scale : 0;
    }
}

/* Scores of a tile become what softmax sees: slope, bias and softcap applied, -inf where hidden. */
static void NAME(adjust_row)(const BLOCK *b, const TILE *t, int64_t row) {
    const wpe_attention *a = b->a;
    REAL *s = t->s + row * t->row_stride;
    int64_t begin = t->part[row / GROUP].begin, end = t->part[row / GROUP].end;
    int64_t i = b->begin + row;
    if (a->slope != 0) {
        V lane, slope = SPLAT((REAL)a->slope);
        for (int l = 0; l < LANES; l++) lane[l] = (REAL)l;
        for (int64_t j = begin; j < end; j += 16) { /* far away delta rounds: at the same keys */
            REAL delta = (REAL)(i + a->offset - t->first_key - j);
            for (int u = 0; u < SUMS; u++) {
                V by_lane = ABS(delta - (lane + (REAL)(u * LANES)));
                REAL *at = s + j + u * LANES;
                STORE_REAL(at, 1, LANES, LOAD_REAL(at, 1, LANES) - slope * by_lane);
            }
        }
    }
    if (a->bias.rows) {
        const REAL *bias = t->bias + BIAS_ROW - row;
        for (int64_t j = begin; j < end; j += LANES)
            STORE_REAL(s + j, 1, LANES, LOAD_REAL(s + j, 1, LANES) + LOAD_REAL(bias + j, 1, LANES));
    }
    if (a->softcap != 0) {
        REAL cap = (REAL)a->softcap;
        for (int64_t j = begin; j < end; j += LANES)
            STORE_REAL(s + j, 1, LANES, cap * TANH(LOAD_REAL(s + j, 1, LANES) / cap));
    }
    int64_t first = smaller(larger(b->seen[row].begin - t->first_key, begin), end);
    int64_t last = larger(smaller(b->seen[row].end - t->first_key, end), first);
    for (int64_t j = begin; j < first; j++) s[j] = -(REAL)INFINITY;
    for (int64_t j = last; j < end; j++) s[j] = -(REAL)INFINITY;
    if (a->segments && first < last) { /* a padding row has no segment */
        const int64_t *id = a->segments + t->first_key, mine = a->segments[i];
        for (int64_t j = first; j < last; j++) s[j] = id[j] == mine ? s[j] : -(REAL)INFINITY;
    }
    if (a->key_mask) {
        const uint8_t *seen = a->key_mask + t->first_key * a->key_mask_stride;
        for (int64_t j = first; j < last; j++)
            s[j] = seen[j * a->key_mask_stride] ? s[j] : -(REAL)INFINITY;
    }
    if (a->mask) {
        const uint8_t *seen = a->mask + i * a->mask_row_stride + t->first_key * a->mask_col_stride;
        for (int64_t j = first; j < last; j++)
            s[j] = seen[j * a->mask_col_stride] ? s[j] : -(REAL)INFINITY;
    }
}

static REAL NAME(row_max)(const REAL *s, int64_t begin, int64_t end) {
    V most = SPLAT(-(REAL)INFINITY);
    for (int64_t j = begin; j < end; j += LANES) most = MAX(LOAD_REAL(s + j, 1, LANES), most);
    REAL max = most[0];
    for (int l = 1; l < LANES; l++) max = most[l] > max ? most[l] : max;
    if (max > -(REAL)INFINITY) return max;
    for (int64_t j = begin; j < end; j++) /* nothing seen, or a NaN, which comparisons drop */
        if (s[j] != s[j]) return s[j];
    return max;
}

/* Scores become weights exp(s - max), the running max and sum those of the row so far; returns the
 * factor for what was summed with the old max. */
static REAL NAME(softmax_row)(REAL *s, int64_t begin, int64_t end, REAL *max, REAL *sum) {
    REAL of_tile = NAME(row_max)(s, begin, end), old = *max;
    REAL new_max = of_tile > old || of_tile != of_tile ? of_tile : old;
    if (new_max == -(REAL)INFINITY) {
        memset(s + begin, 0, (size_t)(end - begin) * sizeof(REAL));
        return 1;
    }
    V sums[SUMS] = {0};
    for (int64_t j = begin; j < end; j += 16)
#pragma GCC unroll 8
        for (int u = 0; u < SUMS; u++) {
            V p = EXP(LOAD_REAL(s + j + u * LANES, 1, LANES) - new_max);
            STORE_REAL(s + j + u * LANES, 1, LANES, p);
            sums[u] += p;
        }
    REAL factor = old == new_max ? 1 : NAME(exp_one)(old - new_max);
    *max = new_max;
    *sum = *sum * factor + NAME(sum_lanes)(sums);
    return factor;
}

/* The row of sums becomes the row of out, 0 where nothing was seen; returns its lse. */
static REAL NAME(finish_row)(REAL *out, int64_t cols, REAL max, REAL sum) {
    int none = max == -(REAL)INFINITY;
    for (int64_t x = 0; x < cols; x++) out[x] = none ? 0 : out[x] / sum;
    return none ? max : max + (REAL)log(sum);
}

/* s := the scores' gradient w (dw keep - row_term), dw := w keep, for w = exp(s - lse); keep
 * NULL: 1. inverse_cap: 1 / softcap, whose tanh has the gradient 1 - (s / softcap)^2, or 0. */
INLINE void NAME(gradient_row)(REAL *s, REAL *dw, int64_t begin, int64_t end, REAL lse,
                               REAL row_term, const REAL *keep, REAL inverse_cap) {
    for (int64_t j = begin; j < end; j += LANES) {
        V score = LOAD_REAL(s + j, 1, LANES), of_weight = LOAD_REAL(dw + j, 1, LANES);
        V w = EXP(score - lse), weight = w;
        if (keep) {
            V kept = LOAD_REAL(keep + j, 1, LANES);
            of_weight *= kept;
            weight *= kept;
        }
        V ds = w * (of_weight - row_term);
        __typeof__(w != w) counts = w != 0; /* hidden: 0, though of_weight may overflow */
        ds = (V)((__typeof__(counts))ds & counts);
        if (inverse_cap != 0) {
            V t = MAX(score * inverse_cap, SPLAT((REAL)-1)); /* hidden: -inf, and w is 0 */
            ds *= 1 - t * t;
        }
        STORE_REAL(s + j, 1, LANES, ds);
        STORE_REAL(dw + j, 1, LANES, weight);
    }
}
