/* wavepe.h: every kernel's contract, and the table of function pointers.
 *
 * Kernels know no framework. They take pointers, sizes and strides. The caller checks the
 * arguments, allocates memory, owns the threads and splits the ranges. No kernel allocates memory,
 * keeps state or reports an error. What a contract requires is checked by asserts, in builds with
 * WPE_ASSERT. Each table below is compiled from the same sources for one instruction set (see
 * kernels/variant.c).
 *
 * Names: a plural is a count (rows, cols, queries, keys). A range begin..end-1 holds begin and not
 * end. A delta is the query's position less the key's. A stride counts elements, not bytes.
 *
 * Every contract requires the following, unless it says otherwise. Sizes are not negative. No
 * product of sizes and strides overflows. Pointers are aligned to their elements. Outputs overlap
 * neither inputs nor each other. Strides may be zero or negative, but no two elements of an output
 * share memory. */
#ifndef WAVEPE_H
#define WAVEPE_H

#include <stdint.h>

#include "compiler.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Mother wavelets, named in dispatch.c. */
enum wpe_kind { WPE_RICKER, WPE_GAUSSIAN, WPE_MORLET, WPE_HAAR, WPE_KINDS };

/* A delta outside the table reads zeros, or the nearest row. */
enum wpe_beyond { WPE_ZERO, WPE_EDGE };

/* Storage types. Arithmetic on bf16 and f16 is done in float (in psi: double), never in 16 bits. */
enum wpe_dtype { WPE_F16, WPE_BF16, WPE_F32, WPE_F64, WPE_DTYPES };

/* out = psi((t - shift) / scale), element by element. METHODS 1 [W].
 * t - shift is rounded to the kernel's dtype. All further arithmetic is double, and the result is
 * rounded once. Exception: haar rounds the quotient to float, unless the dtype is double, because
 * haar jumps there.
 * Requires: kind is a wpe_kind; each pointer holds n elements of the kernel's dtype. `out` may be
 * t, scale or shift, if their strides are equal.
 * Writes: n elements of out. */
typedef void wpe_psi_fn(int kind, void *out, const void *t, const void *scale, const void *shift,
                        int64_t n, int64_t out_stride, int64_t t_stride, int64_t scale_stride,
                        int64_t shift_stride);

/* out[r][c] = psi((sign * offsets[r] - shift[c]) / scale[c]), computed in double, rounded once. [W]
 * Requires: sign is 1 or -1; |offsets| <= 2^53.
 * Writes: rows x cols elements of out. */
typedef struct {
    int64_t rows, cols;
    int64_t out_row_stride, out_col_stride, offsets_stride, scale_stride, shift_stride;
} wpe_wavelet_shape;
typedef void wpe_wavelet_table_fn(int kind, int sign, void *out, const int64_t *offsets,
                                  const double *scale, const double *shift,
                                  const wpe_wavelet_shape *shape);

/* The gradient of wavelet_table:
 *     grad_scale[c] = sum over r of grad[r][c] * d out[r][c] / d scale[c]
 * and the same for shift. Rows are summed in order.
 * Requires: as wavelet_table; the shape's out strides are the strides of grad.
 * Writes: cols elements of grad_scale and of grad_shift, with stride 1. */
typedef void wpe_wavelet_backward_fn(int kind, int sign, double *grad_scale, double *grad_shift,
                                     const double *grad, const int64_t *offsets,
                                     const double *scale, const double *shift,
                                     const wpe_wavelet_shape *shape);

/* cos(position * inv_freq) * factor and sin(position * inv_freq) * factor, element by element. [R]
 * The angle has no rounding error if position is an integer and |position| <= 2^31.
 * Requires: n finite elements of position, inv_freq and factor.
 * Writes: n elements of cos and of sin. */
