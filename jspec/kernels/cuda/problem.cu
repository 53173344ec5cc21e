// Whether the library's kernels run on this GPU with this driver.

#include "common.cuh"

namespace {

__global__ void Nothing() {}

}  // namespace

// Returns what the driver says against the kernels, as that it is too old; null if nothing.
extern "C" const char* jspec_cuda_problem() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Nothing);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
