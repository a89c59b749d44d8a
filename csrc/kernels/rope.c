/* rope.c: rotary position embedding, both layouts. METHODS 2 [R].
 *
 * Included by variant.c once per storage type T, computing on lanes V of REAL. Pair (a, b) becomes
 * (a cos - b sin, b cos + a sin). Bounded by memory: one pass, in registers, and a row's cos and
 * sin stay in the first-level cache while the inner loop walks the heads. */

/* (a, b) rotated into (*ra, *rb). The fences keep the formula in one piece, where every caller's
 * compilation contracts the same product of each sum: a row's place must not change its bits. */
INLINE void NAME(rotate)(V a, V b, V c, V s, V *ra, V *rb) {
    FENCE4(a, b, c, s);
    V bs = b * s, bc = b * c;
    FENCE4(a, c, bs, bc);
    V first = a * c - bs, second = a * s + bc;
    FENCE4(first, second, a, b);
    *ra = first;
    *rb = second;
}

/* One row. `unit` is a constant where this is inlined: all element strides are 1. */
INLINE void NAME(rope_row)(T *out, const T *x, const REAL *cos, const REAL *sin,
                           const wpe_rope_shape *s, int unit, int interleaved, REAL sign) {
    int64_t h = s->pairs;
    int64_t o = unit ? 1 : s->out[2], e = unit ? 1 : s->x[2];
    int64_t cs = unit ? 1 : s->cos[2], sn = unit ? 1 : s->sin[2];
    int64_t i = 0;
    if (unit && interleaved)
        for (; i + LANES <= h; i += LANES) { /* (a b a b ...) -> (a a ...), (b b ...) and back */
            V x0 = LOAD(x + 2 * i, 1, LANES), x1 = LOAD(x + 2 * i + LANES, 1, LANES);
            V a = EVENS(x0, x1), b = ODDS(x0, x1);
            V c = LOAD_REAL(cos + i, 1, LANES), si = LOAD_REAL(sin + i, 1, LANES) * sign;
            V ra, rb;
            NAME(rotate)(a, b, c, si, &ra, &rb);
            STORE(out + 2 * i, 1, LANES, ZIP_LOW(ra, rb));
            STORE(out + 2 * i + LANES, 1, LANES, ZIP_HIGH(ra, rb));
        }
    int64_t step = interleaved ? 2 : 1, mate = interleaved ? 1 : h; /* pair i: step * i, + mate */
    for (; i < h; i += LANES) {
        int count = h - i < LANES ? (int)(h - i) : LANES;
        const T *xa = x + step * i * e, *xb = xa + mate * e;
        T *oa = out + step * i * o, *ob = oa + mate * o;
        V a = LOAD(xa, step * e, count), b = LOAD(xb, step * e, count);
        V c = LOAD_REAL(cos + i * cs, cs, count);
        V si = LOAD_REAL(sin + i * sn, sn, count) * sign;
        V ra, rb;
        NAME(rotate)(a, b, c, si, &ra, &rb);
        STORE(oa, step * o, count, ra);
        STORE(ob, step * o, count, rb);
    }
    if (out != x)
        for (i = 2 * h; i < s->head_size; i++) out[i * o] = x[i * e];
}

INLINE void NAME(rope_rows)(T *out, const T *x, const REAL *cos, const REAL *sin,
                            const wpe_rope_shape *s, int unit, int interleaved) {
    REAL sign = s->inverse ? -1 : 1;
    for (int64_t i = 0; i < s->outer; i++)
        for (int64_t j = 0; j < s->inner; j++)
            NAME(rope_row)(out + i * s->out[0] + j * s->out[1], x + i * s->x[0] + j * s->x[1],
                           cos + i * s->cos[0] + j * s->cos[1], sin + i * s->sin[0] + j * s->sin[1],
                           s, unit, interleaved, sign);
}

static void NAME(rope)(void *out, const void *x, const void *cos, const void *sin,
                       const wpe_rope_shape *s) {
    int unit = s->out[2] == 1 && s->x[2] == 1 && s->cos[2] == 1 && s->sin[2] == 1;
    if (unit && s->interleaved)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 1);
    else if (unit)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 0);
    else
        NAME(rope_rows)(out, x, cos, sin, s, 0, s->interleaved);
}