typedef void wpe_rope_table_fn(void *cos, void *sin, const double *position, const double *inv_freq,
                               const double *factor, int64_t n, int64_t cos_stride,
                               int64_t sin_stride, int64_t position_stride, int64_t inv_freq_stride,
                               int64_t factor_stride);

/* Rotate the first 2 * pairs elements of each of the outer x inner rows. Copy the other elements of
 * the row, which has head_size elements. [R]
 * Requires: 2 * pairs <= head_size; cos and sin are float (for f64: double) and hold `pairs`
 * elements for each row. out may be x, if their strides are equal.
 * Writes: outer x inner x head_size elements of out. */
typedef struct {
    int64_t outer, inner, head_size, pairs;
    int64_t out_stride[3], x_stride[3], cos_stride[3], sin_stride[3]; /* outer, inner, element */
    int interleaved, inverse;
} wpe_rope_shape;
typedef void wpe_rope_fn(void *out, const void *x, const void *cos, const void *sin,
                         const wpe_rope_shape *shape);

/* relative_bias handles this many query rows with one panel of the table while that is in cache.
 * Callers should split the query rows at multiples of it. */
enum { WPE_BIAS_BLOCK = 48 };

/* The query-dependent relative term: out[i][j] = q[i] . p[i + shift - j]. [W][S]
 * i + shift - j is the row of the table p; shift is keys - queries - first_delta, where first_delta
 * is the delta of row 0. Rows outside the table count as zero, or as the nearest row. Subnormal
 * inputs and results count as zero (see flush.h).
 * Requires: `packed` is p as pack_table writes it; begin <= end <= queries; rows > 0 or beyond is
 * WPE_ZERO.
 * Writes: query rows begin..end-1 of out. A row's bits do not depend on begin and end, so callers
 * can split the rows. */
typedef struct {
    int64_t queries, keys, rows, head_size, shift;
    int64_t out_row_stride, out_col_stride, q_row_stride, q_col_stride;
    int beyond;
} wpe_bias_shape;

/* Pack the table p (rows, head_size) for relative_bias.
 * Requires: `packed` holds packed_size(rows, head_size) elements and is aligned to 64 bytes.
 * Writes: all elements of `packed`. */
typedef int64_t wpe_packed_size_fn(int64_t rows, int64_t head_size);
typedef void wpe_pack_table_fn(void *packed, const void *p, int64_t rows, int64_t head_size,
                               int64_t row_stride, int64_t col_stride);
typedef void wpe_relative_bias_fn(void *out, const void *q, const void *packed,
                                  const wpe_bias_shape *shape, int64_t begin, int64_t end);

/* skew is the linear map that turns t = q p^T (queries, rows) into the relative term:
 *     skewed[i][j] = t[i][i + shift - j]
 * unskew is its transpose, which is its gradient: t[i][c] is the sum of all skewed[i][j] that read
 * t[i][c].
 * Requires: rows > 0 or beyond is WPE_ZERO.
 * Writes: skew writes queries x keys elements, unskew writes queries x rows elements. */
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
 * With delta = i + offset - j:
 *     score[i][j] = (q_i . k_j + r_i . p[delta - first_delta]) * scale - slope * |delta|
 *                   + bias[delta - first_delta]
 * where the table p and the bias each have a first_delta of their own. Then the score becomes
 * softcap * tanh(score / softcap), and softmax is taken over the keys that query i sees. The sink
 * is one score more, which has no value: out = sum of exp(score[j]) v_j / (sum of exp(score[j]) +
 * exp(sink)), and lse counts it.
 *
 * q, k, v and the results are of a storage type. Packed memory, sums, lse and the workspace are of
 * the compute type: float (for f32, bf16, f16) or double (for f64). Subnormal inputs and results
 * count as zero (see flush.h).
 *
 * Every attention kernel requires of a wpe_attention: offset and window lie within +-2^60, and
 * first deltas within +-2^61; r is given or table_size is head_size; 0 <= first_key <= end_key <=
 * keys; scale and softcap are finite; run_begin and run_end never fall from one query to the next
 * and lie in 0..keys; segments is NULL unless queries = keys. */

