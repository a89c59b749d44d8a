/* fake_driver.c: the functions of the CUDA driver and of torch that csrc/cuda/loader.cpp calls.
 * Each prints its arguments. test_cuda_loader.py builds this file as libcuda.so.1 and
 * libtorch_cuda.so. FAKE_FAIL names a function that fails, FAKE_CONTEXT the context that is
 * current. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *stack[9];
static int depth = 0;

static int done(const char *name) {
    const char *fail = getenv("FAKE_FAIL");
    return fail && !strcmp(fail, name) ? 999 : 0;
}

int cuGetErrorString(int result, const char **text) {
    *text = result == 999 ? "made to fail" : NULL;
    return 0;
}
int cuDeviceGet(int *device, int number) {
    *device = 100 + number;
    return done("cuDeviceGet");
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    printf("retain %d\n", device);
    *context = (void *)(intptr_t)(1000 + device);
    return done("cuDevicePrimaryCtxRetain");
}
int cuCtxGetCurrent(void **context) {
    const char *given = getenv("FAKE_CONTEXT"); /* what torch has made current */
    *context = depth ? stack[depth - 1] : (void *)(intptr_t)(given ? atoi(given) : 0);
    return done("cuCtxGetCurrent");
}
int cuCtxPushCurrent_v2(void *context) {
    printf("push %d\n", (int)(intptr_t)context);
    if (done("cuCtxPushCurrent_v2")) return 999;
    stack[depth++] = context;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    printf("pop\n");
    *context = stack[--depth];
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static int now = 0;
    int old = now;
    now = *mode;
    *mode = old;
    printf("capture mode %d\n", now);
    return done("cuThreadExchangeStreamCaptureMode");
}
int cuModuleLoadData(void **module, const void *image) {
    printf("load %08x\n", *(const unsigned *)image);
    *module = (void *)5;
    return done("cuModuleLoadData");
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    printf("function %s of %d\n", name, (int)(intptr_t)module);
    *function = (void *)(intptr_t)strlen(name);
    return done("cuModuleGetFunction");
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    printf("launch %d: %u %u %u blocks of %u %u %u, %u shared, stream %d, first parameter %d%s\n",
           (int)(intptr_t)function, x, y, z, bx, by, bz, shared, (int)(intptr_t)stream,
           *(int *)params[0], extra ? ", extra" : "");
    return done("cuLaunchKernel");
}
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
    *stream = (void *)(intptr_t)(70 + device);
    return done("aoti_torch_get_current_cuda_stream");
}
