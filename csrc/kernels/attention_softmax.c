/* attention_softmax.c: the operations on each score of a tile, in forward and backward.
 *
 * Sums run in 16 lanes, whatever the width of a vector, over columns that begin at a multiple
 * of 16. So wider registers give the same bits. */

#define STEP_VECTORS (KEY_STEP / LANES) /* the columns of a row are whole steps of KEY_STEP */

/* Combine all lanes of the vectors x[0..count-1] by halves: the first half of the lanes with the
 * second, then the first quarter with the second, and so on. Every lane of x[0] gets the result. */
#define FOLD(x, count, COMBINE)                                                  \
    do {                                                                         \
        _Pragma("GCC unroll 8") for (int half = (count) / 2; half; half /= 2) {  \
            for (int u = 0; u < half; u++) x[u] = COMBINE(x[u], x[u + half]);    \
        }                                                                        \
        _Pragma("GCC unroll 8") for (int lanes = LANES; lanes > 1; lanes /= 2) { \
            V low = __builtin_shufflevector(x[0], x[0], REAL_ORDER(LOW));        \
            V high = __builtin_shufflevector(x[0], x[0], REAL_ORDER(HIGH));      \
            x[0] = COMBINE(low, high);                                           \
        }                                                                        \
    } while (0)
#define PLUS(a, b) ((a) + (b))

INLINE REAL NAME(sum_lanes)(V sums[SUM_VECTORS]) {
    FOLD(sums, SUM_VECTORS, PLUS);
    return sums[0][0];
}

INLINE REAL NAME(exp_one)(REAL x) { return EXP(SPLAT(x))[0]; }

/* Fill keep[begin..end-1] with the factor that dropout gives query i and key first_key + j: 0 or
 * keep_scale. */
static void NAME(keep_row)(REAL *keep, const wpe_attention *a, int64_t i, int64_t first_key,
                           int64_t begin, int64_t end) {
    uint64_t z = a->seed + 0x9E3779B97F4A7C15u * (a->drop_row + (uint64_t)i + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u; /* splitmix64 */
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    uint32_t low = (uint32_t)z, high = (uint32_t)(z >> 32);
    uint32_t all = a->drop_below >> 32 != 0, below = (uint32_t)a->drop_below;
    REAL scale = (REAL)a->keep_scale;
    for (int64_t j = begin; j < end; j++) {
        uint32_t x = (uint32_t)(first_key + j) * 0x9E3779B9u + low;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15 ^ high) * 0x846ca68bu;
        x ^= x >> 16;
        keep[j] = x >= below && !all ? scale : 0;
    }
}

/* Finish the scores of query i before softmax: add slope and bias, apply the softcap, and set
 * hidden keys to -inf. s[j] belongs to key first_key + j, and `bias`, which is read only if there
 * is a bias, has its value at bias[j]. `seen` is key_range_of(i), or empty for a padding row. */
static void NAME(adjust_row)(REAL *s, const wpe_attention *a, int64_t i, int64_t first_key,
                             int64_t begin, int64_t end, wpe_range seen, const REAL *bias) {
    if (a->slope != 0) {
        V lane, slope = SPLAT((REAL)a->slope);
        for (int l = 0; l < LANES; l++) lane[l] = (REAL)l;
        /* A large delta is rounded. In steps of 16 keys it rounds alike in every variant. */
        for (int64_t j = begin; j < end; j += 16) {
            REAL delta = (REAL)(i + a->offset - first_key - j);
            for (int u = 0; u < SUM_VECTORS; u++) {
                V distance = ABS(delta - (lane + (REAL)(u * LANES)));
                REAL *at = s + j + u * LANES;
                STORE_REAL(at, 1, LANES, LOAD_REAL(at, 1, LANES) - slope * distance);
            }
        }
    }
    if (a->bias.rows) {
        for (int64_t j = begin; j < end; j += LANES)
            STORE_REAL(s + j, 1, LANES, LOAD_REAL(s + j, 1, LANES) + LOAD_REAL(bias + j, 1, LANES));
    }
    if (a->softcap != 0) {
        REAL cap = (REAL)a->softcap;
        for (int64_t j = begin; j < end; j += LANES)
            STORE_REAL(s + j, 1, LANES, cap * TANH(LOAD_REAL(s + j, 1, LANES) / cap));
    }
    int64_t seen_begin = smaller(larger(seen.begin - first_key, begin), end);
    int64_t seen_end = larger(smaller(seen.end - first_key, end), seen_begin);
    for (int64_t j = begin; j < seen_begin; j++) s[j] = -(REAL)INFINITY;
    for (int64_t j = seen_end; j < end; j++) s[j] = -(REAL)INFINITY;
    if (a->segments && seen_begin < seen_end) { /* a padding row has no segment */
        const int64_t *id = a->segments + first_key, mine = a->segments[i];
        for (int64_t j = seen_begin; j < seen_end; j++)
            s[j] = id[j] == mine ? s[j] : -(REAL)INFINITY;
    }
    if (a->key_mask) {
        const uint8_t *is_seen = a->key_mask + first_key * a->key_mask_stride;
        for (int64_t j = seen_begin; j < seen_end; j++)
            s[j] = is_seen[j * a->key_mask_stride] ? s[j] : -(REAL)INFINITY;
    }
    if (a->mask) {
        const uint8_t *is_seen = a->mask + i * a->mask_row_stride + first_key * a->mask_col_stride;
        for (int64_t j = seen_begin; j < seen_end; j++)
            s[j] = is_seen[j * a->mask_col_stride] ? s[j] : -(REAL)INFINITY;
    }
}

