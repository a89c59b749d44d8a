/* module.c: the module wavepe._numpy. It has the kernels as NumPy ufuncs and generalised ufuncs.
 * Attention and relative_bias are plain functions (attention.c and relative_bias.c).
 *
 * For a ufunc NumPy broadcasts, casts, allocates and releases the GIL. A loop here only converts
 * byte strides to element strides and calls a kernel. It cannot fail: Python has checked the
 * values. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "numpy/ndarrayobject.h"
#include "numpy/ufuncobject.h"

#include "decoding.h"
#include "wavepe.h"

static const wpe_dispatch *dispatch;

static int64_t scalar_at(const char *p) {
    int64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static int any_zero(const char *scale, npy_intp n, npy_intp stride, int dtype) {
    if (stride == 0 && n > 1) n = 1;
    for (npy_intp i = 0; i < n; i++, scale += stride) {
        double value;
        if (dtype == WPE_F64)
            value = *(const double *)scale;
        else if (dtype == WPE_F32)
            value = *(const float *)scale;
        else
            value = (*(const uint16_t *)scale & 0x7fff) != 0;
        if (value == 0) return 1;
    }
    return 0;
}

/* Kernels compute on padded lanes and select results by masks. The floating-point flags that this
 * raises mean nothing. So every loop restores the flags that it found, and adds only its own. */
#define LOOP_BEGIN \
    fenv_t env;    \
    feholdexcept(&env);
#define LOOP_END fesetenv(&env);

/* ricker, gaussian, morlet, haar: t, scale, shift -> psi. `data` is the kind. */
#define PSI_LOOP(type, DTYPE, size)                                                                \
    static void psi_loop_##type(char **args, const npy_intp *n, const npy_intp *steps,             \
                                void *data) {                                                      \
        LOOP_BEGIN                                                                                 \
        wpe_current(dispatch)->psi[DTYPE]((int)(intptr_t)data, args[3], args[0], args[1], args[2], \
                                          *n, steps[3] / size, steps[0] / size, steps[1] / size,   \
                                          steps[2] / size);                                        \
        LOOP_END                                                                                   \
        if (any_zero(args[1], *n, steps[1], DTYPE)) feraiseexcept(FE_INVALID);                     \
    }
PSI_LOOP(f16, WPE_F16, 2)
PSI_LOOP(f32, WPE_F32, 4)
PSI_LOOP(f64, WPE_F64, 8)

/* rope_table: position, inv_freq, factor -> cos, sin */
#define ROPE_TABLE_LOOP(type, DTYPE, size)                                                         \
    static void rope_table_loop_##type(char **args, const npy_intp *n, const npy_intp *steps,      \
                                       void *data) {                                               \
        (void)data;                                                                                \
        LOOP_BEGIN                                                                                 \
        wpe_current(dispatch)->rope_table[DTYPE](args[3], args[4], (const double *)args[0],        \
                                                 (const double *)args[1], (const double *)args[2], \
                                                 *n, steps[3] / size, steps[4] / size,             \
                                                 steps[0] / 8, steps[1] / 8, steps[2] / 8);        \
        LOOP_END                                                                                   \
    }
ROPE_TABLE_LOOP(f32, WPE_F32, 4)
ROPE_TABLE_LOOP(f64, WPE_F64, 8)

/* wavelet_table (w),(d),(d),(),()->(w,d): offsets, scale, shift, kind, sign */
#define WAVELET_TABLE_LOOP(type, DTYPE, size)                                                      \
    static void wavelet_table_loop_##type(char **args, const npy_intp *dims,                       \
                                          const npy_intp *steps, void *data) {                     \
        (void)data;                                                                                \
        const npy_intp *core = steps + 6; /* offsets, scale, shift, out row, out column */         \
        wpe_wavelet_shape shape = {dims[1],     dims[2],     core[3] / size, core[4] / size,       \
                                   core[0] / 8, core[1] / 8, core[2] / 8};                         \
        wpe_wavelet_table_fn *kernel = wpe_current(dispatch)->wavelet_table[DTYPE];                \
        LOOP_BEGIN                                                                                 \
        for (npy_intp i = 0; i < dims[0]; i++)                                                     \
            kernel((int)scalar_at(args[3] + i * steps[3]), (int)scalar_at(args[4] + i * steps[4]), \
                   args[5] + i * steps[5], (const int64_t *)(args[0] + i * steps[0]),              \
                   (const double *)(args[1] + i * steps[1]),                                       \
                   (const double *)(args[2] + i * steps[2]), &shape);                              \
        LOOP_END                                                                                   \
    }
