/* attention_pack.c: converts keys, values and tables to padded panels of REAL. So the products meet
 * no tail, no stride and no narrow storage type. Only attention_decode.c reads the tensors
 * directly.
 *
 * The panels of a matrix B (depth, cols) are an array (cols / PANEL, depth, PANEL), padded with
 * zeros. The number of keys is padded to a multiple of KEY_STEP. So sums in 16 fixed lanes begin at
 * the same key in every variant. */

#define ROWS_AT_ONCE 64 /* a panel of so many rows stays in the nearest cache */

/* Pack rows begin..end-1 of m, as rows begin..end-1 of panels with `depth` rows. Pad the columns.
 * Return whether any element is NaN or Inf. */
static int NAME(pack_rows)(REAL *panels, int64_t depth, wpe_matrix m, int storage, int64_t begin,
                           int64_t end, int64_t cols) {
    int not_finite = 0;
    for (int64_t r = begin; r < end; r += ROWS_AT_ONCE) {
        int64_t rows = smaller(ROWS_AT_ONCE, end - r);
        for (int64_t x = 0; x < cols; x += PANEL) {
            REAL *panel = panels + (x / PANEL * depth + r) * PANEL;
            wpe_matrix from = {NAME(element)(m, storage, r, x), m.row_stride, m.col_stride};
            NAME(load_rows)(panel, PANEL, from, storage, 0, rows, rows, smaller(PANEL, cols - x),
                            1);
            not_finite |= NAME(any_not_finite)(panel, rows * PANEL);
        }
    }
    return not_finite;
}

/* Transpose a square of LANES vectors: exchange the blocks of each size beside the diagonal, from
 * `most` lanes down to one. */
INLINE void NAME(transpose)(V x[LANES], int most) {
#define EXCHANGE_BLOCKS(s)                                                               \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES && s < LANES && s <= most; i++) { \
        if (i & s) continue;                                                             \
        V a = x[i], b = x[i + s];                                                        \
        x[i] = __builtin_shufflevector(a, b, REAL_ORDER(EXCHANGE)(LOWER, s));            \
        x[i + s] = __builtin_shufflevector(a, b, REAL_ORDER(EXCHANGE)(UPPER, s));        \
    }
    EXCHANGE_BLOCKS(8)
    EXCHANGE_BLOCKS(4)
    EXCHANGE_BLOCKS(2)
    EXCHANGE_BLOCKS(1)
#undef EXCHANGE_BLOCKS
}

/* Load LANES rows of m from (row, col) on, and transpose them. Rows from `rows` on, and columns
 * from `cols` on, are 0. is_whole: nothing lies beyond, and the columns have stride 1. */
INLINE void NAME(load_square)(V square[LANES], wpe_matrix m, int storage, int64_t row, int64_t rows,
                              int64_t col, int64_t cols, int is_whole) {
    int64_t stride = m.row_stride, step = m.col_stride;
    if (is_whole && storage == REAL_STORAGE) {
        const int block = 16 / (int)sizeof(REAL); /* the elements that load_blocks keeps together */
        const REAL *from = (const REAL *)m.data + row * stride + col;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++)
            square[l] =
                (V)load_blocks((const char *)(from + l % block * stride + l / block * block),
                               block * stride * (int64_t)sizeof(REAL));
        NAME(transpose)(square, block / 2);
        return;
    }
#define LOAD_ROWS(storage, type)                                                        \
    case storage: {                                                                     \
        const type *from = (const type *)m.data + row * stride + col * step;            \
        _Pragma("GCC unroll 16") for (int l = 0; l < LANES; l++) {                      \
            int lanes = row + l < rows ? (int)smaller(LANES, cols - col) : 0;           \
            square[l] = is_whole ? PASTE2(load_, type)(from + l * stride, 1, LANES)     \
                                 : PASTE2(load_, type)(from + l * stride, step, lanes); \
        }                                                                               \
        break;                                                                          \
    }
    switch (storage) {
        EACH_STORAGE(LOAD_ROWS)
        default:
            __builtin_unreachable();
    }
