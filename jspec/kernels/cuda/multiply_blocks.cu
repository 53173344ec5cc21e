// The products with kernels of strips with blocks of 32 inputs: sources of their own, which are compiled side by side.

#include "multiply.cuh"

namespace jspec {

template cudaError_t LaunchFormat<Q40Format>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Q50Format>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Q80Format>(cudaStream_t, const Product&);

}  // namespace jspec
