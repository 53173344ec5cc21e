// What is asked of all tokens of a vocabulary: the first of the largest numbers of each row, and
// the threshold of a filter.

#include <algorithm>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

using namespace jspec;

constexpr int64_t kVectors = 4;   // independent maxima: one would wait for its own last comparison
constexpr int64_t kBlock = 1024;  // numbers whose maximum is found before its index is looked for

// Returns the largest number; NaN where any number is NaN.
float Largest(const float* from, int64_t count) {
  Lanes largest[kVectors];
  for (Lanes& one : largest) one = Lanes{} - std::numeric_limits<float>::infinity();
  Words is_nan = {};
  int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const Lanes lanes = LoadLanes(from + i + v * kLanes);
      const Words is_larger = (Words)(lanes > largest[v]);
      largest[v] = (Lanes)(((Words)lanes & is_larger) | ((Words)largest[v] & ~is_larger));
      is_nan |= (Words)(lanes != lanes);
    }
  }
  float best = -std::numeric_limits<float>::infinity();
  auto add = [&best](float number) { best = best >= number ? best : number; };
  for (const Lanes& one : largest) {
    for (int lane = 0; lane < kLanes; ++lane) add(one[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (is_nan[lane]) return std::numeric_limits<float>::quiet_NaN();
  }
  for (; i < count; ++i) {
    if (from[i] != from[i]) return from[i];
    add(from[i]);
  }
  return best;
}

struct Best {
  int64_t place;
  float number;
};

// Finds the maximum block by block, and then its place: only the best block is read twice. Where
// any number is NaN, so is the result, and the place is `count`.
Best FirstLargest(const float* from, int64_t count) {
  if (count == 0) return {0, -std::numeric_limits<float>::infinity()};
  Best best{0, Largest(from, std::min(kBlock, count))};
  for (int64_t i = kBlock; i < count; i += kBlock) {
    const float number = Largest(from + i, std::min(kBlock, count - i));
    if (number > best.number || number != number) best = {i, number};
    if (number != number) break;
  }
  while (best.place < count && from[best.place] != best.number) ++best.place;
  return best;
}

ffi::Error FirstArgmax(Threads pool, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> places,
                       ffi::Result<ffi::AnyBuffer> largest) {
  const int64_t rows = places->element_count(), count = values.dimensions().back();
  const float* from = values.typed_data<float>();
  int32_t* to_places = places->typed_data<int32_t>();
  float* to_largest = largest->typed_data<float>();
  ForRows(pool, rows, count, [=](int64_t r) {
    const Best best = FirstLargest(from + r * count, count);
    to_places[r] = best.place;
    to_largest[r] = best.number;
  });
  return ffi::Error::Success();
}

// A radix search settles that many bits of a filter's threshold at a time, and reads the vocabulary
// three times. The XLA reference is a bisection that reads it 32 times.
constexpr int kBits[] = {11, 11, 10};

// The smallest rank for which the weights of it and of all smaller ranks reach the target; the
// largest number if none does. Sums are in double, always in the same order.
int32_t SmallestRank(const int32_t* ranks, const float* weights, double target, int64_t count,
                     std::vector<double>& sums) {
  if (target <= 0) return std::numeric_limits<int32_t>::min();
  uint64_t prefix = 0;  // the bits that are settled
  double below = 0;     // of the ranks with a smaller prefix
  int shift = 32;
  for (const int bits : kBits) {
    const int settled = shift;
    shift -= bits;
    const uint64_t size = uint64_t{1} << bits;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t i = 0; i < count; ++i) {
      // The sign bit is flipped, so that unsigned numbers have the order of the signed ranks.
      const uint64_t key = static_cast<uint32_t>(ranks[i]) ^ 0x80000000u;
      if (key >> settled == prefix && weights[i] != 0) sums[key >> shift & (size - 1)] += weights[i];
    }
    uint64_t next = 0, last = 0;
    for (; next < size && !(below + sums[next] >= target); ++next) {
      if (sums[next] != 0) last = next;
      below += sums[next];
    }
    // The weights of this prefix were enough in the last pass. They are now, too, even if its parts
    // add up to a little less in this order.
    if (next == size && settled == 32) return std::numeric_limits<int32_t>::max();
    if (next == size) next = last;
    prefix = prefix << bits | next;
  }
  return static_cast<int32_t>(static_cast<uint32_t>(prefix) ^ 0x80000000u);
}

ffi::Error SmallestRanks(Threads pool, ffi::BufferR3<ffi::S32> ranks,
                         ffi::BufferR3<ffi::F32> weights, ffi::BufferR3<ffi::F32> targets,
                         ffi::Result<ffi::BufferR3<ffi::S32>> results) {
  const auto size = ranks.dimensions();
  const int64_t rows = size[0] * size[1], count = size[2];
  // The tokens of a row may share a target.
  const int64_t sharing = size[1] == targets.dimensions()[1] ? 1 : size[1];
  const int32_t* keys = ranks.typed_data();
  const float *from = weights.typed_data(), *wanted = targets.typed_data();
  int32_t* to = results->typed_data();
  ShareOut(pool, rows, [=](int64_t row) {
    std::vector<double> sums(uint64_t{1} << kBits[0]);
    to[row] =
        SmallestRank(keys + row * count, from + row * count, wanted[row / sharing], count, sums);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_first_argmax, FirstArgmax);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_smallest_rank, SmallestRanks);