#undef LOAD_ROWS
    NAME(transpose)(square, LANES);
}

/* Pack rows begin..end-1 of m, as columns begin..end-1 of panels with `depth` rows. Columns
 * end..padded-1 become zeros.
 * Requires: begin and padded are multiples of PANEL. */
static void NAME(pack_columns)(REAL *panels, wpe_matrix m, int storage, int64_t begin, int64_t end,
                               int64_t padded, int64_t depth) {
    for (int64_t c = begin; c < padded; c += LANES) {
        REAL *dst = panels + c / PANEL * depth * PANEL + c % PANEL;
        int64_t k = 0, whole = m.col_stride == 1 && c + LANES <= end ? depth - LANES : -1;
        V square[LANES];
        for (; k <= whole; k += LANES) {
            NAME(load_square)(square, m, storage, c, end, k, depth, 1);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) STORE_REAL(dst + (k + l) * PANEL, 1, LANES, square[l]);
        }
        for (; k < depth; k += LANES) {
            NAME(load_square)(square, m, storage, c, end, k, depth, 0);
            for (int l = 0; l < LANES && k + l < depth; l++)
                STORE_REAL(dst + (k + l) * PANEL, 1, LANES, square[l]);
        }
    }
}

/* Return a table with its rows in reverse order. Then a row of r . p rises with the key. */
INLINE wpe_matrix NAME(reversed)(wpe_matrix m, int storage, int64_t rows) {
    return (wpe_matrix){NAME(element)(m, storage, rows - 1, 0), -m.row_stride, m.col_stride};
}

/* ---- keys and values of one key head ------------------------------------------------------- */

/* The parts of the memory that attention_pack writes. */
typedef struct {
    REAL *k_t_panels;            /* K^T */
    REAL *v_panels;              /* V: forward only */
    REAL *v_t_panels, *k_panels; /* V^T and K: backward only */
    /* for each key tile 1 or 0: whether its values (backward: keys or values) hold NaN or Inf */
    REAL *not_finite;
    int64_t size; /* elements of the whole memory */
} NAME(packed);
#define PACKED NAME(packed)

/* Return where the parts of the memory at `base` begin. base NULL: only count the elements. */
static PACKED NAME(packed_parts)(const wpe_attention *a, void *base, enum wpe_pass pass) {
    int64_t n = round_up(a->keys, KEY_STEP), d = a->head_size, dv = a->value_size;
    MEMORY memory = {base, 0};
    PACKED p = {0};
    p.k_t_panels = NAME(take)(&memory, n * d);
    if (pass == WPE_BACKWARD) {
        p.v_t_panels = NAME(take)(&memory, n * dv);
        p.k_panels = NAME(take)(&memory, n * round_up(d, PANEL));
    } else {
        p.v_panels = NAME(take)(&memory, n * round_up(dv, PANEL));
    }
    p.not_finite = NAME(take)(&memory, round_up(n / WPE_KEY_BLOCK + 1, KEY_STEP));
    p.size = memory.used;
    return p;
}

static NOINLINE void NAME(pack_keys)(const wpe_attention *a, void *memory, enum wpe_pass pass,
                                     int64_t begin, int64_t end) {
    PACKED p = NAME(packed_parts)(a, memory, pass);
    int64_t n = round_up(a->keys, KEY_STEP);
    for (int64_t j = begin; j < end; j += WPE_KEY_BLOCK) {
        int64_t tile_end = smaller(j + WPE_KEY_BLOCK, end);
        int64_t padded = tile_end == a->keys ? n : tile_end;
        int not_finite;
        NAME(pack_columns)(p.k_t_panels, a->k, a->storage, j, tile_end, padded, a->head_size);
        if (pass == WPE_BACKWARD) {
            NAME(pack_columns)(p.v_t_panels, a->v, a->storage, j, tile_end, padded, a->value_size);
            not_finite =
                NAME(pack_rows)(p.k_panels, n, a->k, a->storage, j, tile_end, a->head_size);
            not_finite |= NAME(any_not_finite)(p.v_t_panels + j * a->value_size,
                                               (round_up(tile_end, PANEL) - j) * a->value_size);
        } else {
            not_finite =
                NAME(pack_rows)(p.v_panels, n, a->v, a->storage, j, tile_end, a->value_size);
        }
        p.not_finite[j / WPE_KEY_BLOCK] = (REAL)not_finite;
    }
}

