/* cuda.h: the contract of the CUDA kernels. nvcc and the torch binding both include it.
 *
 * A kernel takes one of these structs by value. Its pointers are addresses on its device. Strides
 * count elements and may be zero or negative. Sizes and indices have 64 bits. Kernels use no shared
 * memory, and no thread waits for another: one thread writes each element of the output. */
#ifndef WAVEPE_CUDA_H
#define WAVEPE_CUDA_H

#include <stdint.h>

/* Threads in a block. It is small, because some kernels need 140 registers for each thread. */
enum { WPE_CUDA_BLOCK = 128 };

/* rope_<dtype> rotates the first 2 * pairs of the head_size elements of each head, for one or two
 * tensors (q and k), by one table. It copies the other elements if out is not x. A thread handles
 * WPE_CUDA_HEADS heads. [R]
 * Requires: 2 * pairs <= head_size; cos and sin are float (for f64: double); out may be x, if their
 * strides are equal.
 * rope_<dtype>_wide does the same with accesses of 16 bytes. It also requires: elements and pairs
 * have stride 1; all pointers, sizes and other strides are multiples of 16 bytes. */
enum { WPE_CUDA_HEADS = 4 };
typedef struct {
    void *out;
    const void *x;
    int64_t heads;                      /* 0: no such tensor */
    int64_t out_stride[4], x_stride[4]; /* batch, head, position, element */
} wpe_cuda_rope_tensor;
typedef struct {
    wpe_cuda_rope_tensor tensors[2];
    int64_t batch, length, head_size, pairs;
    const void *cos, *sin;
    int64_t cos_stride[3], sin_stride[3]; /* batch, position, pair */
    int interleaved, inverse;
} wpe_cuda_rope;

/* rope_table_<dtype>: cos and sin (rows, pairs) of position * inv_freq, times factor, for the pairs
 * begin..end-1. positions is (rows, axes); these pairs use the coordinate number `axis`. hf: the
 * angle is the float32 product of position and inv_freq, each rounded to float32. [R] */
typedef struct {
    void *cos, *sin;
    const int64_t *positions;
    const double *inv_freq;
    double factor;
    int64_t rows, pairs, begin, end, axes, axis;
    int hf;
} wpe_cuda_rope_table;

/* wavelet_table_<dtype>: out (rows, cols) = psi((sign * offset - shift) / scale).
 * wavelet_backward: grad_scale and grad_shift (parts, cols), where each part is the sum over
 * WPE_CUDA_ROWS rows. wavelet_sum then adds the parts in order, into row 0. [W] */
enum { WPE_CUDA_ROWS = 64 };
typedef struct {
    void *out;
    const int64_t *offsets;
    const double *scale, *shift, *grad;
    double *grad_scale, *grad_shift;
    int64_t rows, cols, offsets_stride, scale_stride, shift_stride, grad_row_stride,
        grad_col_stride;
    int kind, sign;
} wpe_cuda_wavelet;

/* skew_<dtype>: out[i][j] = in[i][i + shift - j], from rows of `from` elements to rows of `to`, for
 * each of `queries` rows of each matrix. Elements outside `in` count as zero, or as the nearest
 * one. With zeros, and the two sizes exchanged, this is its own transpose. skew_<dtype>_wide does
 * the same with stores of 16 bytes. It also requires: rows of the output are whole words of 16
 * bytes. unskew_parts_<dtype>: with WPE_EDGE, the sums over the elements of `in` that the transpose
 * also adds to the first and to the last element of a row of the output: parts (batch, queries,
 * WPE_CUDA_LANES, 2). unskew_edges_<dtype> then adds them, in order. Requires: all matrices are
 * contiguous; 2^lanes threads handle a row of skew. [W][S] */
enum { WPE_CUDA_LANES = 32 };
typedef struct {
    void *out;
    const void *in;
    void *parts;
    int64_t batch, queries, from, to, shift;
    int beyond, lanes;
} wpe_cuda_skew;

#endif
