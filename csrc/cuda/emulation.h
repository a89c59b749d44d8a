/* emulation.h: the parts of CUDA that the kernels need, so that a C++ program can run them, one
 * thread after the other.
 *
 * Tests without a GPU use it. They check sizes, strides, indices, tails and roundings, also with
 * sanitizers. They find neither races nor differences between a GPU and a CPU. */
#ifndef WAVEPE_CUDA_EMULATION_H
#define WAVEPE_CUDA_EMULATION_H

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <map>
#include <string>

namespace wavepe::emulation {

struct Index {
    unsigned x, y, z;
};
typedef void Kernel(const void *params);

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

inline std::map<std::string, Kernel *> &kernels() {
    static std::map<std::string, Kernel *> all;
    return all;
}

struct Register {
    Register(const char *name, Kernel *kernel) { kernels()[name] = kernel; }
};

}  // namespace wavepe::emulation

using wavepe::emulation::blockDim;
using wavepe::emulation::blockIdx;
using wavepe::emulation::gridDim;
using wavepe::emulation::threadIdx;

#define DEVICE inline
#define UNROLL
#define KERNEL(name, Params)                                                      \
    static void name##_body(const Params &a);                                     \
    static const wavepe::emulation::Register name##_registered(                   \
        #name, [](const void *params) { name##_body(*(const Params *)params); }); \
    static void name##_body(const Params &a)

typedef c10::BFloat16 bf16;
typedef c10::Half f16;
struct alignas(16) Word16 {
    unsigned char bytes[16];
};
DEVICE Word16 load_word(const Word16 *from) { return *from; }
DEVICE void store_word(Word16 *to, Word16 word) { *to = word; }
DEVICE float widened(bf16 x) { return x; }
DEVICE float widened(f16 x) { return x; }
DEVICE void narrow(float x, bf16 *to) { *to = x; }
DEVICE void narrow(float x, f16 *to) { *to = x; }

#endif