WAVELET_TABLE_LOOP(f16, WPE_F16, 2)
WAVELET_TABLE_LOOP(f32, WPE_F32, 4)
WAVELET_TABLE_LOOP(f64, WPE_F64, 8)

/* rope (d),(h),(h),(),()->(d): x, cos, sin, interleaved, inverse */
static void rope_loop(int dtype, npy_intp size, npy_intp real, char **args, const npy_intp *dims,
                      const npy_intp *steps) {
    const npy_intp *core = steps + 6; /* x, cos, sin, out */
    if (dims[0] == 0) return;
    wpe_rope_shape shape = {1,
                            dims[0],
                            dims[1],
                            dims[2],
                            {0, steps[5] / size, core[3] / size},
                            {0, steps[0] / size, core[0] / size},
                            {0, steps[1] / real, core[1] / real},
                            {0, steps[2] / real, core[2] / real},
                            (int)scalar_at(args[3]),
                            (int)scalar_at(args[4])};
    LOOP_BEGIN
    wpe_current(dispatch)->rope[dtype](args[5], args[0], args[1], args[2], &shape);
    LOOP_END
}
#define ROPE_LOOP(type, DTYPE, size, real)                                                 \
    static void rope_loop_##type(char **args, const npy_intp *dims, const npy_intp *steps, \
                                 void *data) {                                             \
        (void)data;                                                                        \
        rope_loop(DTYPE, size, real, args, dims, steps);                                   \
    }
ROPE_LOOP(f16, WPE_F16, 2, 4)
ROPE_LOOP(bf16, WPE_BF16, 2, 4)
ROPE_LOOP(f32, WPE_F32, 4, 4)
ROPE_LOOP(f64, WPE_F64, 8, 8)

/* ---- plain functions: their arrays, and the kernels of a whole call ------------------------- */

/* Return the address of entry `number`, in C order, of the array's first `axes` axes. */
static char *entry_at(PyArrayObject *x, int axes, int64_t number) {
    char *data = PyArray_DATA(x);
    while (axes--) {
        data += number % PyArray_DIM(x, axes) * PyArray_STRIDE(x, axes);
        number /= PyArray_DIM(x, axes);
    }
    return data;
}

/* Return the matrix of the two axes that follow the first `axes` axes, at their entry `number`. */
static wpe_matrix matrix_at(PyArrayObject *x, int axes, int64_t number) {
    npy_intp size = PyArray_ITEMSIZE(x);
    return (wpe_matrix){entry_at(x, axes, number), PyArray_STRIDE(x, axes) / size,
                        PyArray_STRIDE(x, axes + 1) / size};
}

static const char kernels_name[] = "wavepe._numpy.kernels";

/* Return the kernels in use. One call of a Python function uses the same kernels for all its
 * pieces: another thread may switch the variant meanwhile, and a variant cannot read what another
 * packed. */
static PyObject *py_kernels(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyCapsule_New((void *)wpe_current(dispatch), kernels_name, NULL);
}

static int to_kernels(PyObject *capsule, void *kernels) {
    *(const wpe_kernels **)kernels = PyCapsule_GetPointer(capsule, kernels_name);
    return *(const wpe_kernels **)kernels != NULL;
}

#include "relative_bias.c"
#include "attention.c"

/* ---- registration -------------------------------------------------------------------------- */

