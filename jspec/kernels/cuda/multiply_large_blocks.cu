// The products with kernels of strips with blocks of 256 inputs: sources of their own, which are compiled side by side.

#include "multiply.cuh"

namespace jspec {

template cudaError_t LaunchFormat<Q4KFormat>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Q5KFormat>(cudaStream_t, const Product&);
template cudaError_t LaunchFormat<Q6KFormat>(cudaStream_t, const Product&);

}  // namespace jspec
