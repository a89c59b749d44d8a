/* rope.c: rotary position embedding, both layouts. METHODS 2 [R].
 *
 * Pair (a, b) becomes (a cos - b sin, b cos + a sin). Bounded by memory: one pass, in registers,
 * and a row's cos and sin stay in the first-level cache while the inner loop walks the heads. */

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

/* Pairs i .. h-1 of a row, where elements have strides or a vector would not be full. */
INLINE void NAME(rope_rest)(T *out, const T *x, const REAL *cos, const REAL *sin,
                            const wpe_rope_shape *s, int64_t i, REAL sign) {
    const int64_t h = s->pairs, o = s->out_stride[2], e = s->x_stride[2], cs = s->cos_stride[2],
                  sn = s->sin_stride[2];
    const int64_t step = s->interleaved ? 2 : 1, mate = s->interleaved ? 1 : h; /* a, its b */
    for (; i < h; i += LANES) {
        const int count = h - i < LANES ? (int)(h - i) : LANES;
        const T *xa = x + step * i * e, *xb = xa + mate * e;
        T *oa = out + step * i * o, *ob = oa + mate * o;
        V a = LOAD(xa, step * e, count), b = LOAD(xb, step * e, count);
        V c = LOAD_REAL(cos + i * cs, cs, count);
        V si = LOAD_REAL(sin + i * sn, sn, count) * sign;
        NAME(rotate)(a, b, c, si, &a, &b);
        STORE(oa, step * o, count, a);
        STORE(ob, step * o, count, b);
    }
}

/* One row; `unit`, a constant where this is inlined: all element strides are 1. */
INLINE void NAME(rope_row)(T *out, const T *x, const REAL *cos, const REAL *sin,
                           const wpe_rope_shape *s, int unit, int interleaved, REAL sign) {
    const int64_t h = s->pairs;
    int64_t i = 0;
    if (unit && interleaved)
        for (; i + LANES <= h; i += LANES) {
            V a, b, c = LOAD_REAL(cos + i, 1, LANES), si = LOAD_REAL(sin + i, 1, LANES) * sign;
            LOAD_PAIRS(x + 2 * i, &a, &b);
            NAME(rotate)(a, b, c, si, &a, &b);
            STORE_PAIRS(out + 2 * i, a, b);
        }
    else if (unit && TWO_A_LANE) /* even and odd pairs apart costs less than widening in order */
        for (; i + 2 * LANES <= h; i += 2 * LANES) {
            V a0, a1, b0, b1, c0, c1, s0, s1;
            LOAD_PAIRS(x + i, &a0, &a1);
            LOAD_PAIRS(x + i + h, &b0, &b1);
            LOAD_REAL_PAIRS(cos + i, &c0, &c1);
            LOAD_REAL_PAIRS(sin + i, &s0, &s1);
            NAME(rotate)(a0, b0, c0, s0 * sign, &a0, &b0);
            NAME(rotate)(a1, b1, c1, s1 * sign, &a1, &b1);
            STORE_PAIRS(out + i, a0, a1);
            STORE_PAIRS(out + i + h, b0, b1);
        }
    else if (unit)
        for (; i + LANES <= h; i += LANES) {
            V a = LOAD(x + i, 1, LANES), b = LOAD(x + i + h, 1, LANES);
            V c = LOAD_REAL(cos + i, 1, LANES), si = LOAD_REAL(sin + i, 1, LANES) * sign;
            NAME(rotate)(a, b, c, si, &a, &b);
            STORE(out + i, 1, LANES, a);
            STORE(out + i + h, 1, LANES, b);
        }
    if (i < h) NAME(rope_rest)(out, x, cos, sin, s, i, sign);
    if (out != x)
        for (i = 2 * h; i < s->head_size; i++) out[i * s->out_stride[2]] = x[i * s->x_stride[2]];
}

INLINE void NAME(rope_rows)(T *out, const T *x, const REAL *cos, const REAL *sin,
                            const wpe_rope_shape *s, int unit, int interleaved) {
    REAL sign = s->inverse ? -1 : 1;
    for (int64_t i = 0; i < s->outer; i++)
        for (int64_t j = 0; j < s->inner; j++)
            NAME(rope_row)(out + i * s->out_stride[0] + j * s->out_stride[1],
                           x + i * s->x_stride[0] + j * s->x_stride[1],
                           cos + i * s->cos_stride[0] + j * s->cos_stride[1],
                           sin + i * s->sin_stride[0] + j * s->sin_stride[1], s, unit, interleaved,
                           sign);
}

static void NAME(rope)(void *out, const void *x, const void *cos, const void *sin,
                       const wpe_rope_shape *s) {
    assert(s->outer >= 0 && s->inner >= 0 && s->pairs >= 0 && 2 * s->pairs <= s->head_size);
    assert(is_aligned(out, sizeof(T)) && is_aligned(x, sizeof(T)));
    assert(is_aligned(cos, sizeof(REAL)) && is_aligned(sin, sizeof(REAL)));
    if (s->head_size == 0 || s->inner == 0) return; /* more rows than can be counted */
    int unit = s->out_stride[2] == 1 && s->x_stride[2] == 1 && s->cos_stride[2] == 1 &&
               s->sin_stride[2] == 1;
    if (unit && s->interleaved)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 1);
    else if (unit)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 0);
    else
        NAME(rope_rows)(out, x, cos, sin, s, 0, s->interleaved);
}
