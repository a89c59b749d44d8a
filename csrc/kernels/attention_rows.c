/* attention_rows.c: scratch memory, and rows converted between the storage type and REAL. */

#define KEY_STEP    (PANEL < 16 ? 16 : PANEL) /* keys are padded to multiples of it */
#define BUFFER_SIZE 64                        /* elements converted at once */

/* Memory that is given out piece by piece. With a base of NULL it only counts the elements. */
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

/* Return whether some x was NaN or Inf, where `check` is the sum of all x * 0. */
INLINE int NAME(is_not_zero)(V check) {
    REAL sum = 0;
    for (int l = 0; l < LANES; l++) sum += check[l];
    return sum != 0; /* true for NaN */
}

/* Return whether some element is NaN or Inf. Requires: count is a multiple of LANES. */
INLINE int NAME(any_not_finite)(const REAL *x, int64_t count) {
    V check = {0};
    for (int64_t i = 0; i < count; i += LANES) check += LOAD_REAL(x + i, 1, LANES) * 0;
    return NAME(is_not_zero)(check);
}

/* Rows 0..count-1 of dst = factor * rows begin..begin+count-1 of m. Whole vectors are written: up
 * to a multiple of LANES, the columns from `cols` on become factor * 0. */
static void NAME(read_rows)(REAL *dst, int64_t dst_row_stride, wpe_matrix m, int storage,
                            int64_t begin, int64_t count, int64_t cols, REAL factor) {
    int64_t stride = m.col_stride, dense = stride == 1 ? cols : 0, whole = round_down(dense, LANES);
    int rest = (int)(dense - whole);
#define READ(storage, type)                                                                     \
    case storage:                                                                               \
        for (int64_t r = 0; r < count; r++, dst += dst_row_stride) {                            \
            const type *src = (const type *)m.data + (begin + r) * m.row_stride;                \
            for (int64_t x = 0; x < whole; x += LANES)                                          \
                STORE_REAL(dst + x, 1, LANES, factor * PASTE2(load_, type)(src + x, 1, LANES)); \
            if (rest)                                                                           \
                STORE_REAL(dst + whole, 1, LANES,                                               \
                           factor * PASTE2(load_, type)(src + whole, 1, rest));                 \
            for (int64_t x = dense; x < cols; x += LANES) {                                     \
                int lanes = (int)smaller(LANES, cols - x);                                      \
                STORE_REAL(dst + x, 1, LANES,                                                   \
                           factor * PASTE2(load_, type)(src + x * stride, stride, lanes));      \
            }                                                                                   \
        }                                                                                       \
        break;
    switch (storage) { EACH_STORAGE(READ) }
#undef READ
}

/* dst = src for `count` elements, rounded to storage. src has stride 1. */
static void NAME(write_row)(void *dst, int storage, int64_t stride, const REAL *src,
                            int64_t count) {
    int64_t x = 0;
#define WRITE(storage, type)                                                               \
    case storage:                                                                          \
        for (; stride == 1 && x + LANES <= count; x += LANES)                              \
            PASTE2(store_, type)((type *)dst + x, 1, LANES, LOAD_REAL(src + x, 1, LANES)); \
        for (; x < count; x += LANES) {                                                    \
            int lanes = (int)smaller(LANES, count - x);                                    \
            PASTE2(store_, type)((type *)dst + x * stride, stride, lanes,                  \
                                 LOAD_REAL(src + x, 1, lanes));                            \
        }                                                                                  \
        break;
    switch (storage) { EACH_STORAGE(WRITE) }
#undef WRITE
}

/* Return the address of element (row, col). */
static const char *NAME(element)(wpe_matrix m, int storage, int64_t row, int64_t col) {
    int64_t size = storage == WPE_F64 ? 8 : storage == WPE_F32 ? 4 : 2;
    return (const char *)m.data + (row * m.row_stride + col * m.col_stride) * size;
}

/* Return the matrix without the rows before `row`. */
static wpe_matrix_out NAME(from_row)(wpe_matrix_out m, int storage, int64_t row) {
    wpe_matrix rows = {m.data, m.row_stride, m.col_stride};
    m.data = (void *)NAME(element)(rows, storage, row, 0);
    return m;
}

/* read_rows. The other elements of dst (rows, dst_row_stride) become 0. */
static void NAME(load_rows)(REAL *dst, int64_t dst_row_stride, wpe_matrix m, int storage,
                            int64_t begin, int64_t count, int64_t rows, int64_t cols, REAL factor) {
    NAME(read_rows)(dst, dst_row_stride, m, storage, begin, count, cols, factor);
    for (int64_t r = 0; r < rows; r++) {
        int64_t filled = r < count ? cols : 0;
        if (filled < dst_row_stride)
            memset(dst + r * dst_row_stride + filled, 0,
                   (size_t)(dst_row_stride - filled) * sizeof(REAL));
    }
}

/* attention_store, without the change of mode. */
static NOINLINE void NAME(store_rows)(wpe_matrix_out out, int storage, const REAL *x, int64_t rows,
                                      int64_t cols, int64_t x_row_stride, int64_t parts,
                                      int64_t part_stride) {
    REAL buffer[BUFFER_SIZE];
    for (int64_t r = 0; r < rows; r++) {
        wpe_matrix row = {NAME(from_row)(out, storage, r).data, 0, out.col_stride};
        if (parts == 1)
            NAME(write_row)((void *)row.data, storage, out.col_stride, x + r * x_row_stride, cols);
        for (int64_t c = 0; parts != 1 && c < cols; c += BUFFER_SIZE) {
            int64_t count = smaller(BUFFER_SIZE, cols - c);
            const REAL *from = x + r * x_row_stride + c;
            for (int64_t k = 0; k < count; k++) buffer[k] = parts ? from[k] : 0;
            for (int64_t i = 1; i < parts; i++)
                for (int64_t k = 0; k < count; k++) buffer[k] += from[i * part_stride + k];
            NAME(write_row)((void *)NAME(element)(row, storage, 0, c), storage, out.col_stride,
                            buffer, count);
        }
    }
}

static void NAME(attention_store)(wpe_matrix_out out, int storage, const void *x, int64_t rows,
                                  int64_t cols, int64_t x_row_stride, int64_t parts,
                                  int64_t part_stride) {
    assert(rows >= 0 && cols >= 0 && parts >= 0);
    FLUSHED(NAME(store_rows)(out, storage, x, rows, cols, x_row_stride, parts, part_stride));
}
