/* wavepe.h: every kernel's contract, and the table of function pointers.
 *
 * Kernels know no framework: pointers, sizes, and strides counted in elements. The caller checks,
 * allocates, owns the threads and splits the ranges. No kernel allocates, keeps state or fails:
 * what a contract requires is an assert, in builds with WPE_ASSERT. Each table below is built from
 * the same sources for one instruction set (see kernels/variant.c).
 *
 * Every contract requires, unless it says otherwise: sizes are not negative; no product of sizes
 * and strides overflows; pointers are aligned to their elements; outputs overlap neither inputs nor
 * each other. Strides may be zero or negative; those of outputs let no two elements share memory.
 */
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

/* psi((t - shift) / scale), element by element. METHODS 1 [W].
 * t - shift is rounded to the kernel's dtype. All else is double, and the result is rounded once;
 * but haar, which jumps, rounds its quotient to float where the dtype is not double. Requires: kind
 * is a wpe_kind; pointers to n elements of the kernel's dtype. `out` may be t, scale or shift where
 * they have its stride. Writes: n elements of out. */
typedef void wpe_psi_fn(int kind, void *out, const void *t, const void *scale, const void *shift,
                        int64_t n, int64_t out_stride, int64_t t_stride, int64_t scale_stride,
                        int64_t shift_stride);

/* out[r][c] = psi((sign * offsets[r] - shift[c]) / scale[c]), in double, rounded once. [W]
 * Requires: sign is 1 or -1; |offsets| <= 2^53.
 * Writes: rows x cols elements of out. */
typedef struct {
    int64_t rows, cols;
    int64_t out_row_stride, out_col_stride, offsets_stride, scale_stride, shift_stride;
} wpe_wavelet_shape;
typedef void wpe_wavelet_table_fn(int kind, int sign, void *out, const int64_t *offsets,
                                  const double *scale, const double *shift,
                                  const wpe_wavelet_shape *shape);

/* The table's gradient: grad_scale[c] = sum over r of grad[r][c] * d out[r][c] / d scale[c], and
 * likewise for shift. Rows are summed in order. The shape's out strides are those of grad.
 * Requires: as wavelet_table.
 * Writes: cols elements of grad_scale and of grad_shift, both dense. */
typedef void wpe_wavelet_backward_fn(int kind, int sign, double *grad_scale, double *grad_shift,
                                     const double *grad, const int64_t *offsets,
                                     const double *scale, const double *shift,
                                     const wpe_wavelet_shape *shape);

/* cos and sin of position * inv_freq, times factor, element by element. [R]
 * The product is taken without rounding error where position is an integer and |position| <= 2^31.
 * Requires: n elements of position, inv_freq and factor, finite.
 * Writes: n elements of cos and of sin. */
typedef void wpe_rope_table_fn(void *cos, void *sin, const double *position, const double *inv_freq,
                               const double *factor, int64_t n, int64_t cos_stride,
                               int64_t sin_stride, int64_t position_stride, int64_t inv_freq_stride,
                               int64_t factor_stride);

/* Rotates the first 2 * pairs of head_size elements of outer x inner rows and copies the rest. [R]
 * cos and sin are float (double for f64) and hold `pairs` elements a row.
 * Requires: 2 * pairs <= head_size. out may be x, with x's strides.
 * Writes: outer x inner x head_size elements of out. */
typedef struct {
    int64_t outer, inner, head_size, pairs;
    int64_t out_stride[3], x_stride[3], cos_stride[3], sin_stride[3]; /* outer, inner, element */
    int interleaved, inverse;
} wpe_rope_shape;
typedef void wpe_rope_fn(void *out, const void *x, const void *cos, const void *sin,
                         const wpe_rope_shape *shape);

/* Query rows for which relative_bias uses a panel of the table while it is in cache: a good unit
 * for callers to split at. */
enum { WPE_BIAS_BLOCK = 48 };

/* The query-dependent relative term: out[i][j] = q[i] . p[i + shift - j]. [W][S]
 * shift is keys - queries - first; i + shift - j is a row of the table. Rows outside of it count as
 * zero, or as the nearest row. Subnormal inputs and results count as zero (see flush.h).
 * Requires: `packed` is p as pack_table writes it; begin <= end <= queries; rows > 0 or beyond is
 * WPE_ZERO.
 * Writes: query rows begin..end-1 of out, so that callers can split them; each row's bits are the
 * same wherever they do. */
typedef struct {
    int64_t queries, keys, rows, head_size, shift;
    int64_t out_row_stride, out_col_stride, q_row_stride, q_col_stride;
    int beyond;
} wpe_bias_shape;

/* Packs the table p (rows, head_size).
 * Requires: `packed` holds packed_size(rows, head_size) elements, on a multiple of 64 bytes.
 * Writes: all of them. */
typedef int64_t wpe_packed_size_fn(int64_t rows, int64_t head_size);
typedef void wpe_pack_table_fn(void *packed, const void *p, int64_t rows, int64_t head_size,
                               int64_t row_stride, int64_t col_stride);
