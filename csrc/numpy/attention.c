/* attention.c: wavepe._numpy.attention, softmax attention with a relative term [W][S][X][A].
 *
 * It is part of module.c. It is a plain function and no gufunc, because query heads that share a
 * key head or a table also share the packed memory. _attention.py has checked and broadcast the
 * arrays. Their first `lead` axes are those of the key heads, followed by
 *     q (group, m, d)   k (n, d)   v (n, dv)   p (group, w, d)   slopes (group)
 *     bias (group, w')   out (group, m, dv)   lse (group, m)
 * A unit is one block of queries of one head. A call computes units begin..end-1 of all units of
 * all heads. The bits of the results do not depend on begin and end. A call with few queries
 * (wpe_decodes) has one block, and its heads that share a key head are computed together. */

typedef struct {
    PyArrayObject *q, *k, *v, *p, *slopes, *bias, *out, *lse; /* p, slopes and bias may be NULL */
    int lead;
    int64_t group, blocks; /* query heads per key head; blocks of queries per head */
    const wpe_attention_kernels *kernels;
    wpe_attention common; /* the members that are the same for all heads */
    wpe_relative relative;
    wpe_zone zone;
    int64_t head_sums, part_stride;   /* decode: elements of the sums of a head, and of a part */
    char *packed, *table, *workspace; /* the parts of the scratch memory */
    char *heads, *tables, *sums;      /* decode's */
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
    if (c->slopes) a.slope = *(const double *)entry_at(c->slopes, c->lead + 1, head);
    if (c->bias) a.bias.values = entry_at(c->bias, c->lead + 1, head);
    return a;
}

static wpe_matrix table_at(const attention_call *c, int64_t head) {
    return c->p ? matrix_at(c->p, c->lead + 1, head) : (wpe_matrix){NULL, 0, 0};
}

static wpe_matrix_out out_at(const attention_call *c, int64_t head) {
    wpe_matrix to = matrix_at(c->out, c->lead + 1, head);
    return (wpe_matrix_out){(void *)to.data, to.row_stride, to.col_stride};
}

/* The number of parts that decode cuts the keys into. */
static int64_t part_count(const attention_call *c) {
    int64_t parts = (c->common.keys + WPE_DECODE_KEYS - 1) / WPE_DECODE_KEYS;
    return parts ? parts : 1;
}

static void decode_heads(attention_call *c, int64_t begin, int64_t end) {
    size_t item = c->common.storage == WPE_F64 ? 8 : 4;
    int64_t parts = part_count(c), keys = c->common.keys;
    wpe_attention *heads = (wpe_attention *)c->heads;
    wpe_matrix *tables = (wpe_matrix *)c->tables;
    LOOP_BEGIN
    for (int64_t head = begin, next; head < end; head = next) {
        next = (head / c->group + 1) * c->group;
        if (next > end) next = end;
        for (int64_t h = head; h < next; h++) {
            heads[h - head] = head_at(c, h);
            tables[h - head] = table_at(c, h);
        }
        for (int64_t part = 0; part < parts; part++) {
            int64_t key = part * WPE_DECODE_KEYS, end_key = key + WPE_DECODE_KEYS;
            c->kernels->decode(heads, tables, next - head, key, end_key < keys ? end_key : keys,
                               c->sums + (size_t)(part * c->part_stride) * item, c->workspace);
        }
        for (int64_t h = head; h < next; h++)
            c->kernels->merge(&heads[h - head],
                              c->sums + (size_t)((h - head) * c->head_sums) * item, parts,
                              c->part_stride, out_at(c, h), entry_at(c->lse, c->lead + 1, h));
    }
    LOOP_END
}

static void attention_units(attention_call *c, int64_t begin, int64_t end) {
    int64_t packed_key_head = -1;
    const void *packed_table = NULL;
    LOOP_BEGIN
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t head = unit / c->blocks, key_head = head / c->group;
        wpe_attention a = head_at(c, head);
        wpe_matrix table = table_at(c, head);
        if (key_head != packed_key_head && a.keys)
            c->kernels->pack(&a, c->packed, WPE_FORWARD, 0, a.keys);
        packed_key_head = key_head;
        if (c->p && table.data != packed_table)
            c->kernels->pack_zone(&c->zone, c->table, a.storage, a.head_size, table,
                                  (wpe_matrix){NULL, 0, 0}, WPE_FORWARD);
        packed_table = table.data;
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
    c->group = PyArray_DIM(c->q, c->lead);
    a->queries = PyArray_DIM(c->q, c->lead + 1);
    a->keys = a->end_key = PyArray_DIM(c->k, c->lead);
    a->head_size = PyArray_DIM(c->k, c->lead + 1);
    a->value_size = PyArray_DIM(c->v, c->lead + 1);
    a->offset = a->keys - a->queries;
    a->storage = storage_of(c->q);
    c->blocks = (a->queries + WPE_QUERY_BLOCK - 1) / WPE_QUERY_BLOCK;
    if (c->bias) {
        a->bias.rows = PyArray_DIM(c->bias, c->lead + 1);
        a->bias.stride = PyArray_STRIDE(c->bias, c->lead + 1) / PyArray_ITEMSIZE(c->bias);
    }
    if (!c->p) return;
    c->zone = (wpe_zone){.rows = PyArray_DIM(c->p, c->lead + 1), .rank = a->head_size};
    c->relative.rows = c->zone.rows;
    c->relative.zone_count = 1;
    c->relative.zones = &c->zone;
    a->relative = &c->relative;
}

