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
    wpe_table table;
    wpe_zone zone; /* its only one: rows and rank */
    wpe_zone_source source;
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

/* Return where a head's table lies, in bytes from that of head 0. */
static int64_t table_shift(const attention_call *c, int64_t head) {
    const char *rows = c->p ? entry_at(c->p, c->lead + 1, head) : NULL;
    return rows ? rows - (const char *)c->source.rows.data : 0;
}

static wpe_matrix_out out_at(const attention_call *c, int64_t head) {
    wpe_matrix to = matrix_at(c->out, c->lead + 1, head);
    return (wpe_matrix_out){(void *)to.data, to.row_stride, to.col_stride};
}

static wpe_attention decode_head(const void *call, int64_t head, int64_t *shift) {
    *shift = table_shift(call, head);
    return head_at(call, head);
}

/* Compute heads begin..end-1 of a call that decode serves. Return the bytes of `memory` that this
 * needs; without memory (NULL) do nothing else. */
static size_t decode_heads(const attention_call *c, int64_t begin, int64_t end, char *memory) {
    wpe_decoding d = {.kernels = c->kernels,
                      .table = &c->table,
                      .group = c->group,
                      .slots = c->p && PyArray_STRIDE(c->p, c->lead) ? c->group : 1,
                      .call = c,
                      .head = decode_head};
    wpe_plan_decoding(&d);
    size_t item = wpe_compute_item(c->common.storage);
    size_t head_bytes = (size_t)d.head_sums * item;
    size_t part_bytes = wpe_round_up((size_t)(end - begin) * head_bytes);
    if (!memory) return d.task_bytes + (size_t)d.parts * part_bytes;
    char *sums = memory + d.task_bytes;
    LOOP_BEGIN
    for (int64_t part = 0; part < d.parts; part++)
        wpe_decode_heads(&d, part, begin, end, sums + (size_t)part * part_bytes, memory);
    for (int64_t h = begin; h < end; h++, sums += head_bytes) {
        wpe_attention a = head_at(c, h);
        c->kernels->merge(&a, sums, d.parts, (int64_t)(part_bytes / item), out_at(c, h),
                          entry_at(c->lse, c->lead + 1, h));
    }
    LOOP_END
    return 0;
}

/* The same for units begin..end-1 of a call that forward serves. */
static size_t forward_units(const attention_call *c, int64_t begin, int64_t end, char *packed) {
    size_t item = wpe_compute_item(c->common.storage);
    wpe_attention_sizes sizes = c->kernels->sizes(&c->common, WPE_FORWARD);
    size_t packed_bytes = wpe_round_up((size_t)sizes.packed * item);
    size_t table_bytes = wpe_table_bytes(c->kernels, &c->table, c->zone.rows, WPE_FORWARD);
    if (!packed) return packed_bytes + table_bytes + wpe_round_up((size_t)sizes.workspace * item);
    char *table = packed + packed_bytes, *workspace = table + table_bytes;
    wpe_relative relative;
    wpe_zone zone;
    int64_t packed_key_head = -1, packed_shift = -1;
    LOOP_BEGIN
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t head = unit / c->blocks, key_head = head / c->group, shift = table_shift(c, head);
        wpe_attention a = head_at(c, head);
        if (key_head != packed_key_head && a.keys)
            c->kernels->pack(&a, packed, WPE_FORWARD, 0, a.keys);
        packed_key_head = key_head;
        if (c->p && (unit == begin || shift != packed_shift))
            relative = wpe_pack_rows(c->kernels, &c->table, shift, (wpe_range){0, c->zone.rows},
                                     &zone, table, WPE_FORWARD);
        packed_shift = shift;
        if (c->p) a.relative = &relative;
        int64_t query = block_of(c, unit) * WPE_QUERY_BLOCK, end_query = query + WPE_QUERY_BLOCK;
        if (end_query > a.queries) end_query = a.queries;
        c->kernels->forward(&a, packed, out_at(c, head), entry_at(c->lse, c->lead + 1, head), query,
                            end_query, workspace);
    }
    LOOP_END
    return 0;
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
    c->source.rows = matrix_at(c->p, c->lead + 1, 0);
    c->table.sources = &c->source;
    c->table.columns = a->table_size;
    c->table.storage = a->storage;
    c->table.relative.rows = c->zone.rows;
    c->table.relative.zone_count = 1;
    c->table.relative.zones = &c->zone;
    a->relative = &c->table.relative;
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
                          &c.common.scale, &first_delta, &c.table.relative.beyond,
                          &bias_first_delta, &c.common.bias.beyond, &c.common.causal, &window,
                          &begin, &end))
        return NULL;
    if (p != Py_None) c.p = (PyArrayObject *)p;
    if (q_rel != Py_None) c.q_rel = (PyArrayObject *)q_rel;
    if (sinks != Py_None) c.sinks = (PyArrayObject *)sinks;
    if (slopes != Py_None) c.slopes = (PyArrayObject *)slopes;
    if (bias != Py_None) c.bias = (PyArrayObject *)bias;
    c.table.relative.first_delta = first_delta;
    c.common.bias.first_delta = bias_first_delta;
    c.common.window = window;
    read_arrays(&c);
    c.kernels = &kernels->attention[c.common.storage == WPE_F64];
    size_t (*run)(const attention_call *, int64_t, int64_t, char *) =
        wpe_decodes(c.common.queries, c.common.keys) ? decode_heads : forward_units;
    size_t bytes = run(&c, begin, end, NULL);
    char *memory = aligned_alloc(64, bytes);
    if (!memory)
        return PyErr_Format(PyExc_MemoryError, "attention needs %zu bytes of scratch memory",
                            bytes);
    Py_BEGIN_ALLOW_THREADS;
    run(&c, begin, end, memory);
    Py_END_ALLOW_THREADS;
    free(memory);
    Py_RETURN_NONE;
}