/* Queries are handled in blocks of WPE_QUERY_BLOCK rows, keys in tiles of WPE_KEY_BLOCK columns.
 * Other sizes give results with other bits. */
enum { WPE_QUERY_BLOCK = 96, WPE_KEY_BLOCK = 192 };

/* The pass of a call: the sizes of its memory and the packing of its keys depend on it. */
enum wpe_pass { WPE_FORWARD, WPE_BACKWARD };

/* Decode takes up to WPE_DECODE_QUERIES queries. A part of its keys is WPE_DECODE_KEYS of them,
 * which is a multiple of WPE_KEY_BLOCK. Other parts give results with other bits. */
enum { WPE_DECODE_QUERIES = 16, WPE_DECODE_KEYS = 8 * WPE_KEY_BLOCK };

typedef struct {
    const void *data;
    int64_t row_stride, col_stride;
} wpe_matrix;
typedef struct {
    void *data;
    int64_t row_stride, col_stride;
} wpe_matrix_out;

/* Consecutive rows of a relative table. They are the product C U^T of the coefficients C (rows,
 * rank) and the basis U (table_size, rank). Without a basis (NULL) the rows are C itself, and rank
 * is the table size. */
typedef struct {
    int64_t rows, rank;
    const void *coefficients_t, *basis; /* panels of C^T, and of U or NULL */
    /* backward only */
    int not_finite;                     /* whether C or U holds NaN or Inf */
    const void *coefficients, *basis_t; /* panels of C, and of U^T or NULL */
} wpe_zone;

/* A relative table: its zones in falling delta. The last row of the last zone has first_delta. */
typedef struct {
    int64_t rows, first_delta;
    int beyond, zone_count;
    const wpe_zone *zones;
} wpe_relative;

/* Return the rows of a table, in rising delta, that the deltas least..most read. Row 0 has
 * first_delta. With WPE_EDGE it is at least one row.
 * Requires: with WPE_EDGE, rows > 0. */
typedef struct {
    int64_t begin, end;
} wpe_range;
static inline wpe_range wpe_rows_read(int64_t rows, int64_t first_delta, int beyond, int64_t least,
                                      int64_t most) {
    wpe_range read = {least - first_delta, most + 1 - first_delta};
    read.begin = read.begin < 0 ? 0 : read.begin < rows ? read.begin : rows;
    read.end = read.end < read.begin ? read.begin : read.end < rows ? read.end : rows;
    if (beyond == WPE_EDGE) { /* deltas outside the table read its nearest row */
        if (read.begin == rows) read.begin--;
        if (read.end == read.begin) read.end++;
    }
    return read;
}

/* One head's bias: values[r * stride] belongs to delta = first_delta + r. Other deltas get zero, or
 * the nearest value. The values are of the compute type. rows 0 means no bias. */
typedef struct {
    const void *values;
    int64_t rows, stride, first_delta;
    int beyond;
} wpe_delta_bias;

