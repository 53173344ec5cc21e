// What the kernels need of CUDA, in few functions: launching, waiting for the kernel before, tensor
// cores and conversions. Without nvcc the header emulation.h of the tests stands in for CUDA, and
// runs the same sources on a CPU.
//
// cuda_bf16.h and cuda_fp16.h are not included: they need a header (nv/target) of a package that JAX
// does not bring.

#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulation.h"
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define JSPEC_BOTH __host__ __device__

namespace jspec {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// How a kernel is launched. With `overlaps` it may start before the kernel before it on the stream
// has ended (programmatic dependent launch, from sm_90 on): it then must call WaitForPrevious before
// it reads what that kernel wrote, or writes anything at all.
struct Shape {
  dim3 grid, block;
  size_t shared_bytes;
  bool overlaps;
  int cluster = 1;  // neighbours along x that read each other's shared memory, from sm_90 on
};

template <typename T>
struct Same {
  using Type = T;
};

// Launches a kernel; it takes its arguments by value.
template <typename... Parameters>
cudaError_t Launch(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream,
                   typename Same<Parameters>::Type... arguments) {
#ifdef __CUDACC__
  if (shape.shared_bytes > 48 << 10) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned number = 0;
  if (shape.overlaps) {
    attributes[number].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[number++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[number].id = cudaLaunchAttributeClusterDimension;
    attributes[number++].val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = number;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
#else
  return emulation::Run(shape.grid, shape.block, shape.shared_bytes, shape.cluster,
                        [&] { kernel(arguments...); });
#endif
}

// Returns the shared memory of the launch. Its contents are unknown.
__device__ inline unsigned char* SharedMemory() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
#else
  return emulation::OwnMemory();
#endif
}

// Waits until the kernel before has ended, and what it wrote can be read; see Shape.
__device__ inline void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks have come here: it fetches its weights while this
// one still computes.
__device__ inline void LetNextStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline float SumOfWarp(float number) {
  for (int bits = 16; bits; bits >>= 1) number += __shfl_xor_sync(kAllLanes, number, bits);
  return number;
}

JSPEC_BOTH inline uint32_t BitsOf(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}

JSPEC_BOTH inline float FloatOf(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// A pair of bfloat16 is the upper halves of two floats, the first one in the low bits.
JSPEC_BOTH inline float FirstOf(uint32_t pair) { return FloatOf(pair << 16); }
JSPEC_BOTH inline float SecondOf(uint32_t pair) { return FloatOf(pair & 0xffff0000u); }

// Rounds both to the nearest bfloat16, ties to even. What is not a number stays so.
JSPEC_BOTH inline uint32_t ToPair(float first, float second) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  uint32_t halves[2] = {BitsOf(first), BitsOf(second)};
  for (uint32_t& bits : halves) {
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  }
  return halves[0] | halves[1] << 16;
#endif
}

JSPEC_BOTH inline uint16_t ToBfloat16(float number) {
  return uint16_t(ToPair(number, 0.0f));
}

// Returns a · b + c of each of two pairs, rounded once.
JSPEC_BOTH inline uint32_t MultiplyAddPairs(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return ToPair(FirstOf(a) * FirstOf(b) + FirstOf(c), SecondOf(a) * SecondOf(b) + SecondOf(c));
#endif
}

// Returns (bits & mask) | more, which takes one instruction.
JSPEC_BOTH inline uint32_t MaskOr(uint32_t bits, uint32_t mask, uint32_t more) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(more));
  return result;
#else
  return (bits & mask) | more;
#endif
}

// Starts to copy 4, 8 or 16 bytes to shared memory, or zeros where they are not there. A thread may
// read what it copies itself once WaitForCopies says that it has come.
template <int kBytes>
__device__ inline void CopyAsync(void* to, const void* from, bool is_there) {
#if defined(__CUDA_ARCH__)
  const unsigned address = unsigned(__cvta_generic_to_shared(to));
  const int size = is_there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;"
                 :: "r"(address), "l"(from), "n"(kBytes), "r"(size) : "memory");
  }
#elif !defined(__CUDACC__)
  emulation::StartCopy(to, from, kBytes, is_there);
#endif
}

// Makes a group of the copies that this thread has started since the last one.
__device__ inline void EndCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
  emulation::EndCopies();
#endif
}

// Waits until all groups of this thread but the newest have come.
template <int kNewest>
__device__ inline void WaitForCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" :: "n"(kNewest) : "memory");
#elif !defined(__CUDACC__)
  emulation::WaitForCopies(kNewest);
#endif
}

// Waits for all threads of a cluster of blocks, which is one block where kBlocks is 1. They then see
// what the others have written to their shared memory.
template <int kBlocks>
__device__ inline void WaitForCluster() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
    emulation::WaitForCluster();
#endif
  }
}

// Waits until all threads of a cluster have come here, so that none ends, or writes its shared memory
// anew, while another one still reads it. The threads must have used what they have read: this orders
// no memory, as stores to global memory would have to be waited for, too.
template <int kBlocks>
__device__ inline void WaitForReaders() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kBlocks > 1) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
#endif
  WaitForCluster<kBlocks>();
}

// Reads a number from the shared memory of a block of the cluster, at this block's own address.
template <int kBlocks>
__device__ inline float LoadFromCluster(const float* own, int block) {
  if constexpr (kBlocks == 1) {
    return *own;
  } else {
    float number = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const unsigned address = unsigned(__cvta_generic_to_shared(own));
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(number) : "r"(remote) : "memory");
#elif !defined(__CUDACC__)
    number = *emulation::OfBlock(own, block);
#endif
    return number;
  }
}

// Returns the number of a float16.
JSPEC_BOTH inline float FloatOfHalf(uint16_t bits) {
#ifdef __CUDA_ARCH__
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
#else
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest < 0x400u) return FloatOf(sign | BitsOf(float(rest) * 0x1p-24f));  // subnormal
  const uint32_t exponent = rest >= 0x7c00u ? 0x7f800000u : (rest & 0x7c00u) * 0x2000u + 0x38000000u;
  return FloatOf(sign | exponent | (rest & 0x3ffu) << 13);
#endif
}

// sums [16 8] += a [16 16] · b [16 8] of bfloat16 pairs, by a whole warp. With g = lane / 4 and
// t = lane % 4 a lane holds
//   a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the column after it
//   b: (2t, g), (2t + 8, g), each with the row after it
//   sums: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ inline void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4],
                                   const uint32_t (&b)[2]) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto lanes =
      emulation::Exchange(kAllLanes, Operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const int lane = threadIdx.x % kWarp;
  for (int part = 0; part < 4; ++part) {
    const int row = lane / 4, column = lane % 4 * 2 + part % 2;
    float sum = 0;
    for (int k = 0; k < 16; k += 2) {
      const uint32_t x = lanes[row * 4 + k % 8 / 2].a[part / 2 + k / 8 * 2];
      const uint32_t y = lanes[column * 4 + k % 8 / 2].b[k / 8];
      sum += FirstOf(x) * FirstOf(y) + SecondOf(x) * SecondOf(y);
    }
    sums[part] += sum;
  }
#endif
}

}  // namespace jspec
