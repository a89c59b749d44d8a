/* attention_rows.c: scratch memory, and rows between storage and REAL. */

#define STEP  (PANEL < 16 ? 16 : PANEL) /* see attention_pack.c */
#define CHUNK 64                        /* elements converted at once */

/* Memory that is handed out piece by piece; without a base, only counted. */
typedef struct {
    REAL *base;
    int64_t used;
} NAME(memory);
#define MEMORY NAME(memory)

INLINE REAL *NAME(take)(MEMORY *memory, int64_t count) {
    REAL *piece = memory->base ? memory->base + memory->used : NULL;
    memory->used += count;
    return piece;
}

/* Whether a sum of x * 0 says that some x was NaN or Inf. */
INLINE int NAME(is_not_zero)(V check) {
    REAL sum = 0;
    for (int l = 0; l < LANES; l++) sum += check[l];
    return sum != 0; /* a NaN is */
}

INLINE int NAME(any_not_finite)(const REAL *x, int64_t count) { /* count: whole vectors */
    V check = {0};
    for (int64_t i = 0; i < count; i += LANES) check += LOAD_REAL(x + i, 1, LANES) * 0;
    return NAME(is_not_zero)(check);
}

/* dst[0..count) = factor * src, from storage. */
static void NAME(read_row)(REAL *dst, const void *src, int storage, int64_t stride, int64_t count,
                           REAL factor) {
    int64_t x = 0;
#define READ(storage, type)                                                               \
    case storage:                                                                         \
        for (; stride == 1 && x + LANES <= count; x += LANES)                             \
            STORE_REAL(dst + x, 1, LANES,                                                 \
                       factor * PASTE2(load_, type)((const type *)src + x, 1, LANES));    \
        for (; x < count; x += LANES) {                                                   \
            int lanes = (int)smaller(LANES, count - x);                                   \
            V value = PASTE2(load_, type)((const type *)src + x * stride, stride, lanes); \
            STORE_REAL(dst + x, 1, lanes, factor * value);                                \
        }                                                                                 \
        break;
    switch (storage) { EACH_STORAGE(READ) }
#undef READ
}

static void NAME(write_row)(void *dst, int storage, int64_t stride, const REAL *src,
                            int64_t count) {
#define WRITE(storage, type)                                              \
    case storage:                                                         \
        for (int64_t x = 0; x < count; x += LANES) {                      \
            int lanes = (int)smaller(LANES, count - x);                   \
            PASTE2(store_, type)((type *)dst + x * stride, stride, lanes, \
                                 LOAD_REAL(src + x, 1, lanes));           \
        }                                                                 \
        break;
    switch (storage) { EACH_STORAGE(WRITE) }
#undef WRITE
}

static const char *NAME(element)(wpe_matrix m, int storage, int64_t row, int64_t col) {
    int64_t size = storage == WPE_F64 ? 8 : storage == WPE_F32 ? 4 : 2;
    return (const char *)m.data + (row * m.row_stride + col * m.col_stride) * size;
}

static wpe_matrix_out NAME(from_row)(wpe_matrix_out m, int storage, int64_t row) {
    wpe_matrix rows = {m.data, m.row_stride, m.col_stride};
    m.data = (void *)NAME(element)(rows, storage, row, 0);
    return m;
}

/* Rows begin..begin+count-1 times factor, dst_row_stride elements apart, zero-filled to `rows`
 * rows. */
static void NAME(load_rows)(REAL *dst, int64_t dst_row_stride, wpe_matrix m, int storage,
                            int64_t begin, int64_t count, int64_t rows, int64_t cols, REAL factor) {
    for (int64_t r = 0; r < rows; r++, dst += dst_row_stride) {
        int64_t filled = r < count ? cols : 0;
        if (filled)
            NAME(read_row)(dst, NAME(element)(m, storage, begin + r, 0), storage, m.col_stride,
                           cols, factor);
        memset(dst + filled, 0, (size_t)(dst_row_stride - filled) * sizeof(REAL));
    }
}

/* The body of attention_store. */
static NOINLINE void NAME(store_rows)(wpe_matrix_out out, int storage, const REAL *x, int64_t rows,
                                      int64_t cols, int64_t x_row_stride, int64_t parts,
                                      int64_t part_stride) {
    REAL chunk[CHUNK];
    for (int64_t r = 0; r < rows; r++) {
        wpe_matrix row = {NAME(from_row)(out, storage, r).data, 0, out.col_stride};
        for (int64_t c = 0; c < cols; c += CHUNK) {
            int64_t count = smaller(CHUNK, cols - c);
            const REAL *from = x + r * x_row_stride + c;
            for (int64_t k = 0; k < count; k++) chunk[k] = parts ? from[k] : 0;
            for (int64_t i = 1; i < parts; i++)
                for (int64_t k = 0; k < count; k++) chunk[k] += from[i * part_stride + k];
            NAME(write_row)((void *)NAME(element)(row, storage, 0, c), storage, out.col_stride,
                            chunk, count);
        }
    }
}

static void NAME(attention_store)(wpe_matrix_out out, int storage, const void *x, int64_t rows,
                                  int64_t cols, int64_t x_row_stride, int64_t parts,
                                  int64_t part_stride) {
    assert(rows >= 0 && cols >= 0 && parts >= 0);
    FLUSHED(NAME(store_rows)(out, storage, x, rows, cols, x_row_stride, parts, part_stride));
}
