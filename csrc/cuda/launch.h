// launch.h: starts a kernel of kernels.cu by its name.
#pragma once

#include <cstdint>
#include <string>

#include "cuda.h"

namespace wavepe::cuda {

// Threads along x and blocks along y and z, or fewer: kernels walk in strides.
struct Grid {
    int64_t threads, y = 1, z = 1;
};

// On torch's current stream of the device. Nothing waits, nothing is allocated. Throws
// std::runtime_error: no kernels in this build, no driver, or what the driver said.
void launch(const std::string &kernel, const Grid &grid, const void *params, int device);

int64_t never_launched();  // how many kernels; in an emulation only

}  // namespace wavepe::cuda
