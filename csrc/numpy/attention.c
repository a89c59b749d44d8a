/* attention.c: wavepe._numpy.attention, softmax attention with a relative term [W][S][X][A].
 *
 * It is part of module.c. It is a plain function and no gufunc, because query heads that share a
 * key head or a table also share the packed memory. _attention.py has checked and broadcast the
 * arrays. Their first `lead` axes are those of the key heads, followed by
 *     q (group, m, d)   k (n, d)   v (n, dv)   p (group, w, d)   slopes (group)
 *     bias (group, w')   out (group, m, dv)   lse (group, m)
 * A unit is one block of queries of one head. A call computes units begin..end-1 of all units of
 * all heads. The bits of the results do not depend on begin and end. */

typedef struct {
    PyArrayObject *q, *k, *v, *p, *slopes, *bias, *out, *lse; /* p, slopes and bias may be NULL */
    int lead;
    int64_t group, blocks; /* query heads per key head; blocks of queries per head */
    const wpe_attention_kernels *kernels;
    wpe_attention common; /* the members that are the same for all heads */
    wpe_relative relative;
    wpe_zone zone;
    char *packed, *table, *workspace; /* the parts of the scratch memory */
} attention_call;

/* Return the query block of a unit. Units take blocks from both ends in turn: later blocks of a
 * causal call see more keys, and each thread gets consecutive units. So all threads take about
 * equally long. */
static int64_t block_of(const attention_call *c, int64_t unit) {
    int64_t step = unit % c->blocks;
    return step % 2 ? c->blocks - 1 - step / 2 : step / 2;
}

static void attention_units(attention_call *c, int64_t begin, int64_t end) {
    int64_t packed_key_head = -1;
    const void *packed_table = NULL;
    LOOP_BEGIN
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t head = unit / c->blocks, key_head = head / c->group;
        wpe_attention a = c->common;
        wpe_matrix to = matrix_at(c->out, c->lead + 1, head), table = {NULL, 0, 0};
        wpe_matrix_out out = {(void *)to.data, to.row_stride, to.col_stride};
        void *lse = entry_at(c->lse, c->lead + 1, head);
        a.q = matrix_at(c->q, c->lead + 1, head);
        a.k = matrix_at(c->k, c->lead, key_head);
        a.v = matrix_at(c->v, c->lead, key_head);
        if (c->slopes) a.slope = *(const double *)entry_at(c->slopes, c->lead + 1, head);
        if (c->bias) a.bias.values = entry_at(c->bias, c->lead + 1, head);
        if (c->p) table = matrix_at(c->p, c->lead + 1, head);
        if (a.queries == 1) {
            c->kernels->decode(&a, table, out, lse, c->workspace);
            continue;
        }
        if (key_head != packed_key_head && a.keys)
            c->kernels->pack(&a, c->packed, WPE_FORWARD, 0, a.keys);
        packed_key_head = key_head;
        if (c->p && table.data != packed_table)
            c->kernels->pack_zone(&c->zone, c->table, a.storage, a.head_size, table,
                                  (wpe_matrix){NULL, 0, 0}, WPE_FORWARD);
        packed_table = table.data;
        int64_t query = block_of(c, unit) * WPE_QUERY_BLOCK, end_query = query + WPE_QUERY_BLOCK;
        if (end_query > a.queries) end_query = a.queries;
        c->kernels->forward(&a, c->packed, out, lse, query, end_query, c->workspace);
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

/* Divide `memory` into the three parts, and return how many bytes they need. With NULL only count
 * the bytes. */
static size_t divide_memory(attention_call *c, char *memory) {
    const wpe_attention *a = &c->common;
    int pack = a->queries != 1;
    wpe_attention_sizes sizes = c->kernels->sizes(a, pack ? WPE_FORWARD : WPE_DECODE);
    int64_t elements[] = {
        sizes.packed,
        pack && c->p ? c->kernels->zone_size(c->zone.rows, c->zone.rank, a->head_size, WPE_FORWARD)
                     : 0,
        sizes.workspace};
    char **parts[] = {&c->packed, &c->table, &c->workspace};
    size_t item = a->storage == WPE_F64 ? 8 : 4, used = 0;
    for (int i = 0; i < 3; i++) {
        if (memory) *parts[i] = memory + used;
        used += ((size_t)elements[i] * item + 127) / 64 * 64;
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
    Py_BEGIN_ALLOW_THREADS attention_units(&c, begin, end);
    Py_END_ALLOW_THREADS free(memory);
    Py_RETURN_NONE;
}
