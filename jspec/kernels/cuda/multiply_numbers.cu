// The products with kernels of floats and integers: sources of their own, which are compiled side by side.

#include "multiply.cuh"

namespace jspec {

template cudaError_t LaunchFormat<Bfloat16Format>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Int8Format>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Int4Format>(cudaStream_t, const Product&);

}  // namespace jspec
