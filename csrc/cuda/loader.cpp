// loader.cpp: load and launch the compiled kernels through the interface of the CUDA driver.
//
// The kernels are bytes in this library. The driver is opened at the first launch. So this library
// can be loaded on a machine without CUDA.
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "launch.h"

#ifdef WPE_FATBIN
__asm__(
    ".section .rodata\n.balign 16\n.globl wpe_fatbin\n.hidden wpe_fatbin\nwpe_fatbin:\n"
    ".incbin \"" WPE_FATBIN "\"\n.previous\n");
extern "C" const unsigned char wpe_fatbin[];
static const void *kernels() { return wpe_fatbin; }
#else
static const void *kernels() { return nullptr; }
#endif
#ifndef WPE_DRIVER
#define WPE_DRIVER "libcuda.so.1"
#endif

namespace wavepe::cuda {
namespace {

[[noreturn]] void fail(const std::string &what) { throw std::runtime_error("wavepe: " + what); }

// The driver's functions. Names and types are those of NVIDIA's cuda.h.
struct Driver {
    typedef int Result;
    typedef void *Handle;  // of a context, a module, a function or a stream
    enum { RELAXED = 2 };  // CU_STREAM_CAPTURE_MODE_RELAXED

    void *library = dlopen(WPE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    Result (*get_error)(Result, const char **) = nullptr;
    Result (*get_device)(int *, int) = nullptr;
    Result (*retain_context)(Handle *, int) = nullptr;
    Result (*get_context)(Handle *) = nullptr;
    Result (*push_context)(Handle) = nullptr;
    Result (*pop_context)(Handle *) = nullptr;
    Result (*load_module)(Handle *, const void *) = nullptr;
    Result (*get_function)(Handle *, Handle, const char *) = nullptr;
    Result (*exchange_capture_mode)(int *) = nullptr;
    Result (*launch_kernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, Handle, void **, void **) = nullptr;

    Driver() {
        if (!library) fail(std::string("no CUDA driver: ") + dlerror());
        find(get_error, "cuGetErrorString");
        find(get_device, "cuDeviceGet");
        find(retain_context, "cuDevicePrimaryCtxRetain");
        find(get_context, "cuCtxGetCurrent");
        find(push_context, "cuCtxPushCurrent_v2");
        find(pop_context, "cuCtxPopCurrent_v2");
        find(load_module, "cuModuleLoadData");
        find(get_function, "cuModuleGetFunction");
        find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
        find(launch_kernel, "cuLaunchKernel");
    }

    template <typename Function>
    void find(Function &function, const char *name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) fail(std::string("the CUDA driver has no ") + name);
    }

    void check(Result result, const std::string &what) const {
        if (!result) return;
        const char *text = nullptr;
        get_error(result, &text);
        fail(what + ": " + (text ? text : "unknown error") + " (CUDA error " +
             std::to_string(result) + ")");
    }
};

const Driver &driver() {
    static const Driver only;
    return only;
}

// Return torch's current stream. torch's CUDA library is already loaded, as there are CUDA tensors.
Driver::Handle current_stream(int device) {
    typedef int32_t Function(int32_t, void **);
    static Function *const function = [] {
        void *library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        void *found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
        if (!found) fail("torch's libtorch_cuda.so was not found: wavepe needs a CUDA build");
        return reinterpret_cast<Function *>(found);
    }();
    void *stream = nullptr;
    if (function(device, &stream)) fail("torch has no current stream for the device");
    return stream;
}

// Make a context current, and at the end restore the one that was current before.
struct CurrentContext {
    explicit CurrentContext(Driver::Handle context) {
        Driver::Handle now = nullptr;
        driver().check(driver().get_context(&now), "cuCtxGetCurrent");
        pushed = now != context;
        if (pushed) driver().check(driver().push_context(context), "cuCtxPushCurrent");
    }
    ~CurrentContext() {
        Driver::Handle popped;
        if (pushed) driver().pop_context(&popped);
    }
    CurrentContext(const CurrentContext &) = delete;
    bool pushed;
};

// While this object lives, the thread may load kernels even if a stream is being captured into a
// graph.
struct RelaxedCapture {
    int mode = Driver::RELAXED;
    RelaxedCapture() {
        driver().check(driver().exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    }
    ~RelaxedCapture() { driver().exchange_capture_mode(&mode); }
    RelaxedCapture(const RelaxedCapture &) = delete;
};

// A device's primary context, which torch uses, too, and the kernels loaded into it. They stay
// loaded until the process ends.
class Device {
    std::mutex mutex;
    Driver::Handle module = nullptr;
    std::map<std::string, Driver::Handle> functions;

  public:
    Driver::Handle context = nullptr;

    explicit Device(int number) {
        int device;
        driver().check(driver().get_device(&device, number), "cuDeviceGet");
        driver().check(driver().retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    }

    // Return a kernel. Requires: the context is current.
    Driver::Handle function(const std::string &name) {
        const std::lock_guard lock(mutex);
        const auto found = functions.find(name);
        if (found != functions.end()) return found->second;
        const RelaxedCapture relaxed;
        Driver::Handle loaded, function;
        if (!module) {
            driver().check(driver().load_module(&loaded, kernels()),
                           "the CUDA kernels could not be loaded");
            module = loaded;
        }
        driver().check(driver().get_function(&function, module, name.c_str()), "kernel " + name);
        return functions[name] = function;
    }
};

Device &device_of(int number) {
    static std::mutex mutex;
    static std::map<int, Device> devices;
    const std::lock_guard lock(mutex);
    return devices.try_emplace(number, number).first->second;
}

}  // namespace

void launch(const std::string &kernel, const Grid &grid, const void *params, int device) {
    if (grid.threads <= 0 || grid.y <= 0 || grid.z <= 0) return;
    if (!kernels())
        fail(
            "this build holds no CUDA kernels, as there was no nvcc. Install the CUDA toolkit, "
            "then wavepe again, in the folder of its checkout: pip install --no-cache-dir "
            "--force-reinstall --no-deps .");
    Device &target = device_of(device);
    const Driver::Handle stream = current_stream(device);
    const CurrentContext current(target.context);
    const Driver::Handle function = target.function(kernel);
    const unsigned x = (unsigned)std::min<int64_t>(
        (grid.threads + WPE_CUDA_BLOCK - 1) / WPE_CUDA_BLOCK, INT32_MAX);
    const unsigned y = (unsigned)std::min<int64_t>(grid.y, 65535);
    const unsigned z = (unsigned)std::min<int64_t>(grid.z, 65535);
    void *arguments[] = {const_cast<void *>(params)};
    driver().check(driver().launch_kernel(function, x, y, z, WPE_CUDA_BLOCK, 1, 1, 0, stream,
                                          arguments, nullptr),
                   "launching kernel " + kernel);
}

}  // namespace wavepe::cuda