static const char *const psi_docs[WPE_KINDS] = {
    "ricker(t, scale, shift, /, out=None, ...)\n\n"
    "Ricker wavelet (1 - u^2) exp(-u^2 / 2), u = (t - shift) / scale [W].",
    "gaussian(t, scale, shift, /, out=None, ...)\n\n"
    "Gaussian exp(-u^2), u = (t - shift) / scale [W].",
    "morlet(t, scale, shift, /, out=None, ...)\n\n"
    "Real Morlet wavelet exp(-u^2) cos(t - shift), u = (t - shift) / scale. The argument of the\n"
    "cosine is not divided by scale. The cosine is correct for every finite argument [W].",
    "haar(t, scale, shift, /, out=None, ...)\n\n"
    "Haar wavelet: +1 for -1/2 <= u < 0, -1 for -1 <= u < -1/2, else 0,\n"
    "u = (t - shift) / scale [W, Eq. 15].",
};
static const char elementwise_doc[] =
    "\n\nA NumPy ufunc for float16, float32 and float64. Integers are converted as in np.sin.\n"
    "t - shift is rounded to the loop's dtype. All further arithmetic is double, and the result "
    "is\n"
    "rounded once. The tails are exactly 0. A scale of 0 gives NaN and the warning `invalid`.";

static PyUFuncGenericFunction psi_loops[] = {(PyUFuncGenericFunction)psi_loop_f16,
                                             (PyUFuncGenericFunction)psi_loop_f32,
                                             (PyUFuncGenericFunction)psi_loop_f64};
static char psi_types[] = {NPY_HALF,  NPY_HALF,  NPY_HALF,   NPY_HALF,   NPY_FLOAT,  NPY_FLOAT,
                           NPY_FLOAT, NPY_FLOAT, NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE};
static void *psi_data[WPE_KINDS][3];
static char psi_full_docs[WPE_KINDS][1024];

static PyUFuncGenericFunction rope_table_loops[] = {(PyUFuncGenericFunction)rope_table_loop_f32,
                                                    (PyUFuncGenericFunction)rope_table_loop_f64};
static char rope_table_types[] = {NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE, NPY_FLOAT,  NPY_FLOAT,
                                  NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE};

static PyUFuncGenericFunction wavelet_table_loops[] = {
    (PyUFuncGenericFunction)wavelet_table_loop_f32, (PyUFuncGenericFunction)wavelet_table_loop_f64,
    (PyUFuncGenericFunction)wavelet_table_loop_f16};
static char wavelet_table_types[] = {NPY_INT64, NPY_DOUBLE, NPY_DOUBLE, NPY_INT64,  NPY_INT64,
                                     NPY_FLOAT, NPY_INT64,  NPY_DOUBLE, NPY_DOUBLE, NPY_INT64,
                                     NPY_INT64, NPY_DOUBLE, NPY_INT64,  NPY_DOUBLE, NPY_DOUBLE,
                                     NPY_INT64, NPY_INT64,  NPY_HALF};

static PyUFuncGenericFunction rope_loops[] = {(PyUFuncGenericFunction)rope_loop_f16,
                                              (PyUFuncGenericFunction)rope_loop_f32,
                                              (PyUFuncGenericFunction)rope_loop_f64};
static char rope_types[] = {NPY_HALF,   NPY_FLOAT,  NPY_FLOAT,  NPY_INT64, NPY_INT64, NPY_HALF,
                            NPY_FLOAT,  NPY_FLOAT,  NPY_FLOAT,  NPY_INT64, NPY_INT64, NPY_FLOAT,
                            NPY_DOUBLE, NPY_DOUBLE, NPY_DOUBLE, NPY_INT64, NPY_INT64, NPY_DOUBLE};

/* bfloat16 comes as integers of the same bits, because NumPy has no bfloat16 of its own. */
static PyUFuncGenericFunction rope_bf16_loops[] = {(PyUFuncGenericFunction)rope_loop_bf16};
static char rope_bf16_types[] = {NPY_UINT16, NPY_FLOAT, NPY_FLOAT,
                                 NPY_INT64,  NPY_INT64, NPY_UINT16};

static void *no_data[3]; /* for loops without data */

static int add_ufunc(PyObject *module, const char *name, PyObject *ufunc) {
    int status = ufunc ? PyModule_AddObjectRef(module, name, ufunc) : -1;
    Py_XDECREF(ufunc);
    return status;
}

