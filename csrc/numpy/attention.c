/* attention.c: wavepe._numpy.attention, softmax attention with a relative term [W][S][X][A].
 *
 * It is part of module.c. It is a plain function and no gufunc, because query heads that share a
 * key head or a table also share the packed memory. _attention.py has checked and broadcast the
 * arrays. Their first `lead` axes are those of the key heads, followed by
 *     q (group, m, d)   k (n, d)   v (n, dv)   p (group, w, c)   q_rel (group, m, c)
 *     slopes, sinks (group)   bias (group, w')   out (group, m, dv)   lse (group, m)
 * A unit is one block of queries of one head. A call computes units begin..end-1 of all units of
 * all heads. The bits of the results do not depend on begin and end. A call with few queries
 * (wpe_decodes) has one block, and its heads that share a key head are computed together. */

typedef struct {
    PyArrayObject *q, *k, *v, *out, *lse;
    PyArrayObject *p, *q_rel, *slopes, *bias, *sinks; /* NULL: not given */
    int lead;
    int64_t group, blocks; /* query heads per key head; blocks of queries per head */
    const wpe_attention_kernels *kernels;
    wpe_attention common; /* the members that are the same for all heads */
    wpe_relative relative;
    wpe_zone zone;                    /* its rows and rank */
    size_t table_bytes;               /* of one packed table */
    int64_t head_sums, part_stride;   /* decode: elements of the sums of a head, and of a part */
    char *packed, *table, *workspace; /* the parts of the scratch memory */
    char *heads, *tables, *sums;      /* decode's: heads, the packed table of each, and sums */
} attention_call;

/* Return the query block of a unit. Units take blocks from both ends in turn: later blocks of a
 * causal call see more keys, and each thread gets consecutive units. So all threads take about
 * equally long. */
static int64_t block_of(const attention_call *c, int64_t unit) {
    int64_t step = unit % c->blocks;
    return step % 2 ? c->blocks - 1 - step / 2 : step / 2;
}

static wpe_attention head_at(const attention_call *c, int64_t head) {
    wpe_attention a = c->common;
    a.q = matrix_at(c->q, c->lead + 1, head);
    a.k = matrix_at(c->k, c->lead, head / c->group);
    a.v = matrix_at(c->v, c->lead, head / c->group);
    if (c->p && c->q_rel) a.r = matrix_at(c->q_rel, c->lead + 1, head);
    if (c->sinks) a.sink = *(const double *)entry_at(c->sinks, c->lead + 1, head);
    if (c->slopes) a.slope = *(const double *)entry_at(c->slopes, c->lead + 1, head);
    if (c->bias) a.bias.values = entry_at(c->bias, c->lead + 1, head);
    return a;
}

/* A packed table. `data` are the rows that it was packed from. */
typedef struct {
    const void *data;
    wpe_zone zone;
    wpe_relative relative;
} packed_table;

/* Pack `read` rows of a head's table, in rising delta, into number `slot` of the memory for tables.
 * If they are packed already, do nothing. */
static void pack_table(const attention_call *c, int64_t head, wpe_range read, int64_t slot,
                       packed_table *to) {
    wpe_matrix rows = matrix_at(c->p, c->lead + 1, head), none = {NULL, 0, 0};
    if (rows.data == to->data) return;
    to->data = rows.data;
    to->zone = c->zone;
    to->zone.rows = read.end - read.begin;
    to->relative = c->relative;
    to->relative.rows = to->zone.rows;
    to->relative.first_delta += read.begin;
    to->relative.zones = &to->zone;
    rows.data = (const char *)rows.data + read.begin * rows.row_stride * PyArray_ITEMSIZE(c->p);
    if (to->zone.rows)
        c->kernels->pack_zone(&to->zone, c->table + (size_t)slot * c->table_bytes,
                              c->common.storage, c->common.table_size, rows, none, WPE_FORWARD);
}

static wpe_matrix_out out_at(const attention_call *c, int64_t head) {
    wpe_matrix to = matrix_at(c->out, c->lead + 1, head);
    return (wpe_matrix_out){(void *)to.data, to.row_stride, to.col_stride};
}

/* Return the sums of a head of the call, over one part of the keys. */
static void *sums_of(const attention_call *c, int64_t head, int64_t part) {
    size_t item = c->common.storage == WPE_F64 ? 8 : 4;
    return c->sums + (size_t)(part * c->part_stride + head * c->head_sums) * item;
}

