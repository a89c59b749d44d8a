/* wavelet_table.cu: tables of mother wavelets, and their gradients. METHODS 1 [W]. */
#include "device.h"

template <typename T>
DEVICE void wavelet_table(const wpe_cuda_wavelet &a) {
    for (int64_t i = thread_index(); i < a.rows * a.cols; i += thread_count()) {
        const int64_t row = i / a.cols, col = i % a.cols;
        const double t = a.sign * (double)a.offsets[row * a.offsets_stride];
        const double distance = t - a.shift[col * a.shift_stride];
        const double u = psi_quotient(distance, a.scale[col * a.scale_stride]);
        round_once(psi_at(a.kind, distance, u, 0), (T *)a.out + i);
    }
}

KERNEL(wavelet_table_f16, wpe_cuda_wavelet) { wavelet_table<f16>(a); }
KERNEL(wavelet_table_bf16, wpe_cuda_wavelet) { wavelet_table<bf16>(a); }
KERNEL(wavelet_table_f32, wpe_cuda_wavelet) { wavelet_table<float>(a); }
KERNEL(wavelet_table_f64, wpe_cuda_wavelet) { wavelet_table<double>(a); }

/* The gradients are summed in two steps and without atomics, so that the order of the sums is
 * always the same. */
KERNEL(wavelet_backward, wpe_cuda_wavelet) {
    const int64_t parts = (a.rows + WPE_CUDA_ROWS - 1) / WPE_CUDA_ROWS;
    for (int64_t i = thread_index(); i < parts * a.cols; i += thread_count()) {
        const int64_t part = i / a.cols, col = i % a.cols, begin = part * WPE_CUDA_ROWS;
        const double scale = a.scale[col * a.scale_stride], shift = a.shift[col * a.shift_stride];
        double by_scale = 0, by_shift = 0;
        for (int64_t row = begin; row < begin + WPE_CUDA_ROWS && row < a.rows; row++) {
            const double t = a.sign * (double)a.offsets[row * a.offsets_stride];
            const double g = a.grad[row * a.grad_row_stride + col * a.grad_col_stride];
            double d_scale, d_shift;
            psi_gradient(a.kind, t - shift, scale, &d_scale, &d_shift);
            by_scale += g * d_scale;
            by_shift += g * d_shift;
        }
        a.grad_scale[i] = by_scale;
        a.grad_shift[i] = by_shift;
    }
}

KERNEL(wavelet_sum, wpe_cuda_wavelet) {
    const int64_t parts = (a.rows + WPE_CUDA_ROWS - 1) / WPE_CUDA_ROWS;
    for (int64_t col = thread_index(); col < a.cols; col += thread_count())
        for (int64_t part = 1; part < parts; part++) {
            a.grad_scale[col] += a.grad_scale[part * a.cols + col];
            a.grad_shift[col] += a.grad_shift[part * a.cols + col];
        }
}