/* Divide `memory` into its parts, and return how many bytes they need. With NULL only count the
 * bytes. */
static size_t divide_memory(attention_call *c, char *memory) {
    const wpe_attention *a = &c->common;
    size_t item = a->storage == WPE_F64 ? 8 : 4, group = (size_t)c->group, used = 0;
    size_t bytes[6] = {0};
    char **parts[] = {&c->packed, &c->table, &c->workspace, &c->heads, &c->tables, &c->sums};
    if (wpe_decodes(a->queries, a->keys)) {
        wpe_decode_sizes sizes = c->kernels->decode_sizes(a, c->group);
        c->head_sums = sizes.sums;
        c->part_stride = (c->group * sizes.sums + 15) / 16 * 16;
        bytes[2] = (size_t)sizes.workspace * item;
        bytes[3] = group * sizeof(wpe_attention);
        bytes[4] = group * sizeof(wpe_matrix);
        bytes[5] = (size_t)(c->part_stride * part_count(c)) * item;
    } else {
        wpe_attention_sizes sizes = c->kernels->sizes(a, WPE_FORWARD);
        int64_t table = 0;
        if (c->p)
            table = c->kernels->zone_size(c->zone.rows, c->zone.rank, a->head_size, WPE_FORWARD);
        bytes[0] = (size_t)sizes.packed * item;
        bytes[1] = (size_t)table * item;
        bytes[2] = (size_t)sizes.workspace * item;
    }
    for (int i = 0; i < 6; i++) {
        if (memory) *parts[i] = memory + used;
        used += (bytes[i] + 127) / 64 * 64;
    }
    return used;
}

/* attention(kernels, q, k, v, p, slopes, bias, out, lse, scale, first_delta, beyond,
 * bias_first_delta, bias_beyond, causal, window, begin, end) */
static PyObject *py_attention(PyObject *self, PyObject *args) {
    (void)self;
    attention_call c = {0};
    const wpe_kernels *kernels;
    PyObject *p, *slopes, *bias;
    long long first_delta, bias_first_delta, window, begin, end;
    if (!PyArg_ParseTuple(args, "O&O!O!O!OOOO!O!dLiLipLLL:attention", to_kernels, &kernels,
                          &PyArray_Type, &c.q, &PyArray_Type, &c.k, &PyArray_Type, &c.v, &p,
                          &slopes, &bias, &PyArray_Type, &c.out, &PyArray_Type, &c.lse,
                          &c.common.scale, &first_delta, &c.relative.beyond, &bias_first_delta,
                          &c.common.bias.beyond, &c.common.causal, &window, &begin, &end))
        return NULL;
    if (p != Py_None) c.p = (PyArrayObject *)p;
    if (slopes != Py_None) c.slopes = (PyArrayObject *)slopes;
    if (bias != Py_None) c.bias = (PyArrayObject *)bias;
    c.relative.first_delta = first_delta;
    c.common.bias.first_delta = bias_first_delta;
    c.common.window = window;
    read_arrays(&c);
    c.kernels = &kernels->attention[c.common.storage == WPE_F64];
    size_t bytes = divide_memory(&c, NULL);
    char *memory = aligned_alloc(64, bytes);
    if (!memory)
        return PyErr_Format(PyExc_MemoryError, "attention needs %zu bytes of scratch memory",
                            bytes);
    divide_memory(&c, memory);
    Py_BEGIN_ALLOW_THREADS;
    if (wpe_decodes(c.common.queries, c.common.keys))
        decode_heads(&c, begin, end);
    else
        attention_units(&c, begin, end);
    Py_END_ALLOW_THREADS;
    free(memory);
    Py_RETURN_NONE;
}