typedef void wpe_relative_bias_fn(void *out, const void *q, const void *packed,
                                  const wpe_bias_shape *shape, int64_t begin, int64_t end);

/* The linear map behind it: skewed[i][j] = t[i][i + shift - j] for a matrix t (queries, rows); and
 * its transpose, the gradient, which adds up what fell on the same element.
 * Requires: rows > 0 or beyond is WPE_ZERO.
 * Writes: skew: queries x keys elements; unskew: queries x rows. */
typedef struct {
    int64_t queries, keys, rows, shift;
    int64_t skewed_row_stride, skewed_col_stride; /* of (queries, keys) */
    int64_t t_row_stride, t_col_stride;           /* of (queries, rows) */
    int beyond;
} wpe_skew_shape;
typedef void wpe_skew_fn(void *skewed, const void *t, const wpe_skew_shape *shape);
typedef void wpe_unskew_fn(void *t, const void *skewed, const wpe_skew_shape *shape);

/* ---- attention [W][S][X][A] ------------------------------------------------------------------
 *
 * score[i][j] = (q_i . k_j + r_i . p[delta - first]) * scale - slope * |delta|, where delta = i +
 * offset - j, plus bias[delta - first_delta]; then softcap * tanh(score / softcap). Softmax over
 * the keys that i sees. q, k, v and the results are of a storage type. What is packed, sums, lse
 * and the workspace are of the kernel's own type: float (for f32, bf16, f16), or double. Subnormal
 * inputs and results count as zero (see flush.h).
 *
 * Every attention kernel requires of a wpe_attention: offset and window within +-2^60; 0 <=
 * first_key
 * <= end_key <= keys; scale and softcap are finite; run_begin and run_end never fall, and
 * lie in 0..keys; segments only where queries = keys. */

/* Queries are worked on in blocks of so many rows, keys in tiles of so many columns. Both are part
 * of the result's bits. */
enum { WPE_QUERY_BLOCK = 96, WPE_KEY_BLOCK = 192 };

/* What a call is for: the sizes of its memory, and how its keys are packed. */
enum wpe_pass { WPE_FORWARD, WPE_BACKWARD, WPE_DECODE };

typedef struct {
    const void *data;
    int64_t row_stride, col_stride;
} wpe_matrix;
typedef struct {
    void *data;
    int64_t row_stride, col_stride;
} wpe_matrix_out;

/* Rows of a relative table as products of two small matrices, rows = C U^T; or as they are (basis
 * NULL, rank = head size). */
typedef struct {
    int64_t rows, rank;
    int not_finite;                       /* whether C or U holds NaN or Inf */
    const void *scores;                   /* C^T */
    const void *gradient;                 /* C */
    const void *basis, *transposed_basis; /* U, U^T, or NULL */
} wpe_zone;

/* A table: its zones in the order of falling delta, the last one ending at delta = first_delta. */
typedef struct {
    int64_t rows, first_delta;
    int beyond, zone_count;
    const wpe_zone *zones;
} wpe_relative;

/* One head's bias: values[r * stride], of the kernel's own type, belongs to delta = first_delta +
 * r. A delta without a value gets zero, or the nearest one. rows 0: none. */
typedef struct {
    const void *values;
    int64_t rows, stride, first_delta;
    int beyond;
} wpe_delta_bias;

/* One head: all that its score, its softmax and who sees whom depend on. */
typedef struct {
    int64_t queries, keys, head_size, value_size;
    int64_t offset;               /* position of query 0, counted from key 0 */
    double scale, slope, softcap; /* softcap 0: none */
    int storage;                  /* wpe_dtype of q, k, v and the results */
    wpe_matrix q, k, v, r;        /* r: multiplied with the table; NULL: q is */
    const wpe_relative *relative; /* NULL: no table */
    wpe_delta_bias bias;          /* in the score: not scaled */

    /* Hidden are keys with delta < 0 if causal, with delta >= window, before first_key or from
     * end_key on; outside of the query's run; of another segment than the query's; and those whose
     * mask is 0. NULL where there is none. */
    int causal;
    int64_t window, first_key, end_key;
    const int64_t *run_begin, *run_end; /* of each query: keys begin..end-1 */
    const int64_t *segments;            /* of each key, dense */
    const uint8_t *key_mask;            /* of each key */
    const uint8_t *mask;
    int64_t key_mask_stride, mask_row_stride, mask_col_stride;

    /* Dropout: the weight of (i, j) is kept, times keep_scale, where the hash of (seed, drop_row +
     * i, j) is at least drop_below. drop_below 0: none. */
    uint64_t seed, drop_row;
    uint64_t drop_below; /* of 2^32 */
    double keep_scale;
} wpe_attention;

/* How much memory a call needs, in elements of the kernel's own type. */
typedef struct {
    int64_t packed;           /* keys and values of a key head; decode: 0 */
    int64_t workspace;        /* scratch of a thread */
    int64_t dk_rows, dk_cols; /* backward's sums: padded rows and columns */
    int64_t dv_cols;          /* dv has dk_rows rows */
    int64_t dp_rows;          /* dp has dk_cols columns */
} wpe_attention_sizes;
typedef wpe_attention_sizes wpe_attention_sizes_fn(const wpe_attention *a, enum wpe_pass pass);

