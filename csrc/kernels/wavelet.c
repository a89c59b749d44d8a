/* wavelet.c: mother wavelets element by element, and tables of them. METHODS 1 [W].
 *
 * All arithmetic is double, also for smaller types: exp takes most of the time anyway, and the
 * result is the exact value rounded once. */

INLINE void NAME(psi_loop)(int kind, T *out, const T *t, const T *scale, const T *shift, int64_t n,
                           int64_t out_stride, int64_t t_stride, int64_t scale_stride,
                           int64_t shift_stride) {
    for (int64_t i = 0; i < n; i += F64_LANES) {
        int count = n - i < F64_LANES ? (int)(n - i) : F64_LANES;
        f64v distance = LOAD_WIDE(t + i * t_stride, t_stride, count) -
                        LOAD_WIDE(shift + i * shift_stride, shift_stride, count);
        /* round to T: the double difference of two smaller T is exact, so this rounds once */
        T rounded[F64_LANES];
        STORE_WIDE(rounded, 1, F64_LANES, distance);
        distance = LOAD_WIDE(rounded, 1, F64_LANES);
        f64v a = LOAD_WIDE(scale + i * scale_stride, scale_stride, count);
        STORE_WIDE(out + i * out_stride, out_stride, count,
                   psi_at(kind, distance, psi_quotient(distance, a), sizeof(T) < 8));
    }
}

static void NAME(psi)(int kind, void *out, const void *t, const void *scale, const void *shift,
                      int64_t n, int64_t out_stride, int64_t t_stride, int64_t scale_stride,
                      int64_t shift_stride) {
    assert(kind >= 0 && kind < WPE_KINDS && n >= 0 && is_aligned(out, sizeof(T)));
    assert(is_aligned(t, sizeof(T)) && is_aligned(scale, sizeof(T)) &&
           is_aligned(shift, sizeof(T)));
    switch (kind) {
#define CASE(KIND)                                                                        \
    case KIND:                                                                            \
        NAME(psi_loop)(KIND, out, t, scale, shift, n, out_stride, t_stride, scale_stride, \
                       shift_stride);                                                     \
        break;
        EACH_KIND(CASE)
#undef CASE
    }
}

/* The offsets of so many rows stay in the first-level cache while all columns are computed. */
enum { NAME(table_rows) = 64 };

/* `rows` rows of `count` <= F64_LANES columns. inverse: 1 / a, if multiplying by it gives the same
 * u as dividing by a, else NULL. A division takes as long as all other work on a tail element. */
INLINE void NAME(table_columns)(int kind, T *out, const double *t, f64v a, f64v b,
                                const f64v *inverse, int64_t rows, int count,
                                const wpe_wavelet_shape *s) {
    for (int64_t r = 0; r < rows; r++) {
        f64v distance = splat_f64(t[r]) - b;
        f64v u = inverse ? distance * *inverse : psi_quotient(distance, a);
        STORE_WIDE(out + r * s->out_row_stride, s->out_col_stride, count,
                   psi_at(kind, distance, u, 0));
    }
}

INLINE void NAME(table_loop)(int kind, int sign, T *out, const int64_t *offsets,
                             const double *scale, const double *shift, const wpe_wavelet_shape *s) {
    for (int64_t r = 0; r < s->rows; r += NAME(table_rows)) {
        const int64_t rows = s->rows - r < NAME(table_rows) ? s->rows - r : NAME(table_rows);
        double t[NAME(table_rows)];
        for (int64_t i = 0; i < rows; i++)
            t[i] = sign * (double)offsets[(r + i) * s->offsets_stride];
        for (int64_t c = 0; c < s->cols; c += F64_LANES) {
            const int count = s->cols - c < F64_LANES ? (int)(s->cols - c) : F64_LANES;
            f64v a = load_wide_f64(scale + c * s->scale_stride, s->scale_stride, count);
            f64v b = load_wide_f64(shift + c * s->shift_stride, s->shift_stride, count);
            f64v inverse = 1.0 / a;
            T *at = out + r * s->out_row_stride + c * s->out_col_stride;
            if (count == F64_LANES && all_lanes(is_power_of_two_f64(a)))
                NAME(table_columns)(kind, at, t, a, b, &inverse, rows, F64_LANES, s);
            else
                NAME(table_columns)(kind, at, t, a, b, 0, rows, count, s);
        }
    }
}

static void NAME(wavelet_table)(int kind, int sign, void *out, const int64_t *offsets,
                                const double *scale, const double *shift,
                                const wpe_wavelet_shape *s) {
    assert(kind >= 0 && kind < WPE_KINDS && (sign == 1 || sign == -1));
    assert(s->rows >= 0 && s->cols >= 0 && is_aligned(out, sizeof(T)));
    if (s->cols == 0) return; /* such rows may be too many to count */
    switch (kind) {
#define CASE(KIND)                                                   \
    case KIND:                                                       \
        NAME(table_loop)(KIND, sign, out, offsets, scale, shift, s); \
        break;
        EACH_KIND(CASE)
#undef CASE
    }
}
