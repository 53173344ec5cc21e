// The first of the largest numbers of each row. XLA on CPU searches one row after the other, on one
// thread.

#include <algorithm>
#include <limits>

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_first_argmax, FirstArgmax);