/* Return the keys that queries begin..end-1 may see; neither bound falls with the queries.
 * Requires: 0 <= begin < end <= queries. */
typedef struct {
    int64_t begin, end;
} wpe_range;
typedef wpe_range wpe_attention_seen_keys_fn(const wpe_attention *a, int64_t begin, int64_t end);

/* Packs keys begin..end-1 and their values, for forward or backward.
 * Requires: `packed` holds sizes.packed elements, on a multiple of 64 bytes; begin is a multiple of
 * the key block, and so is end, or it is the number of keys; begin < end.
 * Writes: what belongs to these keys, so that different ranges may be packed by different threads.
 */
typedef void wpe_attention_pack_fn(const wpe_attention *a, void *packed, enum wpe_pass pass,
                                   int64_t begin, int64_t end);

/* Packs a zone: rows (rows, rank) and basis (head_size, rank; data NULL for none) in rising delta.
 * Requires: zone->rows > 0 and zone->rank are given; `memory` holds zone_size elements of the
 * kernel's own type, on a multiple of 64 bytes; it lives as long as the zone.
 * Writes: the memory, and the other members of the zone. */
typedef int64_t wpe_attention_zone_size_fn(int64_t rows, int64_t rank, int64_t head_size);
typedef void wpe_attention_pack_zone_fn(wpe_zone *zone, void *memory, int storage,
                                        int64_t head_size, wpe_matrix rows, wpe_matrix basis);

/* Attention of queries begin..end-1.
 * Requires: begin is a multiple of the query block, and so is end, or it is the number of queries;
 * `packed` is what pack writes for forward, for all keys; workspace as sizes says.
 * Writes: rows begin..end-1 of out (a row per query), and of lse (an element per query). */
typedef void wpe_attention_forward_fn(const wpe_attention *a, const void *packed,
                                      wpe_matrix_out out, void *lse, int64_t begin, int64_t end,
                                      void *workspace);

/* What is added up over the queries of one key head. The caller clears it first, and stores it with
 * `store`. dp holds the table's rows in falling delta, dbias the bias.rows numbers in rising delta;
 * NULL where they are not wanted. */
typedef struct {
    void *dk, *dv, *dp, *dbias;
} wpe_attention_sums;

/* Gradients of attention, from those of out and lse (grad_lse NULL: none).
 * Requires: as forward, packed for backward; out and lse are forward's results; the sums' memory
 * has the sizes' rows and columns; keys > 0. Writes: rows begin..end-1 of dq, and of dr where r is
 * another tensor than q (else its gradient is part of dq); adds to the sums. */
typedef struct {
    wpe_matrix out, grad_out;
    const void *lse, *grad_lse; /* an element per query */
    wpe_matrix_out dq, dr;
    wpe_attention_sums sums;
} wpe_attention_gradients;
typedef void wpe_attention_backward_fn(const wpe_attention *a, const void *packed,
                                       const wpe_attention_gradients *gradients, int64_t begin,
                                       int64_t end, void *workspace);

/* Attention of one query, from keys as they lie.
 * Requires: queries is 1; table (rows, head_size) holds a->relative's rows in rising delta, where
 * there is one; workspace as sizes says for WPE_DECODE.
 * Writes: a row of out, an element of lse. */
typedef void wpe_attention_decode_fn(const wpe_attention *a, wpe_matrix table, wpe_matrix_out out,
                                     void *lse, void *workspace);

/* out[r][c] = sum over parts (0: none, zero) of x[part][r][c] in order, rounded to the storage
 * type. Requires: rows of x lie x_row_stride elements of the kernel's own type apart, parts
 * part_stride. Writes: rows x cols elements of out. */
typedef void wpe_attention_store_fn(wpe_matrix_out out, int storage, const void *x, int64_t rows,
                                    int64_t cols, int64_t x_row_stride, int64_t parts,
                                    int64_t part_stride);

/* The kernels of one own type. */
typedef struct {
    wpe_attention_sizes_fn *sizes;
    wpe_attention_seen_keys_fn *seen_keys;
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
    const char *name; /* "portable", "avx2", "avx512"; "avx2x2" in development builds */
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
    const wpe_kernels *current;    /* read it by wpe_current: another thread may switch it */
    const char *const *kind_names; /* WPE_KINDS of them */
} wpe_dispatch;
wpe_dispatch *wpe_get_dispatch(void);

/* Return the table in use. At first that is the best one this CPU runs. */
static inline const wpe_kernels *wpe_current(const wpe_dispatch *dispatch) {
    return __atomic_load_n(&dispatch->current, __ATOMIC_ACQUIRE);
}

/* Return table number `index` of those this build holds and this CPU runs, in rising order; NULL
 * past the end. */
const wpe_kernels *wpe_variant(int index);

/* Switch to the variant of that name. Return 0; or -1, with nothing changed, where there is none.
 * Takes the test-only variant of a development build, too, which wpe_variant does not list. */
int wpe_use_variant(const char *name);

#ifdef __cplusplus
}
#endif
#endif
