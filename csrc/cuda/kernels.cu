/* kernels.cu: all CUDA kernels as one module, which the driver loads in one step. */
#include "relative_bias.cu"
#include "rope.cu"
#include "rope_table.cu"
#include "wavelet_table.cu"
