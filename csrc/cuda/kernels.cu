/* kernels.cu: all of them as one module, which the driver loads at once. */
#include "relative_bias.cu"
#include "rope.cu"
#include "rope_table.cu"
#include "wavelet_table.cu"
