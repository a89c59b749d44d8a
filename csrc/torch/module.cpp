// module.cpp: wavepe._torch. Importing it registers torch.ops.wavepe.*; import torch first.
#include <Python.h>

#include "common.h"

static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                 "wavepe._torch",
                                 nullptr,
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

PyMODINIT_FUNC PyInit__torch(void) {
    // The NumPy module owns the kernels and their dispatch, so that use_variant moves both.
    PyObject *numpy_side = PyImport_ImportModule("wavepe._numpy");
    if (!numpy_side) return nullptr;
    Py_DECREF(numpy_side);
    wavepe::dispatch =
        static_cast<const wpe_dispatch *>(PyCapsule_Import("wavepe._numpy._dispatch", 0));
    if (!wavepe::dispatch) return nullptr;
    return PyModule_Create(&definition);
}
