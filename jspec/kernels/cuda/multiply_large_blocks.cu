// Products with kernels of Q4_K and Q5_K: a source of its own, compiled beside the others.

#include "multiply.cuh"

template cudaError_t jspec::LaunchFormat<jspec::Q4KFormat>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Q5KFormat>(cudaStream_t, const jspec::Product&);
