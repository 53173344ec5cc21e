// Root-mean-square normalisation, after which XLA's sums would depend on the number of rows: it adds
// up the squares of eight rows or more in another order than those of fewer.

#include "lanes.h"

#include <algorithm>
#include <cmath>

namespace {

using namespace jspec;

constexpr int64_t kSmallWork = 1 << 15;  // numbers not worth waking a thread for
constexpr int64_t kChunksPerThread = 4;

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

void Normalise(const float* from, const float* scale, float epsilon, int64_t count,
               float* __restrict to) {
  const float mean = SumOfSquares(from, count) / static_cast<float>(count);
  const float factor = 1 / std::sqrt(mean + epsilon);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor * scale[i];
}

ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> inputs,
                   ffi::BufferR1<ffi::F32> scale, ffi::BufferR0<ffi::F32> epsilon,
                   ffi::Result<ffi::BufferR3<ffi::F32>> outputs) {
  const auto size = inputs.dimensions();
  const int64_t rows = size[0] * size[1], width = size[2];
  const float *from = inputs.typed_data(), *scales = scale.typed_data();
  const float small = *epsilon.typed_data();
  float* to = outputs->typed_data();
  if (rows == 0) return ffi::Error::Success();
  const bool is_small = rows * width < kSmallWork;
  const int64_t wanted = is_small ? 1 : NumThreads(pool) * kChunksPerThread;
  const int64_t chunk = (rows + wanted - 1) / wanted;
  ShareOut(pool, (rows + chunk - 1) / chunk, [=](int64_t piece) {
    for (int64_t r = piece * chunk; r < std::min(rows, (piece + 1) * chunk); ++r) {
      Normalise(from + r * width, scales, small, width, to + r * width);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rms_norm, RmsNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>());
