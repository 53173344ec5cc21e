// Kernels that check the emulator itself.

#include "common.cuh"

namespace {

// Reverses the numbers of a block by shared memory, with and without the barrier between.
template <bool kHasBarrier>
__global__ void Reverse(const float* numbers, float* results) {
  float* shared = reinterpret_cast<float*>(jspec::SharedMemory());
  const unsigned i = threadIdx.x, size = blockDim.x;
  shared[i] = numbers[blockIdx.x * size + i];
  if (kHasBarrier) __syncthreads();
  results[blockIdx.x * size + i] = shared[size - 1 - i];
}

// The same within each warp.
template <bool kHasBarrier>
__global__ void ReverseWarp(const float* numbers, float* results) {
  float* shared = reinterpret_cast<float*>(jspec::SharedMemory());
  const unsigned i = threadIdx.x;
  shared[i] = numbers[i];
  if (kHasBarrier) __syncwarp();
  results[i] = shared[i ^ 31];
}

// The same within each cluster of two blocks, which read each other's numbers.
template <bool kHasBarrier>
__global__ void ReverseCluster(const float* numbers, float* results) {
  float* shared = reinterpret_cast<float*>(jspec::SharedMemory());
  const unsigned i = threadIdx.x, size = blockDim.x;
  shared[i] = numbers[blockIdx.x * size + i];
  if (kHasBarrier) jspec::WaitForCluster<2>();
  const float* own = shared + size - 1 - i;
  results[blockIdx.x * size + i] = jspec::LoadFromCluster<2>(own, 1 - blockIdx.x % 2);
  jspec::WaitForReaders<2>();
}

// The same of a block whose numbers are copied; without the wait for these, too.
template <bool kHasBarrier>
__global__ void ReverseCopies(const float* numbers, float* results) {
  float* shared = reinterpret_cast<float*>(jspec::SharedMemory());
  const unsigned i = threadIdx.x, size = blockDim.x;
  jspec::CopyAsync<4>(shared + i, numbers + blockIdx.x * size + i, true);
  jspec::EndCopies();
  jspec::WaitForCopies<kHasBarrier ? 0 : 1>();
  __syncthreads();
  results[blockIdx.x * size + i] = shared[size - 1 - i];
  jspec::WaitForCopies<0>();
}

// Copies zeros, to or from an address that is not aligned, or without a wait.
__global__ void CopyZeros(int to, int from, bool waits) {
  jspec::CopyAsync<8>(jspec::SharedMemory() + to, jspec::SharedMemory() + 16 + from, false);
  jspec::EndCopies();
  if (waits) jspec::WaitForCopies<0>();
}

__global__ void Shuffles(const float* numbers, float* results) {
  const float number = numbers[threadIdx.x];
  float* own = results + threadIdx.x;
  own[0] = __shfl_sync(~0u, number, 5);
  own[32] = __shfl_xor_sync(~0u, number, 3);
}

// a [16 16] · b [16 8], both bfloat16 in row order.
__global__ void Multiply(const uint16_t* a, const uint16_t* b, float* results) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t x[4], y[2];
  for (int i = 0; i < 4; ++i) memcpy(&x[i], a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 4);
  for (int i = 0; i < 2; ++i) {
    y[i] = b[(2 * t + 8 * i) * 8 + g] | uint32_t(b[(2 * t + 8 * i + 1) * 8 + g]) << 16;
  }
  float sums[4] = {0, 0, 0, 0};
  jspec::MultiplyAdd(sums, x, y);
  for (int i = 0; i < 4; ++i) results[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// One thread leaves a barrier out, or a lane of a warp its exchange.
__global__ void Hang(bool is_warp) {
  if (is_warp && threadIdx.x != 3) __syncwarp();
  if (!is_warp && threadIdx.x < 32) __syncthreads();
  if (!is_warp && threadIdx.x >= 32) __syncwarp(1u << threadIdx.x % 32 | 1u);
}

int Run(void (*kernel)(const float*, float*), unsigned blocks, unsigned threads, const float* numbers,
        float* results) {
  return jspec::Launch(kernel, {blocks, threads, threads * 4, false}, nullptr, numbers, results);
}

}  // namespace

extern "C" {

int check_reverse(int has_barrier, const float* numbers, float* results) {
  return Run(has_barrier ? Reverse<true> : Reverse<false>, 3, 96, numbers, results);
}

int check_reverse_warp(int has_barrier, const float* numbers, float* results) {
  return Run(has_barrier ? ReverseWarp<true> : ReverseWarp<false>, 1, 64, numbers, results);
}

int check_reverse_cluster(int has_barrier, const float* numbers, float* results) {
  const auto kernel = has_barrier ? ReverseCluster<true> : ReverseCluster<false>;
  return jspec::Launch(kernel, {4, 64, 256, false, 2}, nullptr, numbers, results);
}

int check_reverse_copies(int has_barrier, const float* numbers, float* results) {
  return Run(has_barrier ? ReverseCopies<true> : ReverseCopies<false>, 3, 96, numbers, results);
}

int check_copy(int to, int from, int waits) {
  return jspec::Launch(CopyZeros, {1, 1, 32, false}, nullptr, to, from, waits != 0);
}

int check_shuffles(const float* numbers, float* results) {
  return Run(Shuffles, 1, 32, numbers, results);
}

int check_multiply(const uint16_t* a, const uint16_t* b, float* results) {
  return jspec::Launch(Multiply, {1, 32, 0, false}, nullptr, a, b, results);
}

int check_hang(int is_warp) {
  return jspec::Launch(Hang, {1, 64, 0, false}, nullptr, is_warp != 0);
}

float check_half(uint16_t bits) { return jspec::FloatOfHalf(bits); }

uint32_t check_pair(float first, float second) { return jspec::ToPair(first, second); }
}