/* Compute one part of the keys for heads begin..end-1. */
static void decode_part(attention_call *c, int64_t part, int64_t begin, int64_t end) {
    wpe_attention *heads = (wpe_attention *)c->heads;
    packed_table *tables = (packed_table *)c->tables;
    wpe_range keys = wpe_decode_part(c->common.keys, part);
    int64_t slot = 0; /* of the last table; a key head's tables fill at most all slots once */
    for (int64_t g = 0; g < c->group; g++) tables[g].data = NULL;
    for (int64_t head = begin, next; head < end; head = next) {
        next = (head / c->group + 1) * c->group;
        if (next > end) next = end;
        for (int64_t h = head; h < next; h++) {
            wpe_attention *a = &heads[h - head];
            *a = head_at(c, h);
            if (!c->p) continue;
            if (matrix_at(c->p, c->lead + 1, h).data != tables[slot].data)
                slot = (slot + 1) % c->group;
            pack_table(c, h, wpe_decode_rows(a, keys.begin, keys.end), slot, &tables[slot]);
            a->relative = tables[slot].zone.rows ? &tables[slot].relative : NULL;
        }
        c->kernels->decode(heads, next - head, keys.begin, keys.end, sums_of(c, head - begin, part),
                           c->workspace);
    }
}

static void decode_heads(attention_call *c, int64_t begin, int64_t end) {
    int64_t parts = wpe_decode_parts(c->common.keys);
    LOOP_BEGIN
    for (int64_t part = 0; part < parts; part++) decode_part(c, part, begin, end);
    for (int64_t h = begin; h < end; h++) {
        wpe_attention a = head_at(c, h);
        c->kernels->merge(&a, sums_of(c, h - begin, 0), parts, c->part_stride, out_at(c, h),
                          entry_at(c->lse, c->lead + 1, h));
    }
    LOOP_END
}

static void attention_units(attention_call *c, int64_t begin, int64_t end) {
    int64_t packed_key_head = -1;
    packed_table table = {NULL};
    LOOP_BEGIN
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t head = unit / c->blocks, key_head = head / c->group;
        wpe_attention a = head_at(c, head);
        if (key_head != packed_key_head && a.keys)
            c->kernels->pack(&a, c->packed, WPE_FORWARD, 0, a.keys);
        packed_key_head = key_head;
        if (c->p) {
            pack_table(c, head, (wpe_range){0, c->zone.rows}, 0, &table);
            a.relative = &table.relative;
        }
        int64_t query = block_of(c, unit) * WPE_QUERY_BLOCK, end_query = query + WPE_QUERY_BLOCK;
        if (end_query > a.queries) end_query = a.queries;
        c->kernels->forward(&a, c->packed, out_at(c, head), entry_at(c->lse, c->lead + 1, head),
                            query, end_query, c->workspace);
    }
    LOOP_END
}

static int storage_of(PyArrayObject *x) {
    int type = PyArray_TYPE(x); /* bfloat16 comes as integers of the same bits */
    return type == NPY_DOUBLE  ? WPE_F64
           : type == NPY_FLOAT ? WPE_F32
           : type == NPY_HALF  ? WPE_F16
                               : WPE_BF16;
}

/* Set sizes, strides and the table from the arrays. */
static void read_arrays(attention_call *c) {
    wpe_attention *a = &c->common;
    c->lead = PyArray_NDIM(c->k) - 2;
    c->group = a->group = PyArray_DIM(c->q, c->lead);
    a->queries = PyArray_DIM(c->q, c->lead + 1);
    a->keys = a->end_key = PyArray_DIM(c->k, c->lead);
    a->head_size = PyArray_DIM(c->k, c->lead + 1);
    a->value_size = PyArray_DIM(c->v, c->lead + 1);
    a->offset = a->keys - a->queries;
    a->storage = storage_of(c->q);
    a->sink = -INFINITY;
    c->blocks = (a->queries + WPE_QUERY_BLOCK - 1) / WPE_QUERY_BLOCK;
    if (c->bias) {
        a->bias.rows = PyArray_DIM(c->bias, c->lead + 1);
        a->bias.stride = PyArray_STRIDE(c->bias, c->lead + 1) / PyArray_ITEMSIZE(c->bias);
    }
    if (!c->p) return;
    a->table_size = PyArray_DIM(c->p, c->lead + 2);
    if (c->q_rel) a->r = matrix_at(c->q_rel, c->lead + 1, 0);
    c->zone = (wpe_zone){.rows = PyArray_DIM(c->p, c->lead + 1), .rank = a->table_size};
    c->relative.rows = c->zone.rows;
    c->relative.zone_count = 1;
    c->relative.zones = &c->zone;
    a->relative = &c->relative;
}

