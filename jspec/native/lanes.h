// What the kernels share: vectors of floats, and work shared out to XLA's threads.

#ifndef JSPEC_NATIVE_LANES_H_
#define JSPEC_NATIVE_LANES_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;

constexpr int kLanes = 16;
constexpr int kStep = 2 * kLanes;  // numbers at a time

using BFloat16 = uint16_t;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct Pair {
  Lanes first, second;
};

inline Lanes AddProducts(Lanes sum, const Pair& a, const Pair& b) {
  sum += a.first * b.first;
  sum += a.second * b.second;
  return sum;
}

inline Pair Load(const float* from) {
  Pair pair;
  std::memcpy(&pair, from, sizeof(pair));
  return pair;
}

// The inputs at even places, and those at odd ones: a bfloat16 is the upper half of a float.
inline Pair Load(const BFloat16* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return {(Lanes)(words << 16), (Lanes)(words & 0xffff0000u)};
}

// Floats in the order in which Load gives numbers of type T.
template <typename T>
inline Pair LoadLike(const float* from) {
  Pair pair = Load(from);
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    const Pair given = pair;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Lanes& half = lane < kLanes / 2 ? given.first : given.second;
      pair.first[lane] = half[2 * lane % kLanes];
      pair.second[lane] = half[2 * lane % kLanes + 1];
    }
  }
  return pair;
}

// Undoes LoadLike.
template <typename T>
inline void StoreLike(float* to, const Pair& pair) {
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    for (int lane = 0; lane < kLanes; ++lane) {
      to[2 * lane] = pair.first[lane];
      to[2 * lane + 1] = pair.second[lane];
    }
  } else {
    std::memcpy(to, &pair, sizeof(pair));
  }
}

inline float Total(const Lanes& lanes) {
  typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));
  Quarter quarters[4];
  std::memcpy(quarters, &lanes, sizeof(lanes));
  const Quarter sum = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Threads that may work at the same time, at least this one.
inline int64_t NumThreads(ffi::ThreadPool& pool) {
  const int64_t threads = pool.num_threads();  // 0 where it cannot be told
  return threads > 1 ? threads : 1;
}

// Runs work(0) ... work(count - 1) on this thread and on those of the pool that are free. It waits
// for pieces that another thread has begun only, so it ends even where no other thread is free.
template <typename Work>
void ShareOut(ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Progress {
    std::atomic<int64_t> begun{0}, ended{0};
  };
  auto progress = std::make_shared<Progress>();
  auto take = [progress, count, work] {
    for (int64_t piece; (piece = progress->begun.fetch_add(1)) < count;) {
      work(piece);
      progress->ended.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t other = 1; other < NumThreads(pool) && other < count; ++other) {
    auto copy = take;
    pool.Schedule(std::move(copy));
  }
  take();
  while (progress->ended.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace jspec

#endif  // JSPEC_NATIVE_LANES_H_