static void NAME(attention_pack)(const wpe_attention *a, void *packed, enum wpe_pass pass,
                                 int64_t begin, int64_t end) {
    assert(is_aligned(packed, 64));
    assert(begin >= 0 && begin < end && end <= a->keys && begin % WPE_KEY_BLOCK == 0);
    assert(end % WPE_KEY_BLOCK == 0 || end == a->keys);
    FLUSHED(NAME(pack_keys)(a, packed, pass, begin, end));
}

/* ---- zones of a table ---------------------------------------------------------------------- */

static int64_t NAME(attention_zone_size)(int64_t rows, int64_t rank, int64_t table_size,
                                         enum wpe_pass pass) {
    int64_t padded_rank = round_up(rank, PANEL);
    int64_t size = round_up(rows, PANEL) * rank + padded_rank * table_size;
    if (pass == WPE_BACKWARD) size += padded_rank * rows + round_up(table_size, PANEL) * rank;
    return size;
}

static NOINLINE void NAME(pack_zone)(wpe_zone *zone, void *memory, int storage, int64_t table_size,
                                     wpe_matrix rows, wpe_matrix basis, enum wpe_pass pass) {
    MEMORY parts = {memory, 0};
    wpe_matrix falling = NAME(reversed)(rows, storage, zone->rows);
    int64_t padded_rows = round_up(zone->rows, PANEL), padded_rank = round_up(zone->rank, PANEL);
    REAL *coefficients_t = NAME(take)(&parts, padded_rows * zone->rank), *basis_panels = NULL;
    REAL *coefficients = NULL, *basis_t = NULL;
    NAME(pack_columns)(coefficients_t, falling, storage, 0, zone->rows, padded_rows, zone->rank);
    int not_finite = 0;
    if (basis.data) {
        basis_panels = NAME(take)(&parts, padded_rank * table_size);
        not_finite =
            NAME(pack_rows)(basis_panels, table_size, basis, storage, 0, table_size, zone->rank);
    }
    if (pass == WPE_BACKWARD) {
        coefficients = NAME(take)(&parts, padded_rank * zone->rows);
        not_finite |=
            NAME(pack_rows)(coefficients, zone->rows, falling, storage, 0, zone->rows, zone->rank);
    }
    if (pass == WPE_BACKWARD && basis.data) {
        int64_t padded = round_up(table_size, PANEL);
        basis_t = NAME(take)(&parts, padded * zone->rank);
        NAME(pack_columns)(basis_t, basis, storage, 0, table_size, padded, zone->rank);
    }
    zone->coefficients_t = coefficients_t;
    zone->basis = basis_panels;
    zone->not_finite = not_finite;
    zone->coefficients = coefficients;
    zone->basis_t = basis_t;
}

static void NAME(attention_pack_zone)(wpe_zone *zone, void *memory, int storage, int64_t table_size,
                                      wpe_matrix rows, wpe_matrix basis, enum wpe_pass pass) {
    assert(zone->rows > 0 && zone->rank >= 0 && table_size >= 0);
    assert(is_aligned(memory, 64) && (basis.data || zone->rank == table_size));
    FLUSHED(NAME(pack_zone)(zone, memory, storage, table_size, rows, basis, pass));
}
