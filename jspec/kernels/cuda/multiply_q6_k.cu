// Products with kernels of Q6_K: a source of its own, compiled beside the others.

#include "multiply.cuh"

template cudaError_t jspec::LaunchFormat<jspec::Q6KFormat>(cudaStream_t, const jspec::Product&);
