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

// Lanes of both halves of a pair, which are counted through: those of the places given.
#ifdef __clang__
#define JSPEC_PICK(pair, ...) __builtin_shufflevector((pair).first, (pair).second, __VA_ARGS__)
#else
#define JSPEC_PICK(pair, ...) __builtin_shuffle((pair).first, (pair).second, Words{__VA_ARGS__})
#endif

// The lanes at even places of both, one after the other, and those at odd places.
inline Pair Unzip(const Pair& pair) {
  return {JSPEC_PICK(pair, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          JSPEC_PICK(pair, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

// Undoes Unzip.
inline Pair Zip(const Pair& pair) {
  return {JSPEC_PICK(pair, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          JSPEC_PICK(pair, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}

// Floats in the order in which Load gives numbers of type T.
template <typename T>
inline Pair LoadLike(const float* from) {
  const Pair pair = Load(from);
  return sizeof(T) == sizeof(BFloat16) ? Unzip(pair) : pair;
}

// Undoes LoadLike.
template <typename T>
inline void StoreLike(float* to, const Pair& pair) {
  const Pair ordered = sizeof(T) == sizeof(BFloat16) ? Zip(pair) : pair;
  std::memcpy(to, &ordered, sizeof(ordered));
}

inline float Total(const Lanes& lanes) {
  typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));
  Quarter quarters[4];
  std::memcpy(quarters, &lanes, sizeof(lanes));
  const Quarter sum = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The totals of kLanes vectors, which are overwritten: vector i's in lane i, all of them summed in
// the same order.
inline Lanes Totals(Lanes* lanes) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) {
      const Pair halves = Unzip({lanes[2 * i], lanes[2 * i + 1]});
      lanes[i] = halves.first + halves.second;
    }
  }
  return lanes[0];
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
