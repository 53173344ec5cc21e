// Threads that share work, and look for more without falling asleep in between. A decoding step has
// some two hundred pieces of work, 10 to 100 microseconds each, and waking a thread takes as long
// as a small piece.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;

// XLA's threads as an argument of a function that XLA calls.
struct Threads : ffi::ThreadPool {
  Threads(ffi::ThreadPool pool) : ffi::ThreadPool(pool) {}
};

constexpr int kLooks = 4000;          // looks for work, some 0.2 ms, before a thread falls asleep
constexpr int64_t kMostThreads = 32;  // the one that has the work included
constexpr int kPatience = 1000;       // looks at the helpers' work before yielding the processor

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that help the one that has work. They live as long as the process.
class Team {
 public:
  // The one team of a process: a library has its own until it is given that of another.
  static Team*& Shared() {
    static Team* team = new Team;  // never deleted: its threads may still look at it at the end
    return team;
  }

  // Returns that team, with at least `wanted` helpers.
  static Team& WithHelpers(int64_t wanted) {
    Team* team = Shared();
    if (team->num_helpers_.load(std::memory_order_acquire) < wanted) team->Add(wanted);
    return *team;
  }

  // Runs work(0) ... work(count - 1) on this thread and on the helpers that are free. It waits only
  // for pieces that a helper has begun, so it ends even where no helper is free. It does nothing
  // and returns false where the helpers are at another thread's work.
  template <typename Work>
  bool Run(int64_t count, const Work& work) {
    if (is_taken_.test_and_set()) return false;
    work_ = &work;
    run_ = [](const void* work, int64_t piece) { (*static_cast<const Work*>(work))(piece); };
    count_ = count;
    begun_ = 0;
    is_open_ = true;
    ++round_;
    if (num_asleep_ > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }  // none is between its last look and its sleep
      wake_.notify_all();
    }
    Take();
    is_open_ = false;
    for (int looks = 0; num_inside_ > 0; ++looks) {
      looks < kPatience ? Pause() : std::this_thread::yield();
    }
    is_taken_.clear();
    return true;
  }

 private:
  void Add(int64_t wanted) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      while (num_helpers_ < wanted) {
        std::thread([this] { Help(); }).detach();
        ++num_helpers_;
      }
    } catch (const std::system_error&) {
      num_helpers_ = wanted;  // no more threads are to be had: fewer help
    }
  }

  void Take() {
    for (int64_t piece; (piece = begun_.fetch_add(1)) < count_;) run_(work_, piece);
  }

  [[noreturn]] void Help() {
    for (uint64_t seen = 0;;) {
      seen = Next(seen);
      // Whoever is inside before the work is closed is waited for; who comes later finds it closed.
      ++num_inside_;
      if (is_open_) Take();
      --num_inside_;
    }
  }

  // Waits for another round than the one that was seen last; returns it.
  uint64_t Next(uint64_t seen) {
    for (int looks = 0; looks < kLooks; ++looks) {
      const uint64_t round = round_.load(std::memory_order_acquire);
      if (round != seen) return round;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    wake_.wait(lock, [&] { return round_ != seen; });
    --num_asleep_;
    return round_;
  }

  // The helpers look at `round_` all the time, so it must not share a cache line with what changes
  // with every piece.
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int64_t> begun_{0};
  alignas(64) std::atomic<bool> is_open_{false};
  std::atomic<int64_t> num_inside_{0}, num_asleep_{0}, num_helpers_{0};
  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  const void* work_ = nullptr;
  void (*run_)(const void*, int64_t) = nullptr;
  int64_t count_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Threads that may work at the same time, at least this one: as many as XLA has.
inline int64_t NumThreads(ffi::ThreadPool& pool) {
  const int64_t threads = pool.num_threads();  // 0 where it cannot be told
  return std::max<int64_t>(1, std::min(threads, kMostThreads));
}

// Runs work(0) ... work(count - 1), on several threads if they are free and the work is worth it.
template <typename Work>
void ShareOut(ffi::ThreadPool& pool, int64_t count, const Work& work, bool is_small = false) {
  const int64_t helpers = is_small ? 0 : NumThreads(pool) - 1;
  if (count > 1 && helpers > 0 && Team::WithHelpers(helpers).Run(count, work)) return;
  for (int64_t piece = 0; piece < count; ++piece) work(piece);
}

// Runs work(row) for each row, on all threads if the rows, of `numbers` numbers each, are worth it.
template <typename Work>
void ForRows(ffi::ThreadPool& pool, int64_t rows, int64_t numbers, const Work& work) {
  constexpr int64_t kFewNumbers = 1 << 15, kPiecesPerThread = 4;
  if (rows == 0) return;
  const int64_t wanted = rows * numbers < kFewNumbers ? 1 : NumThreads(pool) * kPiecesPerThread;
  const int64_t chunk = (rows + wanted - 1) / wanted;
  ShareOut(pool, (rows + chunk - 1) / chunk, [=](int64_t piece) {
    for (int64_t r = piece * chunk; r < rows && r < (piece + 1) * chunk; ++r) work(r);
  });
}

}  // namespace jspec

template <>
struct xla::ffi::CtxBinding<jspec::Threads> {
  using Ctx = xla::ffi::ThreadPool;
};
