// module.cpp: the module wavepe._torch. Importing it registers torch.ops.wavepe.*. torch must be
// imported before.
#include <Python.h>

#include "common.h"

#ifdef WPE_EMULATE_CUDA
#include "../cuda/launch.h"
// For tests. With on=true the CUDA kernels handle tensors on the CPU from now on. Return how many
// kernels have not been launched yet.
namespace wavepe {
int64_t emulate_cuda(bool on) {
    emulating = on;
    return cuda::never_launched();
}
STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) { m.def("emulate_cuda(bool on) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(wavepe, CompositeExplicitAutograd, m) {
    m.impl("emulate_cuda", TORCH_BOX(&emulate_cuda));
}
}  // namespace wavepe
#endif

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
    // The NumPy module owns the kernels and their dispatch, so use_variant switches both modules.
    // PyCapsule_Import would ask the package, which lacks the module after a failed first import.
    PyObject *numpy_side = PyImport_ImportModule("wavepe._numpy");
    if (!numpy_side) return nullptr;
    PyObject *capsule = PyObject_GetAttrString(numpy_side, "_dispatch");
    Py_DECREF(numpy_side);
    if (!capsule) return nullptr;
    wavepe::dispatch =
        static_cast<const wpe_dispatch *>(PyCapsule_GetPointer(capsule, "wavepe._numpy._dispatch"));
    Py_DECREF(capsule);
    if (!wavepe::dispatch) return nullptr;
    PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED  // the operators run without the GIL on every Python: torch releases it
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
