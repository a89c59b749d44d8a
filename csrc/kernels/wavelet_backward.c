/* wavelet_backward.c: the gradient of a wavelet table by scale and shift. METHODS 1 [W]. */

INLINE void NAME(backward_loop)(int kind, int sign, double *grad_scale, double *grad_shift,
                                const double *grad, const int64_t *offsets, const double *scale,
                                const double *shift, const wpe_wavelet_shape *s) {
    for (int64_t c = 0; c < s->cols; c += F64_LANES) {
        int count = s->cols - c < F64_LANES ? (int)(s->cols - c) : F64_LANES;
        f64v a = load_wide_f64(scale + c * s->scale_stride, s->scale_stride, count);
        f64v b = load_wide_f64(shift + c * s->shift_stride, s->shift_stride, count);
        f64v by_scale = {0}, by_shift = {0};
        for (int64_t r = 0; r < s->rows; r++) {
            f64v distance = splat_f64(sign * (double)offsets[r * s->offsets_stride]) - b;
            f64v g = load_wide_f64(grad + r * s->out_row_stride + c * s->out_col_stride,
                                   s->out_col_stride, count);
            f64v d_scale, d_shift;
            psi_gradient(kind, distance, a, &d_scale, &d_shift);
            by_scale += g * d_scale;
            by_shift += g * d_shift;
        }
        store_wide_f64(grad_scale + c, 1, count, by_scale);
        store_wide_f64(grad_shift + c, 1, count, by_shift);
    }
}

static void NAME(wavelet_backward)(int kind, int sign, double *grad_scale, double *grad_shift,
                                   const double *grad, const int64_t *offsets, const double *scale,
                                   const double *shift, const wpe_wavelet_shape *s) {
    assert(kind >= 0 && kind < WPE_KINDS && (sign == 1 || sign == -1));
    assert(s->rows >= 0 && s->cols >= 0);
    switch (kind) {
#define CASE(KIND)                                                                               \
    case KIND:                                                                                   \
        NAME(backward_loop)(KIND, sign, grad_scale, grad_shift, grad, offsets, scale, shift, s); \
        break;
        EACH_KIND(CASE)
#undef CASE
    }
}
