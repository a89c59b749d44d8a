// launch.h: start a kernel of kernels.cu by its name.
#pragma once

#include <cstdint>
#include <string>

#include "cuda.h"

namespace wavepe::cuda {

// Wanted threads along x, and blocks along y and z. A launch may have fewer, as each thread of a
// kernel loops over several indices.
struct Grid {
    int64_t threads, y = 1, z = 1;
};

// Start the kernel on torch's current stream of the device. params points to its struct of cuda.h.
// The call does not wait for the GPU and allocates no GPU memory. It throws std::runtime_error if
// this build has no kernels, if there is no driver, or if the driver reports an error.
void launch(const std::string &kernel, const Grid &grid, const void *params, int device);

// Return how many kernels have not been launched yet. Emulation only.
int64_t never_launched();

}  // namespace wavepe::cuda
