/* wavelet_backward.c: gradient of a wavelet table to scale and shift. METHODS 1 [W].
 *
 * u = (t - b) / a, so d psi / d b = -(psi_u / a + psi_distance) and d psi / d a = -psi_u u / a. */

INLINE void NAME(backward_loop)(int kind, int sign, double *grad_scale, double *grad_shift,
                                const double *grad, const int64_t *offsets, const double *scale,
                                const double *shift, const wpe_wavelet_shape *s) {
    for (int64_t c = 0; c < s->cols; c += F64_LANES) {
        int count = s->cols - c < F64_LANES ? (int)(s->cols - c) : F64_LANES;
        f64v a = load_wide_f64(scale + c * s->scale, s->scale, count);
        f64v b = load_wide_f64(shift + c * s->shift, s->shift, count);
        f64v by_scale = {0}, by_shift = {0};
        for (int64_t r = 0; r < s->rows; r++) {
            f64v distance = splat_f64(sign * (double)offsets[r * s->offsets]) - b;
            f64v u = distance / a, by_u, by_distance;
            f64v g = load_wide_f64(grad + r * s->out_row + c * s->out_col, s->out_col, count);
            psi_slope(kind, distance, u, &by_u, &by_distance);
            /* In the tails, and for haar everywhere, 0 whatever u and a are (inf * 0, 0 / 0). */
            i64v flat = (by_u == 0.0) & (by_distance == 0.0);
            by_scale -= g * select_f64(flat, splat_f64(0.0), by_u * u / a);
            by_shift -= g * select_f64(flat, splat_f64(0.0), by_u / a + by_distance);
        }
        store_wide_f64(grad_scale + c, 1, count, by_scale);
        store_wide_f64(grad_shift + c, 1, count, by_shift);
    }
}

static void NAME(wavelet_backward)(int kind, int sign, double *grad_scale, double *grad_shift,
                                   const double *grad, const int64_t *offsets, const double *scale,
                                   const double *shift, const wpe_wavelet_shape *s) {
    switch (kind) {
#define CASE(KIND)                                                                               \
    case KIND:                                                                                   \
        NAME(backward_loop)(KIND, sign, grad_scale, grad_shift, grad, offsets, scale, shift, s); \
        break;
        EACH_KIND(CASE)
#undef CASE
    }
}
