// CUDA on a CPU: what g++ needs to compile the kernels, and to run a grid of them, one cluster of
// blocks after another. The threads of its blocks are fibers of one thread of the system: they change
// at barriers and warp exchanges only, in an order that `order` decides. So a run is deterministic,
// and a barrier that is missing gives another result in another order.
//
// A copy to shared memory comes when a thread waits for it, and no sooner: until then its place is
// NaN. A thread that ends while one is under way, or an address that is not aligned, fails a launch.
//
// What it cannot show: a block that ends while another one reads its shared memory, the order of
// memory between threads, and speed. Static shared memory (`__shared__` variables) is not poisoned;
// the launch's own is. Atomics are left out.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = struct NoStream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "the emulated launch failed";
}
// Two multiprocessors: a block of the kernels then takes several tiles.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline int num_processors = 2;
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? num_processors : 9;
  return cudaSuccess;
}
using std::max;
using std::min;

// Of the fiber that runs.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace jspec::emulation {

constexpr int kLanes = 32, kMostThreads = 1024, kMostBlocks = 4, kStackBytes = 128 << 10;
constexpr size_t kMostSharedBytes = 227 << 10;  // of a block, on sm_90
constexpr int kMostSlotBytes = 64;

enum class State { kReady, kAtBlockBarrier, kAtClusterBarrier, kAtWarpBarrier, kDone };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
};

struct Fiber {
  ucontext_t context;
  State state;
  unsigned mask;  // of lanes for which it waits
  uint3 thread, block;
  std::unique_ptr<char[]> stack;
  std::deque<std::vector<Copy>> copies;  // under way, by groups; the last one is not ended
};

// 0: threads and clusters run from the first to the last; 1: from the last to the first; else they are
// shuffled for every cluster, by this seed. A warp runs until all its lanes wait for other warps: it
// comes as far ahead of the others as it can.
inline unsigned order = 0;
inline std::mutex one_launch;
inline std::vector<Fiber> fibers(kMostThreads);
inline ucontext_t scheduler;
inline int current, num_threads, num_blocks;  // of a cluster
inline const std::function<void()>* kernel;
inline const char* failure;  // of a launch
alignas(16) inline unsigned char shared_memory[kMostBlocks][kMostSharedBytes];
alignas(16) inline unsigned char slots[kMostThreads][kMostSlotBytes];

inline void Yield(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  swapcontext(&fiber.context, &scheduler);
}

// Waits for the lanes of the mask: all of them must come with the same mask.
inline void SyncWarp(unsigned mask) {
  const int warp = current / kLanes * kLanes;
  fibers[current].state = State::kAtWarpBarrier;
  fibers[current].mask = mask;
  bool are_there = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const Fiber& fiber = fibers[warp + lane];
    are_there &= warp + lane < num_threads && fiber.state == State::kAtWarpBarrier &&
                 fiber.mask == mask;
  }
  for (int lane = 0; are_there && lane < kLanes; ++lane) {
    if (mask >> lane & 1) fibers[warp + lane].state = State::kReady;
  }
  Yield(fibers[current].state);
}

// Returns the values of all lanes; those outside the mask are all ones, which is NaN as a float.
template <typename T>
std::array<T, kLanes> Exchange(unsigned mask, const T& value) {
  static_assert(sizeof(T) <= kMostSlotBytes);
  const int warp = current / kLanes * kLanes;
  std::memcpy(slots[current], &value, sizeof(T));
  SyncWarp(mask);
  std::array<T, kLanes> values;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memset((void*)&values[lane], 0xff, sizeof(T));
    if (mask >> lane & 1) std::memcpy((void*)&values[lane], slots[warp + lane], sizeof(T));
  }
  SyncWarp(mask);
  return values;
}

// Returns the shared memory of the running thread's block.
inline unsigned char* OwnMemory() { return shared_memory[current / (num_threads / num_blocks)]; }

// Returns the same place in the shared memory of a block of the cluster.
template <typename T>
const T* OfBlock(const T* own, int block) {
  const auto offset = reinterpret_cast<const unsigned char*>(own) - OwnMemory();
  return reinterpret_cast<const T*>(shared_memory[block] + offset);
}

inline void WaitForCluster() { Yield(State::kAtClusterBarrier); }

inline void StartCopy(void* to, const void* from, int bytes, bool is_there) {
  if ((uintptr_t(to) | uintptr_t(from)) % bytes) failure = "a copy is not aligned";
  std::memset(to, 0xff, bytes);
  fibers[current].copies.back().push_back({to, is_there ? from : nullptr, bytes});
}

inline void EndCopies() { fibers[current].copies.emplace_back(); }

inline void WaitForCopies(size_t newest) {
  auto& groups = fibers[current].copies;
  for (; groups.size() > newest + 1; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
  }
}

