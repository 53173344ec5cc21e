// The threshold of a filter: the smallest rank up to which the weights reach a target. The XLA
// reference is a bisection that reads the vocabulary 32 times. This is a radix search: it settles
// eleven bits of the threshold at a time, and reads the vocabulary three times.

#include "lanes.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace {

using namespace jspec;

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_smallest_rank, SmallestRanks);
