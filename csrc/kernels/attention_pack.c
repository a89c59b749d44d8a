/* attention_pack.c: what the products read, as padded panels and rows of REAL: no product meets a
 * tail, a stride or a narrow storage type. (attention_decode.c packs nothing and meets them.)
 *
 * Panels of a matrix B (depth, cols): (cols / PANEL, depth, PANEL), zero-filled. Keys are padded to
 * STEP, so that what is summed in 16 fixed lanes begins at the same key in every variant. */

/* Panels of M: rows begin..end-1 of the panels' `depth` rows; columns padded. Returns whether any
 * element is NaN or Inf. */
static int NAME(pack_rows)(REAL *panels, int64_t depth, wpe_matrix m, int storage, int64_t begin,
                           int64_t end, int64_t cols) {
    REAL chunk[CHUNK];
    V check = {0};
    for (int64_t r = begin; r < end; r++)
        for (int64_t x = 0; x < cols; x += CHUNK) {
            int64_t count = smaller(CHUNK, cols - x), padded = round_up(count, PANEL);
            NAME(read_row)(chunk, NAME(element)(m, storage, r, x), storage, m.col_stride, count, 1);
            for (int64_t c = count; c < padded; c++) chunk[c] = 0;
            for (int64_t c = 0; c < padded; c += PANEL) {
                REAL *dst = panels + ((x + c) / PANEL * depth + r) * PANEL;
                V low = LOAD_REAL(chunk + c, 1, LANES),
                  high = LOAD_REAL(chunk + c + LANES, 1, LANES);
                STORE_REAL(dst, 1, LANES, low);
                STORE_REAL(dst + LANES, 1, LANES, high);
                check += low * 0 + high * 0;
            }
        }
    return NAME(is_not_zero)(check);
}

/* Rows become columns: interleaving the halves log2(LANES) times. */
INLINE void NAME(transpose)(V x[LANES]) {
    V y[LANES];
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + LANES / 2], REAL_ORDER(LOW));
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + LANES / 2], REAL_ORDER(HIGH));
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

/* Panels of M^T: rows begin..end-1 of M (begin a multiple of PANEL) become columns, followed by
 * columns of zeros up to `padded`. */
static void NAME(pack_columns)(REAL *panels, wpe_matrix m, int storage, int64_t begin, int64_t end,
                               int64_t padded, int64_t depth) {
    REAL chunk[LANES][CHUNK];
    for (int64_t c = begin; c < padded; c += LANES)
        for (int64_t k0 = 0; k0 < depth; k0 += CHUNK) {
            int64_t count = smaller(CHUNK, depth - k0);
            for (int l = 0; l < LANES; l++)
                if (c + l < end)
                    NAME(read_row)(chunk[l], NAME(element)(m, storage, c + l, k0), storage,
                                   m.col_stride, count, 1);
                else
                    memset(chunk[l], 0, sizeof chunk[l]);
            REAL *dst = panels + c / PANEL * depth * PANEL + k0 * PANEL + c % PANEL;
            for (int64_t k = 0; k < count; k += LANES) {
                V square[LANES];
                for (int l = 0; l < LANES; l++) square[l] = LOAD_REAL(chunk[l] + k, 1, LANES);
                NAME(transpose)(square);
                for (int l = 0; l < LANES && k + l < count; l++)
                    STORE_REAL(dst + (k + l) * PANEL, 1, LANES, square[l]);
            }
        }
}

/* A table's rows from the last to the first: columns of scores rise with the key. */
INLINE wpe_matrix NAME(reversed)(wpe_matrix m, int storage, int64_t rows) {
    return (wpe_matrix){NAME(element)(m, storage, rows - 1, 0), -m.row_stride, m.col_stride};
}

/* ---- keys and values of one key head ------------------------------------------------------- */

/* What attention_pack makes. not_finite: per key tile, whether its values (backward: keys or
 * values) hold NaN or Inf. */
typedef struct {
    REAL *keys_t, *values;     /* K^T, V; backward has no V, but */
    REAL *values_t, *key_rows; /* V^T, K */
    REAL *not_finite;
    int64_t size;
} NAME(packed);
#define PACKED NAME(packed)