/* One query head: its tensors and options, and which keys each query sees. */
typedef struct {
    int64_t queries, keys, head_size, value_size;
    int64_t group;                /* the query heads that share the key head */
    int64_t table_size;           /* columns of r and p */
    int64_t offset;               /* position of query 0, if key 0 has position 0 */
    double scale, slope, softcap; /* softcap 0 means none */
    double sink;                  /* -INFINITY means none */
    int storage;                  /* wpe_dtype of q, k, v and the results */
    wpe_matrix q, k, v, r;        /* r . p is the relative term; r.data NULL: r is q */
    const wpe_relative *relative; /* the table p, or NULL */
    wpe_delta_bias bias;          /* added after the scale */

    /* A key is hidden from a query by any of: delta < 0, if causal; delta >= window; a number below
     * first_key, or end_key and above; a place outside the query's run; another segment than the
     * query's; a 0 in key_mask or in mask. A NULL pointer hides nothing. */
    int causal;
    int64_t window, first_key, end_key;
    const int64_t *run_begin, *run_end; /* query i sees keys run_begin[i]..run_end[i]-1 */
    const int64_t *segments;            /* one number for each key, with stride 1 */
    const uint8_t *key_mask;            /* (keys) */
    const uint8_t *mask;                /* (queries, keys) */
    int64_t key_mask_stride, mask_row_stride, mask_col_stride;

    /* Dropout. The hash of (seed, drop_row + i, j) lies in 0..2^32-1. The weight of (i, j) is
     * dropped if its hash is below drop_below, else multiplied by keep_scale. drop_below 0 means no
     * dropout. */
    uint64_t seed, drop_row;
    uint64_t drop_below;
    double keep_scale;
} wpe_attention;

/* How much memory a call needs, in elements of the compute type. */
typedef struct {
    int64_t packed;           /* packed keys and values of one key head */
    int64_t workspace;        /* scratch memory of one thread */
    int64_t dk_rows, dk_cols; /* backward's sum dk, with padded rows and columns */
    int64_t dv_cols;          /* backward's sum dv, which has dk_rows rows */
    int64_t dp_rows, dp_cols; /* backward's sum dp */
} wpe_attention_sizes;
typedef wpe_attention_sizes wpe_attention_sizes_fn(const wpe_attention *a, enum wpe_pass pass);

/* Return a range of keys that holds every key that queries begin..end-1 see. For later queries
 * neither end of the range is smaller.
 * Requires: 0 <= begin < end <= queries. */
typedef wpe_range wpe_attention_seen_keys_fn(const wpe_attention *a, int64_t begin, int64_t end);

/* Pack keys begin..end-1 and their values, for forward or backward.
 * Requires: `packed` holds sizes.packed elements and is aligned to 64 bytes; begin < end; begin is
 * a multiple of WPE_KEY_BLOCK; end is such a multiple, or the number of keys.
 * Writes: the part of `packed` that belongs to these keys. So several threads may each pack a range
 * of their own. */
typedef void wpe_attention_pack_fn(const wpe_attention *a, void *packed, enum wpe_pass pass,
                                   int64_t begin, int64_t end);

/* Pack a zone from its coefficients (`rows`, in rising delta) and its basis (data NULL: none), for
 * forward or backward.
 * Requires: zone->rows > 0 and zone->rank are set; `rows` is (zone->rows, zone->rank), `basis` is
 * (table_size, zone->rank); `memory` holds zone_size elements of the compute type, is aligned to 64
 * bytes and lives as long as the zone.
 * Writes: the memory, and the other members of the zone. */
typedef int64_t wpe_attention_zone_size_fn(int64_t rows, int64_t rank, int64_t table_size,
                                           enum wpe_pass pass);
typedef void wpe_attention_pack_zone_fn(wpe_zone *zone, void *memory, int storage,
                                        int64_t table_size, wpe_matrix rows, wpe_matrix basis,
                                        enum wpe_pass pass);

/* Attention of queries begin..end-1.
 * Requires: begin is a multiple of WPE_QUERY_BLOCK; end is such a multiple, or the number of
 * queries; `packed` holds all keys as pack writes them for WPE_FORWARD; workspace holds
 * sizes.workspace elements and is aligned to 64 bytes.
 * Writes: rows begin..end-1 of out (a row per query) and elements begin..end-1 of lse. */
typedef void wpe_attention_forward_fn(const wpe_attention *a, const void *packed,
                                      wpe_matrix_out out, void *lse, int64_t begin, int64_t end,
                                      void *workspace);

/* Gradients that are sums over the queries of one key head. The caller clears them first, and
 * converts them with `store` at the end. dp holds the table's rows in falling delta, dbias the
 * bias.rows values in rising delta. dp and dbias may be NULL: then they are not computed. */