inline std::vector<int> Permute(int size, std::mt19937& random) {
  std::vector<int> places(size);
  std::iota(places.begin(), places.end(), 0);
  if (order == 1) std::reverse(places.begin(), places.end());
  if (order > 1) std::shuffle(places.begin(), places.end(), random);
  return places;
}

// Returns the first warp of an order that can run, or -1.
inline int FindReadyWarp(const std::vector<int>& warps) {
  for (int warp : warps) {
    const int end = std::min((warp + 1) * kLanes, num_threads);
    for (int i = warp * kLanes; i < end; ++i) {
      if (fibers[i].state == State::kReady) return warp;
    }
  }
  return -1;
}

inline void Start() {
  (*kernel)();
  for (const auto& group : fibers[current].copies) {
    if (!group.empty()) failure = "a thread has ended before its copies";
  }
  Yield(State::kDone);
}

// Makes the threads from `first` on ready that wait for each other, if all of them do that are not
// done. Returns how many.
inline int Release(State barrier, int first, int count) {
  int done = 0, waiting = 0;
  for (int i = first; i < first + count; ++i) {
    done += fibers[i].state == State::kDone;
    waiting += fibers[i].state == barrier;
  }
  if (done + waiting < count) return 0;
  for (int i = first; i < first + count; ++i) {
    if (fibers[i].state == barrier) fibers[i].state = State::kReady;
  }
  return waiting;
}

// Runs the threads of a cluster until all are done. False: they wait for each other forever.
inline bool RunCluster(uint3 first_block, std::mt19937& random) {
  const int block_threads = num_threads / num_blocks;
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, Start, 0);
    fiber.state = State::kReady;
    fiber.copies.assign(1, {});
    const unsigned j = i % block_threads;
    fiber.thread = {j % blockDim.x, j / blockDim.x % blockDim.y, j / (blockDim.x * blockDim.y)};
    fiber.block = first_block;
    fiber.block.x += i / block_threads;
  }
  const std::vector<int> warps = Permute((num_threads + kLanes - 1) / kLanes, random);
  const std::vector<int> lanes = Permute(kLanes, random);
  while (true) {
    for (int warp; (warp = FindReadyWarp(warps)) >= 0;) {
      for (int lane : lanes) {
        const int i = warp * kLanes + lane;
        if (i >= num_threads || fibers[i].state != State::kReady) continue;
        current = i;
        threadIdx = fibers[i].thread;
        blockIdx = fibers[i].block;
        swapcontext(&scheduler, &fibers[i].context);
      }
    }
    int done = 0, waiting = 0, released = 0;
    for (int i = 0; i < num_threads; ++i) {
      done += fibers[i].state == State::kDone;
      waiting += fibers[i].state != State::kDone && fibers[i].state != State::kAtWarpBarrier;
    }
    if (done == num_threads) return true;
    for (int block = 0; block < num_blocks; ++block) {
      released += Release(State::kAtBlockBarrier, block * block_threads, block_threads);
    }
    if (!released) released = Release(State::kAtClusterBarrier, 0, num_threads);
    if (!released) {
      std::fprintf(stderr, "emulation: of %d threads %d wait at __syncthreads, %d for their warp\n",
                   num_threads, waiting, num_threads - done - waiting);
      return false;
    }
  }
}

// Runs a grid. Before each cluster its shared memory is filled with ones, which are NaN.
inline cudaError_t Run(dim3 grid, dim3 block, size_t shared_bytes, int cluster,
                       const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(one_launch);
  num_blocks = cluster;
  num_threads = block.x * block.y * block.z * cluster;
  if (num_threads < 1 || num_threads > kMostThreads || shared_bytes > kMostSharedBytes ||
      grid.x * grid.y * grid.z < 1 || cluster > kMostBlocks || grid.x % cluster) {
    return cudaErrorInvalidValue;
  }
  kernel = &body;
  failure = nullptr;
  gridDim = grid;
  blockDim = block;
  std::mt19937 random(order);
  const unsigned width = grid.x / cluster;
  for (unsigned i : Permute(width * grid.y * grid.z, random)) {
    std::memset(shared_memory, 0xff, cluster * sizeof(shared_memory[0]));
    const uint3 first = {i % width * cluster, i / width % grid.y, i / (width * grid.y)};
    if (!RunCluster(first, random)) return cudaErrorLaunchFailure;
  }
  if (failure) std::fprintf(stderr, "emulation: %s\n", failure);
  return failure ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace jspec::emulation

inline void __syncthreads() { jspec::emulation::Yield(jspec::emulation::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned mask = ~0u) { jspec::emulation::SyncWarp(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return jspec::emulation::Exchange(mask, value)[lane % jspec::emulation::kLanes];
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, jspec::emulation::current ^ bits);
}

inline float rsqrtf(float number) { return 1.0f / std::sqrt(number); }