/* Divide `memory` into its parts for `units` units, and return how many bytes they need. With NULL
 * only count the bytes. */
static size_t divide_memory(attention_call *c, int64_t units, char *memory) {
    const wpe_attention *a = &c->common;
    size_t item = a->storage == WPE_F64 ? 8 : 4, group = (size_t)c->group, used = 0;
    size_t bytes[6] = {0};
    char **parts[] = {&c->packed, &c->table, &c->workspace, &c->heads, &c->tables, &c->sums};
    int decodes = wpe_decodes(a->queries, a->keys);
    if (c->p) {
        int64_t rows = c->zone.rows, most = wpe_decode_most_rows(a->queries, a->keys);
        if (decodes && rows > most) rows = most;
        int64_t size = c->kernels->zone_size(rows, c->zone.rank, a->table_size, WPE_FORWARD);
        c->table_bytes = ((size_t)size * item + 63) / 64 * 64;
    }
    if (decodes) {
        wpe_decode_sizes sizes = c->kernels->decode_sizes(a, c->group);
        c->head_sums = sizes.sums;
        c->part_stride = (units * sizes.sums + 15) / 16 * 16;
        bytes[1] = group * c->table_bytes;
        bytes[2] = (size_t)sizes.workspace * item;
        bytes[3] = group * sizeof(wpe_attention);
        bytes[4] = group * sizeof(packed_table);
        bytes[5] = (size_t)(c->part_stride * wpe_decode_parts(a->keys)) * item;
    } else {
        wpe_attention_sizes sizes = c->kernels->sizes(a, WPE_FORWARD);
        bytes[0] = (size_t)sizes.packed * item;
        bytes[1] = c->table_bytes;
        bytes[2] = (size_t)sizes.workspace * item;
    }
    for (int i = 0; i < 6; i++) {
        if (memory) *parts[i] = memory + used;
        used += (bytes[i] + 127) / 64 * 64;
    }
    return used;
}

/* attention(kernels, q, k, v, p, q_rel, slopes, bias, sinks, out, lse, scale, first_delta, beyond,
 * bias_first_delta, bias_beyond, causal, window, begin, end) */
static PyObject *py_attention(PyObject *self, PyObject *args) {
    (void)self;
    attention_call c = {0};
    const wpe_kernels *kernels;
    PyObject *p, *q_rel, *slopes, *bias, *sinks;
    long long first_delta, bias_first_delta, window, begin, end;
    if (!PyArg_ParseTuple(args, "O&O!O!O!OOOOOO!O!dLiLipLLL:attention", to_kernels, &kernels,
                          &PyArray_Type, &c.q, &PyArray_Type, &c.k, &PyArray_Type, &c.v, &p, &q_rel,
                          &slopes, &bias, &sinks, &PyArray_Type, &c.out, &PyArray_Type, &c.lse,
                          &c.common.scale, &first_delta, &c.relative.beyond, &bias_first_delta,
                          &c.common.bias.beyond, &c.common.causal, &window, &begin, &end))
        return NULL;
    if (p != Py_None) c.p = (PyArrayObject *)p;
    if (q_rel != Py_None) c.q_rel = (PyArrayObject *)q_rel;
    if (sinks != Py_None) c.sinks = (PyArrayObject *)sinks;
    if (slopes != Py_None) c.slopes = (PyArrayObject *)slopes;
    if (bias != Py_None) c.bias = (PyArrayObject *)bias;
    c.relative.first_delta = first_delta;
    c.common.bias.first_delta = bias_first_delta;
    c.common.window = window;
    read_arrays(&c);
    c.kernels = &kernels->attention[c.common.storage == WPE_F64];
    size_t bytes = divide_memory(&c, end - begin, NULL);
    char *memory = aligned_alloc(64, bytes);
    if (!memory)
        return PyErr_Format(PyExc_MemoryError, "attention needs %zu bytes of scratch memory",
                            bytes);
    divide_memory(&c, end - begin, memory);
    Py_BEGIN_ALLOW_THREADS;
    if (wpe_decodes(c.common.queries, c.common.keys))
        decode_heads(&c, begin, end);
    else
        attention_units(&c, begin, end);
    Py_END_ALLOW_THREADS;
    free(memory);
    Py_RETURN_NONE;
}
