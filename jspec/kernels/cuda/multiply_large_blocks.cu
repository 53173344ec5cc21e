// Products with kernels of strips with blocks of 256 inputs: a source of its own, compiled beside the others.

#include "multiply.cuh"

template cudaError_t jspec::LaunchFormat<jspec::Q4KFormat>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Q5KFormat>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Q6KFormat>(cudaStream_t, const jspec::Product&);
