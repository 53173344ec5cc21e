// Products of rows with a kernel's outputs: outputs[r, o] = sum over i of rows[r, i] * kernel[o, i].
//
// Sums are float32, and their order does not depend on the number of rows: a row's result is the
// same, bit for bit, alone and among others.

#ifndef JSPEC_NATIVE_MULTIPLY_H_
#define JSPEC_NATIVE_MULTIPLY_H_

#include <algorithm>

#include "lanes.h"

namespace jspec {

// kStep numbers of one operand, and the sum of products with those of another.
template <typename T>
struct Numbers {
  Pair pair;

  static Numbers From(const T* from) { return {Load(from)}; }
  Lanes AddTo(const Lanes& sum, const Numbers& other) const {
    return AddProducts(sum, pair, other.pair);
  }
  static constexpr int kUsualRows = 8;  // that share one reading of the weights
  static constexpr int OutputsFor(int rows) { return rows <= 4 ? 4 : 2; }  // for the registers' sake
};

#ifdef __AVX512BF16__
template <>
struct Numbers<BFloat16> {
  __m512bh packed;

  static Numbers From(const BFloat16* from) {
    Numbers numbers;
    std::memcpy(&numbers.packed, from, sizeof(packed));
    return numbers;
  }
  Lanes AddTo(const Lanes& sum, const Numbers& other) const {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, packed, other.packed);
  }
  static constexpr int kUsualRows = 6;
  static constexpr int OutputsFor(int rows) { return rows <= 6 ? 4 : 3; }
};
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

constexpr int kMaxRows = 8;     // of a block
constexpr int kCacheLine = 64;  // bytes
constexpr int kAhead = 4096;    // bytes between the weights in use and those asked for
constexpr int64_t kTile = 96;   // outputs whose weights stay near while all rows pass by
constexpr int64_t kChunksPerThread = 2;
constexpr int64_t kSmallWork = 1 << 15;  // multiplications not worth waking a thread for

struct ProductShape {
  int64_t rows, inputs, outputs;
};

// The last inputs, fewer than a step, and zeros.
template <typename T>
inline Numbers<T> Rest(const T* from, int64_t count) {
  T padded[kStep] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return Numbers<T>::From(padded);
}

template <int kRows, int kOutputs, typename T>
inline void MultiplyBlock(const T* rows, const T* kernel, float* outputs, const ProductShape& shape) {
  const int64_t stride = shape.inputs;
  Lanes sums[kOutputs][kRows] = {};
  int64_t i = 0;
  for (; i + kStep <= stride; i += kStep) {
    Numbers<T> inputs[kRows];
    for (int r = 0; r < kRows; ++r) inputs[r] = Numbers<T>::From(rows + r * stride + i);
    const auto* ahead = reinterpret_cast<const char*>(kernel + i * kOutputs) + kAhead;
    for (size_t line = 0; line < kOutputs * kStep * sizeof(T); line += kCacheLine) {
      __builtin_prefetch(ahead + line);
    }
    for (int o = 0; o < kOutputs; ++o) {
      const auto weights = Numbers<T>::From(kernel + o * stride + i);
      for (int r = 0; r < kRows; ++r) sums[o][r] = weights.AddTo(sums[o][r], inputs[r]);
    }
  }
  if (i < stride) {
    for (int o = 0; o < kOutputs; ++o) {
      const auto weights = Rest(kernel + o * stride + i, stride - i);
      for (int r = 0; r < kRows; ++r) {
        sums[o][r] = weights.AddTo(sums[o][r], Rest(rows + r * stride + i, stride - i));
      }
    }
  }
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r) outputs[r * shape.outputs + o] = Total(sums[o][r]);
  }
}

// Outputs begin to end of `count` rows, at most kRows. Weights that are read once only are fastest
// read in order, one output at a time; those that stay near, several at a time.
template <int kRows, bool kReadOnce, typename T>
void MultiplyRows(int64_t count, const T* rows, const T* kernel, float* outputs,
                  const ProductShape& shape, int64_t begin, int64_t end) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      return MultiplyRows<kRows - 1, kReadOnce>(count, rows, kernel, outputs, shape, begin, end);
    }
  }
  constexpr int kOutputs = kReadOnce ? 1 : Numbers<T>::OutputsFor(kRows);
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) {
    MultiplyBlock<kRows, kOutputs>(rows, kernel + o * shape.inputs, outputs + o, shape);
  }
  for (; o < end; ++o) {
    MultiplyBlock<kRows, 1>(rows, kernel + o * shape.inputs, outputs + o, shape);
  }
}

// Outputs begin to end of all rows, in blocks of about as many rows each; the weights stay near.
template <typename T>
void MultiplyTile(const T* rows, const T* kernel, float* outputs, const ProductShape& shape,
                  int64_t begin, int64_t end) {
  const int64_t most = shape.rows <= kMaxRows ? kMaxRows : Numbers<T>::kUsualRows;
  const int64_t blocks = (shape.rows + most - 1) / most;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t r = block * shape.rows / blocks;
    const int64_t count = (block + 1) * shape.rows / blocks - r;
    MultiplyRows<kMaxRows, false>(count, rows + r * shape.inputs, kernel,
                                  outputs + r * shape.outputs, shape, begin, end);
  }
}

// Runs work(begin, end) for tiles of the outputs, at most `tile` each, on all threads.
template <typename Work>
void ForTiles(ffi::ThreadPool& pool, const ProductShape& shape, int64_t tile, const Work& work) {
  const bool is_small = shape.rows * shape.inputs * shape.outputs < kSmallWork;
  const int64_t wanted = is_small ? 1 : NumThreads(pool) * kChunksPerThread;
  const int64_t size = (shape.outputs + 4 * wanted - 1) / (4 * wanted) * 4;
  const int64_t count = (shape.outputs + size - 1) / size;
  ShareOut(pool, count, [=](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * size, shape.outputs);
    for (int64_t o = chunk * size; o < end; o += tile) work(o, std::min(o + tile, end));
  });
}

}  // namespace jspec

#endif  // JSPEC_NATIVE_MULTIPLY_H_
