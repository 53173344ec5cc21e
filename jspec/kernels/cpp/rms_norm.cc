// Root-mean-square normalisation. XLA on CPU adds up the squares of eight rows or more in another
// order than those of fewer, so a row's result would depend on the number of rows. Here the order
// is fixed.

#include "lanes.h"

#include <cmath>

namespace {

using namespace jspec;

inline float SumOfSquares(const float* from, int64_t count) {
  Lanes first = {}, second = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const Pair pair = Load(from + i);
    first = MultiplyAdd(first, pair.first, pair.first);
    second = MultiplyAdd(second, pair.second, pair.second);
  }
  float sum = Total(first + second);
  for (; i < count; ++i) sum += from[i] * from[i];
  return sum;
}

template <typename T>
void Normalise(const float* from, const T* scale, float epsilon, int64_t count,
               float* __restrict to) {
  const float mean = SumOfSquares(from, count) / static_cast<float>(count);
  const float factor = 1 / std::sqrt(mean + epsilon);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor * AsFloat(scale[i]);
}

ffi::Error RmsNorm(Threads pool, ffi::BufferR3<ffi::F32> inputs, ffi::AnyBuffer scale,
                   ffi::BufferR0<ffi::F32> epsilon, ffi::Result<ffi::BufferR3<ffi::F32>> outputs) {
  const auto size = inputs.dimensions();
  const int64_t rows = size[0] * size[1], width = size[2];
  const float* from = inputs.typed_data();
  const float small = *epsilon.typed_data();
  float* to = outputs->typed_data();
  return WithNumbers(scale, [&](auto* scales) {
    ForRows(pool, rows, width, [=](int64_t r) {
      Normalise(from + r * width, scales, small, width, to + r * width);
    });
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rms_norm, RmsNorm);
