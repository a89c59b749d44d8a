// emulation.cpp: launch.h without a GPU. A build with WAVEPE_EMULATE_CUDA=1 has this file instead
// of loader.cpp.
#include <algorithm>
#include <set>
#include <stdexcept>

#include "kernels.cu"
#include "launch.h"

namespace wavepe::cuda {

static std::set<std::string> launched;

int64_t never_launched() { return (int64_t)(emulation::kernels().size() - launched.size()); }

void launch(const std::string &name, const Grid &grid, const void *params, int) {
    using namespace emulation;
    const auto found = kernels().find(name);
    if (found == kernels().end()) throw std::runtime_error("wavepe: no kernel " + name);
    launched.insert(name);
    // There are few blocks, so that threads loop over several indices. Every other launch runs the
    // threads from the last to the first, because no result may depend on their order.
    static bool reversed = false;
    reversed = !reversed;
    const int64_t x =
        std::clamp<int64_t>((grid.threads + WPE_CUDA_BLOCK - 1) / WPE_CUDA_BLOCK, 1, 3);
    gridDim = {(unsigned)x, (unsigned)std::min<int64_t>(grid.y, 2),
               (unsigned)std::min<int64_t>(grid.z, 2)};
    blockDim = {WPE_CUDA_BLOCK, 1, 1};
    const int64_t count = (int64_t)gridDim.x * gridDim.y * gridDim.z * WPE_CUDA_BLOCK;
    for (int64_t n = 0; n < count; n++) {
        const int64_t i = reversed ? count - 1 - n : n, block = i / WPE_CUDA_BLOCK;
        threadIdx = {(unsigned)(i % WPE_CUDA_BLOCK), 0, 0};
        blockIdx = {(unsigned)(block % gridDim.x), (unsigned)(block / gridDim.x % gridDim.y),
                    (unsigned)(block / gridDim.x / gridDim.y)};
        found->second(params);
    }
}

}  // namespace wavepe::cuda
