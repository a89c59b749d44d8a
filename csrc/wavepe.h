/* wavepe.h: every kernel's contract, and the table of function pointers.
 *
 * Kernels know no framework: pointers, sizes, and strides counted in elements. The caller checks,
 * allocates, owns the threads and splits the ranges; no kernel allocates, keeps state or fails.
 * Each table below is built from the same sources for one instruction set (see kernels/variant.c).
 * Strides may be zero or negative. Unless said otherwise outputs must not overlap inputs. */
#ifndef WAVEPE_H
#define WAVEPE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Mother wavelets, named in dispatch.c. */
enum wpe_kind { WPE_RICKER, WPE_GAUSSIAN, WPE_MORLET, WPE_HAAR, WPE_KINDS };

/* What a table row outside the table counts as. */
enum wpe_beyond { WPE_ZERO, WPE_EDGE };

/* Storage types. Arithmetic is done in float for bf16 and f16 (double in psi), never in 16 bits. */
enum wpe_dtype { WPE_F16, WPE_BF16, WPE_F32, WPE_F64, WPE_DTYPES };

/* psi((t - shift) / scale), element by element; pointers to n elements of the kernel's dtype.
 * t - shift is rounded to that dtype, all else is double and rounded once. METHODS 1 [W]. */
typedef void wpe_psi_fn(int kind, void *out, const void *t, const void *scale, const void *shift,
                        int64_t n, int64_t out_stride, int64_t t_stride, int64_t scale_stride,
                        int64_t shift_stride);

/* out[r][c] = psi((sign * offsets[r] - shift[c]) / scale[c]); double inside, rounded once. [W] */
typedef struct {
    int64_t rows, cols;
    int64_t out_row, out_col, offsets, scale, shift; /* strides */
} wpe_wavelet_shape;
typedef void wpe_wavelet_table_fn(int kind, int sign, void *out, const int64_t *offsets,
                                  const double *scale, const double *shift,
                                  const wpe_wavelet_shape *shape);

/* Its gradient: grad_scale[c] = sum over r of grad[r][c] * d out[r][c] / d scale[c], and likewise
 * for shift; `out` in shape describes grad, the results are dense. Rows are summed in order. */
typedef void wpe_wavelet_backward_fn(int kind, int sign, double *grad_scale, double *grad_shift,
                                     const double *grad, const int64_t *offsets,
                                     const double *scale, const double *shift,
                                     const wpe_wavelet_shape *shape);

/* cos and sin of position * inv_freq, times factor, element by element, n of them. The product is
 * taken without rounding error for |position| <= 2^31, position an integer. [R] */
typedef void wpe_rope_table_fn(void *cos, void *sin, const double *position, const double *inv_freq,
                               const double *factor, int64_t n, int64_t cos_stride,
                               int64_t sin_stride, int64_t position_stride, int64_t inv_freq_stride,
                               int64_t factor_stride);

/* Rotates the first 2 * pairs of head_size elements of outer x inner rows and copies the rest.
 * out may be x. cos and sin are float (double for f64), and hold `pairs` elements a row. [R] */
typedef struct {
    int64_t outer, inner, head_size, pairs;
    int64_t out[3], x[3], cos[3], sin[3]; /* strides: outer, inner, element */
    int interleaved, inverse;
} wpe_rope_shape;
typedef void wpe_rope_fn(void *out, const void *x, const void *cos, const void *sin,
                         const wpe_rope_shape *shape);

/* Query-dependent relative term [W][S]: out[i][j] = q[i] . p[i + shift - j], i + shift - j a row
 * of the table (shift = keys - queries - first). Rows outside count as zero or as the nearest row.
 * `packed` is p rearranged by pack_table into packed_size(rows, head_size) elements, 64-byte
 * aligned. Only query rows begin <= i < end are written, so that callers can split them. */
typedef struct {
    int64_t queries, keys, rows, head_size, shift;
    int64_t out_row, out_col, q_row, q_col; /* strides */
    int beyond;
} wpe_bias_shape;
typedef int64_t wpe_packed_size_fn(int64_t rows, int64_t head_size);
typedef void wpe_pack_table_fn(void *packed, const void *p, int64_t rows, int64_t head_size,
                               int64_t row_stride, int64_t col_stride);
typedef void wpe_relative_bias_fn(void *out, const void *q, const void *packed,
                                  const wpe_bias_shape *shape, int64_t begin, int64_t end);

/* The linear map behind it: out[i][j] = t[i][i + shift - j] for a matrix t (queries, rows), and its
 * transpose (the gradient), which adds up what fell on the same element. */
typedef struct {
    int64_t queries, keys, rows, shift;
    int64_t skewed_row, skewed_col, t_row, t_col; /* strides of (queries, keys), (queries, rows) */
    int beyond;
} wpe_skew_shape;
typedef void wpe_skew_fn(void *skewed, const void *t, const wpe_skew_shape *shape);
typedef void wpe_unskew_fn(void *t, const void *skewed, const wpe_skew_shape *shape);

/* One instruction set's kernels, indexed by storage type; a type without a kernel holds NULL. */
typedef struct {
    const char *name; /* "portable", "avx2", "avx512" */
    wpe_psi_fn *psi[WPE_DTYPES];
    wpe_wavelet_table_fn *wavelet_table[WPE_DTYPES];
    wpe_wavelet_backward_fn *wavelet_backward; /* in double only */
    wpe_rope_table_fn *rope_table[WPE_DTYPES];
    wpe_rope_fn *rope[WPE_DTYPES];
    wpe_packed_size_fn *packed_size[WPE_DTYPES];
    wpe_pack_table_fn *pack_table[WPE_DTYPES];
    wpe_relative_bias_fn *relative_bias[WPE_DTYPES];
    wpe_skew_fn *skew[WPE_DTYPES];
    wpe_unskew_fn *unskew[WPE_DTYPES];
} wpe_kernels;

/* One object for the whole process, owned by the NumPy module: the other bindings get it from there
 * and link no kernel of their own, so that a switch of variant moves them all. */
typedef struct {
    const wpe_kernels *current;    /* at first the best this CPU runs */
    const char *const *kind_names; /* WPE_KINDS of them */
} wpe_dispatch;
wpe_dispatch *wpe_get_dispatch(void);

/* Tables this build holds and this CPU runs, in rising order; NULL past the end. */
const wpe_kernels *wpe_variant(int index);
/* Switches to the variant of that name; 0, or -1 (and nothing changed) where there is none. */
int wpe_use_variant(const char *name);

#ifdef __cplusplus
}
#endif
#endif
