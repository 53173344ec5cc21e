// Products with kernels of strips with blocks of 32 inputs: a source of its own, compiled beside the others.

#include "multiply.cuh"

template cudaError_t jspec::LaunchFormat<jspec::Q40Format>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Q50Format>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Q80Format>(cudaStream_t, const jspec::Product&);