static PACKED NAME(packed_parts)(const wpe_attention *a, void *base, enum wpe_pass pass) {
    int64_t n = round_up(a->keys, STEP), d = a->head_size, dv = a->value_size;
    MEMORY memory = {base, 0};
    PACKED p = {0};
    p.keys_t = NAME(take)(&memory, n * d);
    if (pass == WPE_BACKWARD) {
        p.values_t = NAME(take)(&memory, n * dv);
        p.key_rows = NAME(take)(&memory, n * round_up(d, PANEL));
    } else {
        p.values = NAME(take)(&memory, n * round_up(dv, PANEL));
    }
    p.not_finite = NAME(take)(&memory, round_up(n / WPE_KEY_BLOCK + 1, STEP));
    p.size = memory.used;
    return p;
}

static NOINLINE void NAME(pack_keys)(const wpe_attention *a, void *memory, enum wpe_pass pass,
                                     int64_t begin, int64_t end) {
    PACKED p = NAME(packed_parts)(a, memory, pass);
    int64_t n = round_up(a->keys, STEP);
    for (int64_t j = begin; j < end; j += WPE_KEY_BLOCK) {
        int64_t last = smaller(j + WPE_KEY_BLOCK, end), padded = last == a->keys ? n : last;
        int not_finite;
        NAME(pack_columns)(p.keys_t, a->k, a->storage, j, last, padded, a->head_size);
        if (pass == WPE_BACKWARD) {
            NAME(pack_columns)(p.values_t, a->v, a->storage, j, last, padded, a->value_size);
            not_finite = NAME(pack_rows)(p.key_rows, n, a->k, a->storage, j, last, a->head_size);
            not_finite |= NAME(any_not_finite)(p.values_t + j * a->value_size,
                                               (round_up(last, PANEL) - j) * a->value_size);
        } else {
            not_finite = NAME(pack_rows)(p.values, n, a->v, a->storage, j, last, a->value_size);
        }
        p.not_finite[j / WPE_KEY_BLOCK] = (REAL)not_finite;
    }
}

static void NAME(attention_pack)(const wpe_attention *a, void *packed, enum wpe_pass pass,
                                 int64_t begin, int64_t end) {
    assert(pass != WPE_DECODE && is_aligned(packed, 64));
    assert(begin >= 0 && begin < end && end <= a->keys && begin % WPE_KEY_BLOCK == 0);
    assert(end % WPE_KEY_BLOCK == 0 || end == a->keys);
    FLUSHED(NAME(pack_keys)(a, packed, pass, begin, end));
}

/* ---- zones of a table ---------------------------------------------------------------------- */

static int64_t NAME(attention_zone_size)(int64_t rows, int64_t rank, int64_t head_size) {
    int64_t r = round_up(rows, PANEL), k = round_up(rank, PANEL), d = round_up(head_size, PANEL);
    return r * rank + k * rows + k * head_size + d * rank;
}

static NOINLINE void NAME(pack_zone)(wpe_zone *zone, void *memory, int storage, int64_t head_size,
                                     wpe_matrix rows, wpe_matrix basis) {
    REAL *scores = memory, *gradient = scores + round_up(zone->rows, PANEL) * zone->rank;
    wpe_matrix falling = NAME(reversed)(rows, storage, zone->rows);
    NAME(pack_columns)(scores, falling, storage, 0, zone->rows, round_up(zone->rows, PANEL),
                       zone->rank);
    zone->not_finite =
        NAME(pack_rows)(gradient, zone->rows, falling, storage, 0, zone->rows, zone->rank);
    zone->scores = scores;
    zone->gradient = gradient;
    zone->basis = zone->transposed_basis = NULL;
    if (!basis.data) return;
    REAL *u = gradient + round_up(zone->rank, PANEL) * zone->rows;
    REAL *ut = u + round_up(zone->rank, PANEL) * head_size;
    zone->not_finite |= NAME(pack_rows)(u, head_size, basis, storage, 0, head_size, zone->rank);
    NAME(pack_columns)(ut, basis, storage, 0, head_size, round_up(head_size, PANEL), zone->rank);
    zone->basis = u;
    zone->transposed_basis = ut;
}

static void NAME(attention_pack_zone)(wpe_zone *zone, void *memory, int storage, int64_t head_size,
                                      wpe_matrix rows, wpe_matrix basis) {
    assert(zone->rows > 0 && zone->rank >= 0 && head_size >= 0 && is_aligned(memory, 64));
    assert(basis.data || zone->rank == head_size);
    FLUSHED(NAME(pack_zone)(zone, memory, storage, head_size, rows, basis));
}
