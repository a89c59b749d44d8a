/* rope_table.c: cos and sin of position * inv_freq. METHODS 2 [R].
 *
 * In float32 the error of the product grows with the position: 1e-3 at 10^4, and at 10^8 no digit
 * is right. Here the product is exact, and cos and sin are rounded once. */

static void NAME(rope_table)(void *cos, void *sin, const double *position, const double *inv_freq,
                             const double *factor, int64_t n, int64_t cos_stride,
                             int64_t sin_stride, int64_t position_stride, int64_t inv_freq_stride,
                             int64_t factor_stride) {
    assert(n >= 0 && is_aligned(cos, sizeof(T)) && is_aligned(sin, sizeof(T)));
    T *c_out = cos, *s_out = sin;
    for (int64_t i = 0; i < n; i += F64_LANES) {
        int count = n - i < F64_LANES ? (int)(n - i) : F64_LANES;
        /* stride 0, the usual case: one position and one factor for all pairs */
        f64v m = position_stride
                     ? load_wide_f64(position + i * position_stride, position_stride, count)
                     : splat_f64(*position);
        f64v f = load_wide_f64(inv_freq + i * inv_freq_stride, inv_freq_stride, count);
        f64v scale = factor_stride ? load_wide_f64(factor + i * factor_stride, factor_stride, count)
                                   : splat_f64(*factor);
        f64v hi, lo, c, s;
        exact_product(m, f, &hi, &lo);
        sincos_sum(hi, lo, &s, &c);
        STORE_WIDE(c_out + i * cos_stride, cos_stride, count, c * scale);
        STORE_WIDE(s_out + i * sin_stride, sin_stride, count, s * scale);
    }
}
