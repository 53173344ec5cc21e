// Products with kernels of floats and integers: a source of its own, compiled beside the others.

#include "multiply.cuh"

template cudaError_t jspec::LaunchFormat<jspec::Bfloat16Format>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Int8Format>(cudaStream_t, const jspec::Product&);
template cudaError_t jspec::LaunchFormat<jspec::Int4Format>(cudaStream_t, const jspec::Product&);
