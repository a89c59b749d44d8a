/* cuda.h: the CUDA kernels' contract, read by nvcc and by the binding.
 *
 * A kernel takes one of these structs by value. Pointers lie on its device, strides count elements
 * and may be zero or negative, sizes are 64 bits everywhere. No kernel shares memory between
 * threads or waits for another: each element of the output is written by one thread. */
#ifndef WAVEPE_CUDA_H
#define WAVEPE_CUDA_H

#include <stdint.h>

/* Threads a block: few, as some kernels take 140 registers each. */
enum { WPE_CUDA_BLOCK = 128 };

/* rope_<dtype>, and rope_<dtype>_wide where elements and pairs lie next to each other, in whole
 * words of 16 bytes everywhere. Rotates up to two tensors (q and k) by one table: the first 2 *
 * pairs of head_size elements; the others are copied, where out is not x. cos and sin are float
 * (double for f64). A thread takes WPE_CUDA_HEADS heads. [R] */
enum { WPE_CUDA_HEADS = 4 };
typedef struct {
    void *out;
    const void *x;
    int64_t heads;                      /* 0: none */
    int64_t out_stride[4], x_stride[4]; /* batch, head, position, element */
} wpe_cuda_rope_tensor;
typedef struct {
    wpe_cuda_rope_tensor of[2];
    int64_t batch, length, head_size, pairs;
    const void *cos, *sin;
    int64_t cos_stride[3], sin_stride[3]; /* batch, position, pair */
    int interleaved, inverse;
} wpe_cuda_rope;

/* rope_table_<dtype>: cos and sin (rows, pairs) of position * inv_freq, times factor, for the pairs
 * begin..end-1, whose coordinate is number `axis` of each row's `axes`. hf: of the float32 product
 * of the two as float32. [R] */
typedef struct {
    void *cos, *sin;
    const int64_t *positions;
    const double *inv_freq;
    double factor;
    int64_t rows, pairs, begin, end, axes, axis;
    int hf;
} wpe_cuda_rope_table;

/* wavelet_table_<dtype>: out (rows, cols) of psi((sign * offset - shift) / scale).
 * wavelet_backward: grad_scale and grad_shift (parts, cols), each the sum over WPE_CUDA_ROWS rows;
 * wavelet_sum adds the parts up in order, into row 0. [W] */
enum { WPE_CUDA_ROWS = 64 };
typedef struct {
    void *out;
    const int64_t *offsets;
    const double *scale, *shift, *grad;
    double *grad_scale, *grad_shift;
    int64_t rows, cols, offsets_stride, scale_stride, shift_stride, grad_row, grad_col;
    int kind, sign;
} wpe_cuda_wavelet;

/* skew_<dtype>: skewed (batch, queries, keys) with skewed[i][j] = t[i][i + shift - j]; rows outside
 * t count as zero or as the nearest. unskew_<dtype>: its transpose. Both dense. [W][S] */
typedef struct {
    void *out;
    const void *in;
    int64_t batch, queries, keys, rows, shift;
    int beyond;
} wpe_cuda_skew;

#endif
