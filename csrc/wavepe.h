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

/* ---- attention [W][S][X][A] ------------------------------------------------------------------
 *
 * score[i][j] = (q_i . k_j + r_i . p[delta - first]) * scale - slope * |delta|, where delta = i +
 * offset - j; then softcap * tanh(score / softcap). Softmax over the keys that i sees.
 * q, k, v and the results are of a storage type; what is packed, sums and the workspace are of the
 * kernel's own: float (for f32, bf16, f16), or double. */

/* Queries are worked on in blocks of so many rows, keys in tiles of so many columns. Callers split
 * queries at multiples of the block. Both are part of the result's bits. */
enum { WPE_QUERY_BLOCK = 96, WPE_KEY_BLOCK = 192 };

typedef struct {
    const void *data;
    int64_t row, col; /* strides */
} wpe_matrix;
typedef struct {
    void *data;
    int64_t row, col;
} wpe_matrix_out;

/* Rows of a relative table as products of two small matrices, rows = C U^T, or as they are (basis
 * NULL, rank = head size), packed by attention_pack_zone. */
typedef struct {
    int64_t rows, rank;
    const void *scores;                   /* C^T */
    const void *gradient;                 /* C */
    const void *basis, *transposed_basis; /* U, U^T, or NULL */
} wpe_zone;

/* A table: its zones in the order of falling delta, the last one ending at delta = first. */
typedef struct {
    int64_t rows, first;
    int beyond, zone_count;
    const wpe_zone *zones;
} wpe_relative;

/* One head: all that its score, its softmax and who sees whom depend on. */
typedef struct {
    int64_t queries, keys, head_size, value_size;
    int64_t offset;               /* position of query 0, counted from key 0 */
    double scale, slope, softcap; /* softcap 0: none */
    int storage;                  /* wpe_dtype of q, k, v and the results */
    wpe_matrix q, k, v, r;        /* r: multiplied with the table; NULL: q is */
    const wpe_relative *relative; /* NULL: no table */

    /* Hidden are keys with delta < 0 if causal, with delta >= window, before first_key or from
     * end_key on; outside of the query's run; of another segment than the query's; and those whose
     * mask is 0. NULL where there is none. */
    int causal;
    int64_t window, first_key, end_key;
    const int64_t *run_first, *run_end; /* of each query: keys first..end-1; both never fall */
    const int64_t *segments;            /* of each key, dense */
    const uint8_t *key_mask;            /* of each key */
    const uint8_t *mask;
    int64_t key_mask_stride, mask_row, mask_col;

    /* Dropout: the weight of (i, j) is kept, times keep_scale, where the hash of (seed, drop_row +
     * i, j) is at least drop_below. drop_below 0: none. */
    uint64_t seed, drop_row;
    uint64_t drop_below; /* of 2^32 */
    double keep_scale;
} wpe_attention;

/* What is added up over the queries of one key head; the caller clears it first. dk and dv hold
 * padded rows of the kernel's own type (attention_padded), dp the table's rows in falling delta. */
typedef struct {
    void *dk, *dv, *dp; /* dp NULL: not wanted */
} wpe_attention_sums;

/* What a call needs; backward: 0 or 1. packed and workspace count elements of the kernel's own
 * type. */
typedef struct {
    int64_t packed, workspace;     /* packed keys and values of a key head; scratch of a thread */
    int64_t keys;                  /* rows of dk and dv */
    int64_t head_size, value_size; /* columns of dk and dp, of dv */
    int64_t table;                 /* rows of dp */
} wpe_attention_sizes;
typedef wpe_attention_sizes wpe_attention_sizes_fn(const wpe_attention *a, int backward);

/* The keys that queries begin..end-1 may see; neither bound falls with the queries. */
typedef struct {
    int64_t begin, end;
} wpe_range;
typedef wpe_range wpe_attention_keys_fn(const wpe_attention *a, int64_t begin, int64_t end);

/* Packs keys begin..end-1, begin a multiple of the key block; different ranges may be packed by
 * different threads. */
typedef void wpe_attention_pack_fn(const wpe_attention *a, void *packed, int backward,
                                   int64_t begin, int64_t end);

/* Packs a zone; sets the pointers of `zone`, whose rows and rank are given. rows (rows, rank) and
 * basis (head_size, rank; NULL for none) in rising delta; memory as attention_zone_size says. */
typedef int64_t wpe_attention_zone_size_fn(int64_t rows, int64_t rank, int64_t head_size);
typedef void wpe_attention_pack_zone_fn(wpe_zone *zone, void *memory, int storage,
                                        int64_t head_size, wpe_matrix rows, wpe_matrix basis);

/* Queries begin..end-1, begin a multiple of the query block. lse: one element a query. */
typedef void wpe_attention_forward_fn(const wpe_attention *a, const void *packed,
                                      wpe_matrix_out out, void *lse, int64_t begin, int64_t end,
                                      void *workspace);

/* Gradients, from those of out and lse (grad_lse NULL: none): writes dq, and dr where it is another
 * tensor than q (else it is part of dq); adds to sums. */
typedef struct {
    wpe_matrix out, grad_out;
    const void *lse, *grad_lse; /* one element a query */
    wpe_matrix_out dq, dr;
    wpe_attention_sums sums;
} wpe_attention_gradients;
typedef void wpe_attention_backward_fn(const wpe_attention *a, const void *packed,
                                       const wpe_attention_gradients *gradients, int64_t begin,
                                       int64_t end, void *workspace);

/* One query, from keys as they lie; table (rows, head_size) in rising delta, where there is one. */
typedef void wpe_attention_decode_fn(const wpe_attention *a, wpe_matrix table, wpe_matrix_out out,
                                     void *lse, void *workspace);

/* out[r][c] = sum over parts (0: none, zero) of x[part][r][c] in order, rounded to the storage
 * type; rows of x have `stride` elements of the kernel's own type, parts lie `part` apart. */
typedef void wpe_attention_store_fn(wpe_matrix_out out, int storage, const void *x, int64_t rows,
                                    int64_t cols, int64_t stride, int64_t parts, int64_t part);

/* The kernels of one own type. */
typedef struct {
    wpe_attention_sizes_fn *sizes;
    wpe_attention_keys_fn *keys;
    wpe_attention_zone_size_fn *zone_size;
    wpe_attention_pack_zone_fn *pack_zone;
    wpe_attention_pack_fn *pack;
    wpe_attention_forward_fn *forward;
    wpe_attention_backward_fn *backward;
    wpe_attention_decode_fn *decode;
    wpe_attention_store_fn *store;
} wpe_attention_kernels;

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
    wpe_attention_kernels attention[2]; /* of float, of double */
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