typedef struct {
    void *dk, *dv, *dp, *dbias;
} wpe_attention_sums;

/* Gradients of attention, from the gradients of out and of lse (grad_lse NULL: zero).
 * Requires: as forward, but packed for WPE_BACKWARD; keys > 0; out and lse are forward's results;
 * the sums have the rows and columns that sizes returns.
 * Writes: rows begin..end-1 of dq, and of dr if r is given (else dq holds its gradient, too). Adds
 * to the sums. */
typedef struct {
    wpe_matrix out, grad_out;
    const void *lse, *grad_lse; /* (queries) */
    wpe_matrix_out dq, dr;
    wpe_attention_sums sums;
} wpe_attention_gradients;
typedef void wpe_attention_backward_fn(const wpe_attention *a, const void *packed,
                                       const wpe_attention_gradients *gradients, int64_t begin,
                                       int64_t end, void *workspace);

/* Return whether decode, and not forward, computes a call. Decode serves few queries against a
 * cache of keys. */
static inline int wpe_decodes(int64_t queries, int64_t keys) {
    return queries == 1 || (queries <= WPE_DECODE_QUERIES && queries < keys);
}

/* How much memory decode needs, in elements of the compute type.
 * Requires: the zones of a->relative are packed, or have no basis. */
typedef struct {
    int64_t sums;      /* the sums of one query head, over one part of the keys */
    int64_t workspace; /* scratch memory of one thread */
} wpe_decode_sizes;
typedef wpe_decode_sizes wpe_attention_decode_sizes_fn(const wpe_attention *a, int64_t heads);

/* The keys are cut into parts by their number alone, so that every front end computes the same
 * bits. There is at least one part; `part` counts from 0. Return their number, and the keys of one.
 */
static inline int64_t wpe_decode_parts(int64_t keys) {
    return keys > 0 ? (keys - 1) / WPE_DECODE_KEYS + 1 : 1;
}

static inline wpe_range wpe_decode_part(int64_t keys, int64_t part) {
    int64_t begin = part * WPE_DECODE_KEYS, rest = keys - begin;
    return (wpe_range){begin, begin + (rest < WPE_DECODE_KEYS ? rest : WPE_DECODE_KEYS)};
}

/* The most rows of a table that one part reads. */
static inline int64_t wpe_decode_most_rows(int64_t queries, int64_t keys) {
    return (keys < WPE_DECODE_KEYS ? keys : WPE_DECODE_KEYS) + queries;
}

/* Return the rows of a->relative, in rising delta, that queries read with keys begin..end-1. */
static inline wpe_range wpe_decode_rows(const wpe_attention *a, int64_t begin, int64_t end) {
    const wpe_relative *p = a->relative;
    int64_t least = a->offset - (end - 1), most = a->offset + a->queries - 1 - begin;
    if (a->causal && least < 0) least = 0;
    if (most >= a->window) most = a->window - 1;
    return wpe_rows_read(p->rows, p->first_delta, p->beyond, least, most);
}

/* Attention of few queries over keys begin..end-1, for `heads` query heads that share a key head.
 * It reads keys and values once for all of them, where they are, without packing. A table is packed
 * as for forward; the rows that wpe_decode_rows returns are enough. The part from key 0 on counts
 * the sink.
 * Requires: 0 < heads <= group; the heads a[0..heads-1] have the same members but for q, r, scale,
 * slope, sink, relative's zones, bias.values, mask and drop_row; zones of two heads have the same
 * rows and ranks; 0 < queries <= WPE_DECODE_QUERIES; begin is a multiple of WPE_KEY_BLOCK; begin <=
 * end <= keys; workspace holds as many elements as decode_sizes returns for these heads, and is
 * aligned to 64 bytes.
 * Writes: sums, one head after the other. A head's bits do not depend on the other heads. */