static int add_psi(PyObject *module, int kind) {
    for (int i = 0; i < 3; i++) psi_data[kind][i] = (void *)(intptr_t)kind;
    snprintf(psi_full_docs[kind], sizeof psi_full_docs[kind], "%s%s", psi_docs[kind],
             elementwise_doc);
    const char *name = dispatch->kind_names[kind];
    return add_ufunc(module, name,
                     PyUFunc_FromFuncAndData(psi_loops, psi_data[kind], psi_types, 3, 3, 1,
                                             PyUFunc_None, name, psi_full_docs[kind], 0));
}

static int exec_module(PyObject *module) {
    if (PyArray_ImportNumPyAPI() < 0 || PyUFunc_ImportUFuncAPI() < 0) return -1;
    dispatch = wpe_get_dispatch();
    for (int kind = 0; kind < WPE_KINDS; kind++)
        if (add_psi(module, kind) < 0) return -1;
#define GUFUNC(name, types, nin, signature)                                                 \
    PyUFunc_FromFuncAndDataAndSignature(name##_loops, no_data, name##_types, types, nin, 1, \
                                        PyUFunc_None, #name, NULL, 0, signature)
    if (add_ufunc(module, "rope_table",
                  PyUFunc_FromFuncAndData(rope_table_loops, no_data, rope_table_types, 2, 3, 2,
                                          PyUFunc_None, "rope_table", NULL, 0)) < 0 ||
        add_ufunc(module, "wavelet_table",
                  GUFUNC(wavelet_table, 3, 5, "(w),(d),(d),(),()->(w,d)")) < 0 ||
        add_ufunc(module, "rope", GUFUNC(rope, 3, 5, "(d),(h),(h),(),()->(d)")) < 0 ||
        add_ufunc(module, "rope_bf16", GUFUNC(rope_bf16, 1, 5, "(d),(h),(h),(),()->(d)")) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "ATTENTION_QUERY_BLOCK", WPE_QUERY_BLOCK) < 0) return -1;
    PyObject *capsule = PyCapsule_New((void *)dispatch, "wavepe._numpy._dispatch", NULL);
    return add_ufunc(module, "_dispatch", capsule);
}

static PyObject *py_variants(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    PyObject *names = PyList_New(0);
    const wpe_kernels *table;
    for (int i = 0; names && (table = wpe_variant(i)); i++) {
        PyObject *name = PyUnicode_FromString(table->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_variant(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyUnicode_FromString(wpe_current(dispatch)->name);
}

static PyObject *py_use_variant(PyObject *self, PyObject *name) {
    (void)self;
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (!text) return NULL;
    return PyBool_FromLong((size_t)size == strlen(text) && wpe_use_variant(text) == 0);
}

static PyObject *py_compiler(PyObject *self, PyObject *args) {
    (void)self, (void)args;
#ifdef __clang__
    return PyUnicode_FromString(__VERSION__);
#else
    return PyUnicode_FromString("GCC " __VERSION__);
#endif
}

static PyObject *py_cuda_archs(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyUnicode_FromString(WPE_CUDA_ARCHS);
}

static PyObject *py_flags(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyUnicode_FromString(WPE_FLAGS);
}

static PyMethodDef methods[] = {{"variants", py_variants, METH_NOARGS, NULL},
                                {"variant", py_variant, METH_NOARGS, NULL},
                                {"use_variant", py_use_variant, METH_O, NULL},
                                {"compiler", py_compiler, METH_NOARGS, NULL},
                                {"flags", py_flags, METH_NOARGS, NULL},
                                {"cuda_archs", py_cuda_archs, METH_NOARGS, NULL},
                                {"kernels", py_kernels, METH_NOARGS, NULL},
                                {"attention", py_attention, METH_VARARGS, NULL},
                                {"relative_bias", py_relative_bias, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
/* Free-threaded Python: its lock of imports guards what exec_module writes, and calls share nothing
 * but the table of kernels, which is switched atomically. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module},
#ifdef Py_GIL_DISABLED
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "wavepe._numpy", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__numpy(void) { return PyModuleDef_Init(&definition); }