/* adjust_row for each row of a tile. */
static void NAME(adjust_tile)(const BLOCK *b, const TILE *t) {
    for (int64_t row = 0; row < b->groups * GROUP; row++) {
        wpe_range columns = t->work_columns[row / GROUP];
        NAME(adjust_row)(t->scores + row * t->row_stride, b->a, b->begin + row, t->first_key,
                         columns.begin, columns.end, b->seen[row], t->bias + BIAS_ORIGIN - row);
    }
}

/* Return the maximum of a row, or a NaN of it. */
static REAL NAME(row_max)(const REAL *s, int64_t begin, int64_t end) {
    V most[STEP_VECTORS]; /* several, so that a step need not wait for the one before */
    for (int u = 0; u < STEP_VECTORS; u++) most[u] = SPLAT(-(REAL)INFINITY);
    for (int64_t j = begin; j < end; j += KEY_STEP)
#pragma GCC unroll 8
        for (int u = 0; u < STEP_VECTORS; u++)
            most[u] = MAX(LOAD_REAL(s + j + u * LANES, 1, LANES), most[u]);
    FOLD(most, STEP_VECTORS, MAX);
    REAL max = most[0][0];
    if (max > -(REAL)INFINITY) return max;
    /* No key is seen, or there is a NaN, which comparisons drop. */
    for (int64_t j = begin; j < end; j++)
        if (s[j] != s[j]) return s[j];
    return max;
}

/* Begin a row's maximum and sum: with the sink, if there is one. */
INLINE void NAME(begin_row)(const wpe_attention *a, REAL *max, REAL *sum) {
    *max = (REAL)a->sink;
    *sum = *max != -(REAL)INFINITY;
}

/* Replace the scores s, whose maximum is tile_max, by the weights exp(s - max), and update the
 * running max and sum of the row. Return the factor by which sums that used the old max must be
 * multiplied. */
static REAL NAME(softmax_row)(REAL *s, int64_t begin, int64_t end, REAL tile_max, REAL *max,
                              REAL *sum) {
    REAL old = *max;
    REAL new_max = tile_max > old || tile_max != tile_max ? tile_max : old;
    if (new_max == -(REAL)INFINITY) {
        memset(s + begin, 0, (size_t)(end - begin) * sizeof(REAL));
        return 1;
    }
    V sums[SUM_VECTORS] = {0};
    for (int64_t j = begin; j < end; j += 16)
#pragma GCC unroll 8
        for (int u = 0; u < SUM_VECTORS; u++) {
            V p = EXP(LOAD_REAL(s + j + u * LANES, 1, LANES) - new_max);
            STORE_REAL(s + j + u * LANES, 1, LANES, p);
            sums[u] += p;
        }
    REAL factor = 1;
    if (old != new_max) {
        factor = NAME(exp_one)(old - new_max);
        *max = new_max;
        *sum *= factor;
    }
    *sum += NAME(sum_lanes)(sums);
    return factor;
}

/* Turn a row of sums into a row of out, which is 0 if neither a key was seen nor there is a sink.
 * Return the row's lse. */
static REAL NAME(finish_row)(REAL *out, int64_t cols, REAL max, REAL sum) {
    int none = max == -(REAL)INFINITY;
    for (int64_t x = 0; x < cols; x++) out[x] = none ? 0 : out[x] / sum;
    return none ? max : max + (REAL)log(sum);
}

/* With w = exp(s - lse), set s to the gradient of the scores, w (dw keep - row_term), and dw to the
 * weights w keep. keep NULL means 1. inverse_cap is 1 / softcap, or 0 without a softcap. The
 * softcap multiplies the gradient by 1 - (s / softcap)^2. */
INLINE void NAME(gradient_row)(REAL *s, REAL *dw, int64_t begin, int64_t end, REAL lse,
                               REAL row_term, const REAL *keep, REAL inverse_cap) {
    for (int64_t j = begin; j < end; j += LANES) {
        V score = LOAD_REAL(s + j, 1, LANES), weight_grad = LOAD_REAL(dw + j, 1, LANES);
        V w = EXP(score - lse), weight = w;
        if (keep) {
            V kept = LOAD_REAL(keep + j, 1, LANES);
            weight_grad *= kept;
            weight *= kept;
        }
        V ds = w * (weight_grad - row_term);
        /* A hidden key gets 0, although weight_grad may have overflowed. */
        __typeof__(w != w) is_seen = w != 0;
        ds = (V)((__typeof__(is_seen))ds & is_seen);
        if (inverse_cap != 0) {
            /* A hidden key has the score -inf and the weight 0. MAX keeps the factor finite. */
            V tanh_score = MAX(score * inverse_cap, SPLAT((REAL)-1));
            ds *= 1 - tanh_score * tanh_score;
        }
        STORE_REAL(s + j, 1, LANES, ds);
        STORE_REAL(dw + j, 1, LANES, weight);
    }
}