typedef void wpe_attention_decode_fn(const wpe_attention *a, int64_t heads, int64_t begin,
                                     int64_t end, void *sums, void *workspace);

/* The results of a query head, from decode's sums over all parts of the keys. The sums of the parts
 * are part_stride elements apart. They are added in order.
 * Requires: parts > 0.
 * Writes: all rows of out and all elements of lse. It also overwrites the sums. */
typedef void wpe_attention_merge_fn(const wpe_attention *a, void *sums, int64_t parts,
                                    int64_t part_stride, wpe_matrix_out out, void *lse);

/* out[r][c] = sum of x[part][r][c] over `parts` parts, in order, rounded to the storage type. No
 * parts give 0.
 * Requires: x is of the compute type; its columns have stride 1, its rows x_row_stride and its
 * parts part_stride.
 * Writes: rows x cols elements of out. */
typedef void wpe_attention_store_fn(wpe_matrix_out out, int storage, const void *x, int64_t rows,
                                    int64_t cols, int64_t x_row_stride, int64_t parts,
                                    int64_t part_stride);

/* The attention kernels of one compute type. */
typedef struct {
    wpe_attention_sizes_fn *sizes;
    wpe_attention_seen_keys_fn *seen_keys;
    wpe_attention_zone_size_fn *zone_size;
    wpe_attention_pack_zone_fn *pack_zone;
    wpe_attention_pack_fn *pack;
    wpe_attention_forward_fn *forward;
    wpe_attention_backward_fn *backward;
    wpe_attention_decode_sizes_fn *decode_sizes;
    wpe_attention_decode_fn *decode;
    wpe_attention_merge_fn *merge;
    wpe_attention_store_fn *store;
} wpe_attention_kernels;

/* The kernels of one instruction set. Arrays are indexed by storage type; NULL: no such kernel. */
typedef struct {
    const char *name; /* "portable", "avx2", "avx512"; "avx2x2" in development builds */
    wpe_psi_fn *psi[WPE_DTYPES];
    wpe_wavelet_table_fn *wavelet_table[WPE_DTYPES];
    wpe_wavelet_backward_fn *wavelet_backward; /* double only */
    wpe_rope_table_fn *rope_table[WPE_DTYPES];
    wpe_rope_fn *rope[WPE_DTYPES];
    wpe_packed_size_fn *packed_size[WPE_DTYPES];
    wpe_pack_table_fn *pack_table[WPE_DTYPES];
    wpe_relative_bias_fn *relative_bias[WPE_DTYPES];
    wpe_skew_fn *skew[WPE_DTYPES];
    wpe_unskew_fn *unskew[WPE_DTYPES];
    wpe_attention_kernels attention[2]; /* compute type float; double */
} wpe_kernels;

/* The table in use. There is one object for the whole process, and the NumPy module owns it. The
 * other bindings get it from that module and link no kernels. So a switch of the variant reaches
 * all bindings. */
typedef struct {
    const wpe_kernels *current;    /* read it with wpe_current: another thread may switch it */
    const char *const *kind_names; /* WPE_KINDS names */
} wpe_dispatch;
wpe_dispatch *wpe_get_dispatch(void);

/* Return the table in use. Before any switch it is the last one that wpe_variant lists. */
static inline const wpe_kernels *wpe_current(const wpe_dispatch *dispatch) {
    return __atomic_load_n(&dispatch->current, __ATOMIC_ACQUIRE);
}

/* Return table number `index` of the tables that this build holds and this CPU can run, or NULL
 * past the last one. Later tables use wider instruction sets. */
const wpe_kernels *wpe_variant(int index);

/* Switch to the variant with this name and return 0. Return -1 and change nothing if there is no
 * such variant. wpe_variant does not list the test-only variant of development builds. */
int wpe_use_variant(const char *name);

#ifdef __cplusplus
}
#endif
#endif
