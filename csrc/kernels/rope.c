/* rope.c: rotary position embedding in both layouts. METHODS 2 [R].
 *
 * The pair (a, b) becomes (a cos - b sin, b cos + a sin). Memory bandwidth limits the speed. So the
 * rows are read once and rotated in registers, and the cos and sin of a position stay in the
 * first-level cache while the inner loop visits the heads. */

/* Rotate (a, b) by the angle with cosine c and sine s into (*ra, *rb). A row must give the same
 * bits wherever it lies in memory. So each caller must contract the same product of each sum into
 * an FMA; the fences make sure of it. */
INLINE void NAME(rotate)(V a, V b, V c, V s, V *ra, V *rb) {
    FENCE4(a, b, c, s);
    V bs = b * s, bc = b * c;
    FENCE4(a, c, bs, bc);
    V new_a = a * c - bs, new_b = a * s + bc;
    FENCE4(new_a, new_b, a, b);
    *ra = new_a;
    *rb = new_b;
}

/* Rotate pairs i..i + count - 1 of a row, with any strides. */
INLINE void NAME(rope_lanes)(T *out, const T *x, const REAL *cos, const REAL *sin,
                             const wpe_rope_shape *s, int64_t i, int count, REAL sign) {
    const int64_t out_step = s->out_stride[2], x_step = s->x_stride[2];
    /* elements from one a to the next, and from an a to its b */
    const int64_t step = s->interleaved ? 2 : 1, to_b = s->interleaved ? 1 : s->pairs;
    const T *xa = x + step * i * x_step, *xb = xa + to_b * x_step;
    T *oa = out + step * i * out_step, *ob = oa + to_b * out_step;
    V a = LOAD(xa, step * x_step, count), b = LOAD(xb, step * x_step, count);
    V c = LOAD_REAL(cos + i * s->cos_stride[2], s->cos_stride[2], count);
    V si = LOAD_REAL(sin + i * s->sin_stride[2], s->sin_stride[2], count) * sign;
    NAME(rotate)(a, b, c, si, &a, &b);
    STORE(oa, step * out_step, count, a);
    STORE(ob, step * out_step, count, b);
}

/* The same with element strides of 1. */
INLINE void NAME(rope_vector)(T *out, const T *x, const REAL *cos, const REAL *sin, int64_t pairs,
                              int64_t i, int count, int interleaved, REAL sign) {
    V a, b, c = LOAD_REAL(cos + i, 1, count), si = LOAD_REAL(sin + i, 1, count) * sign;
    if (interleaved) {
        LOAD_PAIRS(x + 2 * i, count, &a, &b);
        NAME(rotate)(a, b, c, si, &a, &b);
        STORE_PAIRS(out + 2 * i, count, a, b);
    } else {
        a = LOAD(x + i, 1, count), b = LOAD(x + i + pairs, 1, count);
        NAME(rotate)(a, b, c, si, &a, &b);
        STORE(out + i, 1, count, a);
        STORE(out + i + pairs, 1, count, b);
    }
}

/* Rotate one row. unit_strides: all element strides are 1; a constant where this is inlined. */
INLINE void NAME(rope_row)(T *out, const T *x, const REAL *cos, const REAL *sin,
                           const wpe_rope_shape *s, int unit_strides, int interleaved, REAL sign) {
    const int64_t pairs = s->pairs;
    int64_t i = 0;
    if (unit_strides) {
        /* splitting even and odd pairs costs less than widening the elements in order */
        for (; SPLIT_PAIRS && !interleaved && i + 2 * LANES <= pairs; i += 2 * LANES) {
            V a0, a1, b0, b1, c0, c1, s0, s1;
            LOAD_PAIRS(x + i, LANES, &a0, &a1);
            LOAD_PAIRS(x + i + pairs, LANES, &b0, &b1);
            LOAD_REAL_PAIRS(cos + i, LANES, &c0, &c1);
            LOAD_REAL_PAIRS(sin + i, LANES, &s0, &s1);
            NAME(rotate)(a0, b0, c0, s0 * sign, &a0, &b0);
            NAME(rotate)(a1, b1, c1, s1 * sign, &a1, &b1);
            STORE_PAIRS(out + i, LANES, a0, a1);
            STORE_PAIRS(out + i + pairs, LANES, b0, b1);
        }
        for (; i + LANES <= pairs; i += LANES)
            NAME(rope_vector)(out, x, cos, sin, pairs, i, LANES, interleaved, sign);
        if (i < pairs)
            NAME(rope_vector)(out, x, cos, sin, pairs, i, (int)(pairs - i), interleaved, sign);
    } else
        for (; i < pairs; i += LANES)
            NAME(rope_lanes)(out, x, cos, sin, s, i, (int)smaller(LANES, pairs - i), sign);
    if (out == x || 2 * pairs == s->head_size) return;
    if (unit_strides)
        memcpy(out + 2 * pairs, x + 2 * pairs, (size_t)(s->head_size - 2 * pairs) * sizeof(T));
    else
        for (i = 2 * pairs; i < s->head_size; i++)
            out[i * s->out_stride[2]] = x[i * s->x_stride[2]];
}

INLINE void NAME(rope_rows)(T *out, const T *x, const REAL *cos, const REAL *sin,
                            const wpe_rope_shape *shape, int unit_strides, int interleaved) {
    const wpe_rope_shape s = *shape; /* no store can change it, so it stays in registers */
    REAL sign = s.inverse ? -1 : 1;
    for (int64_t i = 0; i < s.outer; i++) {
        T *to = out + i * s.out_stride[0];
        const T *from = x + i * s.x_stride[0];
        const REAL *c = cos + i * s.cos_stride[0], *si = sin + i * s.sin_stride[0];
        for (int64_t j = 0; j < s.inner; j++) {
            NAME(rope_row)(to, from, c, si, &s, unit_strides, interleaved, sign);
            to += s.out_stride[1], from += s.x_stride[1];
            c += s.cos_stride[1], si += s.sin_stride[1];
        }
    }
}

static void NAME(rope)(void *out, const void *x, const void *cos, const void *sin,
                       const wpe_rope_shape *s) {
    assert(s->outer >= 0 && s->inner >= 0 && s->pairs >= 0 && 2 * s->pairs <= s->head_size);
    assert(is_aligned(out, sizeof(T)) && is_aligned(x, sizeof(T)));
    assert(is_aligned(cos, sizeof(REAL)) && is_aligned(sin, sizeof(REAL)));
    if (s->head_size == 0 || s->inner == 0) return; /* such rows may be too many to count */
    int unit_strides = s->out_stride[2] == 1 && s->x_stride[2] == 1 && s->cos_stride[2] == 1 &&
                       s->sin_stride[2] == 1;
    if (unit_strides && s->interleaved)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 1);
    else if (unit_strides)
        NAME(rope_rows)(out, x, cos, sin, s, 1, 0);
    else
        NAME(rope_rows)(out, x, cos, sin, s, 0, s->interleaved);
}
