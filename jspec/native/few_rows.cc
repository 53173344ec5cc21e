// Products of a few rows with a kernel: outputs[r, o] = sum over i of rows[r, i] * kernel[o, i].
//
// Decoding is bound by the bytes of the weights: each is read once, in order, and serves all rows.
// Sums are float32, and their order does not depend on the number of rows: a row's result is the
// same, bit for bit, alone and among others.

#include "lanes.h"

namespace {

using namespace jspec;

constexpr int kCacheLine = 64;     // bytes
constexpr int kMaxRows = 8;        // rows that share one reading of the weights
constexpr int64_t kChunksPerThread = 4;
constexpr int64_t kSmallWork = 1 << 15;  // multiplications not worth waking a thread for

struct Shape {
  int64_t rows, inputs, outputs;
};

template <int kRows, int kOutputs, typename T>
inline void MultiplyBlock(const T* rows, const T* kernel, float* outputs, const Shape& shape) {
  const int64_t stride = shape.inputs;
  Lanes sums[kOutputs][kRows] = {};
  int64_t i = 0;
  for (; i + kStep <= stride; i += kStep) {
    Pair inputs[kRows];
    for (int r = 0; r < kRows; ++r) inputs[r] = Load(rows + r * stride + i);
    for (int o = 0; o < kOutputs; ++o) {
      const T* ahead = kernel + (2 * kOutputs + o) * stride + i;
      for (int line = 0; line < kStep; line += kCacheLine / sizeof(T)) {
        __builtin_prefetch(ahead + line);
      }
      const Pair weights = Load(kernel + o * stride + i);
      for (int r = 0; r < kRows; ++r) sums[o][r] = AddProducts(sums[o][r], weights, inputs[r]);
    }
  }
  if (i < stride) {
    for (int o = 0; o < kOutputs; ++o) {
      const Pair weights = LoadRest(kernel + o * stride + i, stride - i);
      for (int r = 0; r < kRows; ++r) {
        const Pair inputs = LoadRest(rows + r * stride + i, stride - i);
        sums[o][r] = AddProducts(sums[o][r], weights, inputs);
      }
    }
  }
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r) outputs[r * shape.outputs + o] = Total(sums[o][r]);
  }
}

// Outputs begin to end of `count` rows, at most kRows.
template <int kRows = kMaxRows, typename T>
void MultiplyRows(int64_t count, const T* rows, const T* kernel, float* outputs,
                  const Shape& shape, int64_t begin, int64_t end) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      return MultiplyRows<kRows - 1>(count, rows, kernel, outputs, shape, begin, end);
    }
  }
  constexpr int kOutputs = kRows <= 4 ? 4 : 2;  // as many sums as there are registers for
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) {
    MultiplyBlock<kRows, kOutputs>(rows, kernel + o * shape.inputs, outputs + o, shape);
  }
  for (; o < end; ++o) {
    MultiplyBlock<kRows, 1>(rows, kernel + o * shape.inputs, outputs + o, shape);
  }
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, const T* rows, const T* kernel, float* outputs,
              const Shape& shape) {
  const bool is_small = shape.rows * shape.inputs * shape.outputs < kSmallWork;
  const int64_t wanted = is_small ? 1 : NumThreads(pool) * kChunksPerThread;
  const int64_t size = (shape.outputs + 4 * wanted - 1) / (4 * wanted) * 4;
  const int64_t count = (shape.outputs + size - 1) / size;
  ShareOut(pool, count, [=](int64_t chunk) {
    const int64_t begin = chunk * size;
    const int64_t end = begin + size < shape.outputs ? begin + size : shape.outputs;
    for (int64_t r = 0; r < shape.rows; r += kMaxRows) {
      const int64_t few = shape.rows - r < kMaxRows ? shape.rows - r : kMaxRows;
      MultiplyRows(few, rows + r * shape.inputs, kernel, outputs + r * shape.outputs, shape, begin,
                   end);
    }
  });
}

ffi::Error FewRows(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const Shape shape{rows.dimensions()[0], rows.dimensions()[1], kernel.dimensions()[0]};
  float* to = outputs->typed_data();
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  if (kernel.element_type() == ffi::F32) {
    Multiply(pool, static_cast<const float*>(rows.untyped_data()),
             static_cast<const float*>(kernel.untyped_data()), to, shape);
  } else {
    Multiply(pool, static_cast<const BFloat16*>(rows.untyped_data()),
             static_cast<const BFloat16*>(kernel.untyped_data()), to, shape);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_few_rows, FewRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
