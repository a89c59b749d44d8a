/* relative_bias.c: wavepe._numpy.relative_bias, the query-dependent relative term [W][S].
 *
 * It is part of module.c. It is a plain function and no gufunc for two reasons: all pieces of a
 * call use the kernels that they are given, and it can raise MemoryError. arrays/relative_bias.py
 * has checked and broadcast the arrays: they have equal leading axes, followed by q (m, d), p (w,
 * d) and out (m, n). */

typedef struct {
    PyArrayObject *q, *p, *out;
    int64_t first_delta; /* delta of the table's first row */
    const wpe_kernels *kernels;
    int dtype;
    wpe_bias_shape shape;
    void *packed;
} bias_call;

/* Set dtype and shape from the arrays. */
static void read_bias_arrays(bias_call *c) {
    int lead = PyArray_NDIM(c->q) - 2, beyond = c->shape.beyond;
    wpe_matrix q = matrix_at(c->q, lead, 0), out = matrix_at(c->out, lead, 0);
    c->dtype = PyArray_TYPE(c->q) == NPY_DOUBLE ? WPE_F64 : WPE_F32;
    c->shape = (wpe_bias_shape){.queries = PyArray_DIM(c->q, lead),
                                .keys = PyArray_DIM(c->out, lead + 1),
                                .rows = PyArray_DIM(c->p, lead),
                                .head_size = PyArray_DIM(c->q, lead + 1),
                                .out_row_stride = out.row_stride,
                                .out_col_stride = out.col_stride,
                                .q_row_stride = q.row_stride,
                                .q_col_stride = q.col_stride,
                                .beyond = beyond};
    c->shape.shift = c->shape.keys - c->shape.queries - c->first_delta;
}

static void run_bias(bias_call *c) {
    int lead = PyArray_NDIM(c->q) - 2;
    int64_t count = PyArray_SIZE(c->out) / (c->shape.queries * c->shape.keys);
    const void *packed_table = NULL;
    LOOP_BEGIN
    for (int64_t i = 0; i < count; i++) {
        wpe_matrix p = matrix_at(c->p, lead, i);
        if (i == 0 || p.data != packed_table)
            c->kernels->pack_table[c->dtype](c->packed, p.data, c->shape.rows, c->shape.head_size,
                                             p.row_stride, p.col_stride);
        packed_table = p.data;
        c->kernels->relative_bias[c->dtype](entry_at(c->out, lead, i), entry_at(c->q, lead, i),
                                            c->packed, &c->shape, 0, c->shape.queries);
    }
    LOOP_END
}

/* relative_bias(kernels, q, p, out, first_delta, beyond). Requires: out is not empty. */
static PyObject *py_relative_bias(PyObject *self, PyObject *args) {
    (void)self;
    bias_call c = {0};
    long long first_delta;
    if (!PyArg_ParseTuple(args, "O&O!O!O!Li:relative_bias", to_kernels, &c.kernels, &PyArray_Type,
                          &c.q, &PyArray_Type, &c.p, &PyArray_Type, &c.out, &first_delta,
                          &c.shape.beyond))
        return NULL;
    c.first_delta = first_delta;
    read_bias_arrays(&c);
    size_t item = c.dtype == WPE_F64 ? 8 : 4;
    size_t bytes = (size_t)c.kernels->packed_size[c.dtype](c.shape.rows, c.shape.head_size) * item;
    c.packed = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!c.packed)
        return PyErr_Format(PyExc_MemoryError, "relative_bias needs %zu bytes of scratch memory",
                            bytes);
    Py_BEGIN_ALLOW_THREADS run_bias(&c);
    Py_END_ALLOW_THREADS free(c.packed);
    Py_RETURN_NONE;
}
