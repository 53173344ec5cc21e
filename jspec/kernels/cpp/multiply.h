// Products of rows with a kernel's outputs: outputs[r, o] = sum over i of rows[r, i] * kernel[o,
// i].
//
// Sums are float32, and their order does not depend on the number of rows: a row's result is the
// same, bit for bit, alone and among others.

#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"

#if defined(__AVX512BW__) || defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define JSPEC_HAS_PACKED  // kernels packed as in GGUF files are fast on this processor
#endif

namespace jspec {

#ifdef __AVX512BF16__
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// The type in which rows of type T are multiplied. Where the processor multiplies floats only,
// bfloat16 rows are converted to float once, and not again for every output.
template <typename T>
using RowNumber = std::conditional_t<kHasPairs, T, float>;

template <typename T>
inline RowNumber<T> AsRowNumber(T number) {
  if constexpr (std::is_same_v<T, RowNumber<T>>) {
    return number;
  } else {
    return AsFloat(number);
  }
}

// kStep numbers of one operand, which can be multiplied by those of another and summed.
template <typename T>
struct Numbers {
  Pair pair;

  static Numbers From(const T* from) { return {Load(from)}; }
  template <typename Other>
  Lanes AddTo(Lanes sum, const Numbers<Other>& other) const {
    return AddProducts(sum, pair, other.pair);
  }
  // How many rows share one reading of the weights, and how many outputs one reading of the rows,
  // so that sums, weights and inputs fit the registers.
  static constexpr int kUsualRows = kRegisters == 32 ? 6 : 3;
  static constexpr int OutputsFor(int rows) { return rows <= kUsualRows ? 4 : 2; }
  static constexpr int OutputsOnce(int rows) { return rows > 6 ? 1 : 2; }
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
  Lanes AddTo(Lanes sum, const Numbers& other) const {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, packed, other.packed);
  }
  static constexpr int kUsualRows = 6;
  static constexpr int OutputsFor(int rows) { return rows <= 6 ? 4 : 3; }
  static constexpr int OutputsOnce(int) { return 1; }
};
#endif

constexpr int kMaxRows = 8;     // rows of a block
constexpr int kCacheLine = 64;  // bytes
// Weights are asked for this many bytes ahead, into the second cache: what is asked for into the
// first one occupies its few buffers of misses until memory answers, and loads that hit wait too.
constexpr int kAhead = 8192, kIntoL2 = 2;
constexpr int64_t kTile = 96;   // outputs whose weights stay in cache while all rows use them
constexpr int64_t kChunksPerThread = 2;  // so that a thread that is late can be helped
constexpr int64_t kSmallWork = 1 << 15;  // multiplications that are not worth waking a thread for

struct ProductShape {
  int64_t rows, inputs, outputs;
};

template <typename T>
struct Rows {
  const T* first;
  int64_t stride;

  const T* operator[](int64_t row) const { return first + row * stride; }
};

// A kernel of floats. Kernels of integers have the same members; all are multiplied step by step.
template <typename T>
struct FloatKernel {
  using Number = T;
  static constexpr int kBits = 8 * sizeof(T);  // of a weight
  static constexpr bool kIsInOrder = kHasPairs || std::is_same_v<T, float>;

  const T* values;
  int64_t inputs;

  Numbers<T> Step(int64_t output, int64_t input) const {
    return Numbers<T>::From(values + output * inputs + input);
  }

  // The last inputs, fewer than a step, and zeros.
  Numbers<T> Rest(int64_t output, int64_t input) const {
    T padded[kStep] = {};
    std::memcpy(padded, values + output * inputs + input, (inputs - input) * sizeof(T));
    return Numbers<T>::From(padded);
  }

  // Puts the numbers of a row, whole steps, in the order that steps have where not kIsInOrder.
  static void Arrange(float* row, int64_t count) {
    for (int64_t i = 0; i < count; i += kStep) Store(row + i, LoadLike<T>(row + i));
  }
};

// Asks memory for kCount weights ahead of those in use, which begin at `place`.
template <int kCount, typename Kernel>
inline void AskFor(const Kernel& kernel, int64_t place) {
  const auto* ahead = reinterpret_cast<const char*>(kernel.values) + place * Kernel::kBits / 8;
  for (int line = 0; line < kCount * Kernel::kBits / 8; line += kCacheLine) {
    __builtin_prefetch(ahead + kAhead + line, 0, kIntoL2);
  }
}

// Returns the rows in whole steps, in the kernel's order and padded with zeros: the rows themselves
// if they are so already, else a copy in the space given.
template <typename Kernel, typename T>
Rows<RowNumber<T>> Arrange(const T* rows, const ProductShape& shape,
                           Space<RowNumber<T>>& space) {
  using Number = RowNumber<T>;
  const int64_t steps = (shape.inputs + kStep - 1) / kStep, stride = steps * kStep;
  if constexpr (std::is_same_v<T, Number> && Kernel::kIsInOrder) {
    if (stride == shape.inputs) return {rows, stride};
  }
  Number* first = space.Take(shape.rows * stride);
  for (int64_t r = 0; r < shape.rows; ++r) {
    Number* row = first + r * stride;
    const T* from = rows + r * shape.inputs;
    std::fill(std::transform(from, from + shape.inputs, row, AsRowNumber<T>), row + stride, 0);
    if constexpr (!Kernel::kIsInOrder) Kernel::Arrange(row, stride);
  }
  return {first, stride};
}

// Computes outputs first to first + kOutputs of kRows rows. The loops are unrolled because sums in
// an array that is indexed at run time would live in memory.
template <int kRows, int kOutputs, typename T, typename Kernel>
inline void MultiplyBlock(const Rows<T>& rows, const Kernel& kernel, int64_t first, float* outputs,
                          int64_t stride) {
  Lanes sums[kOutputs][kRows] = {};
  Numbers<T> inputs[kRows];
  int64_t i = 0;
  for (; i + kStep <= kernel.inputs; i += kStep) {
    AskFor<kOutputs * kStep>(kernel, first * kernel.inputs + i * kOutputs);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) inputs[r] = Numbers<T>::From(rows[r] + i);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const auto weights = kernel.Step(first + o, i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[o][r] = weights.AddTo(sums[o][r], inputs[r]);
    }
  }
  if (i < kernel.inputs) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const auto weights = kernel.Rest(first + o, i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[o][r] = weights.AddTo(sums[o][r], Numbers<T>::From(rows[r] + i));
      }
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) outputs[r * stride + first + o] = Total(sums[o][r]);
  }
}

// Computes outputs begin to end of `count` rows, at most kRows. Weights that are read once only are
// read fastest in order, few outputs at a time. Weights that stay in cache are used fastest for
// several outputs at a time.
template <int kRows, bool kReadOnce, typename T, typename Kernel>
void MultiplyRows(int64_t count, const Rows<T>& rows, const Kernel& kernel, float* outputs,
                  int64_t stride, int64_t begin, int64_t end) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      return MultiplyRows<kRows - 1, kReadOnce>(count, rows, kernel, outputs, stride, begin, end);
    }
  }
  using Weights = Numbers<typename Kernel::Number>;
  constexpr int kOutputs = kReadOnce ? Weights::OutputsOnce(kRows) : Weights::OutputsFor(kRows);
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) {
    MultiplyBlock<kRows, kOutputs>(rows, kernel, o, outputs, stride);
  }
  for (; o < end; ++o) MultiplyBlock<kRows, 1>(rows, kernel, o, outputs, stride);
}

// Computes outputs begin to end of all rows, in blocks of about equal size. The weights stay in
// cache.
template <typename T, typename Kernel>
void MultiplyTile(int64_t count, const Rows<T>& rows, const Kernel& kernel, float* outputs,
                  int64_t stride, int64_t begin, int64_t end) {
  constexpr int kUsualRows = Numbers<typename Kernel::Number>::kUsualRows;
  const int64_t most = count <= kMaxRows ? kMaxRows : kUsualRows;
  const int64_t blocks = (count + most - 1) / most;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t r = block * count / blocks;
    MultiplyRows<kMaxRows, false>((block + 1) * count / blocks - r, Rows<T>{rows[r], rows.stride},
                                  kernel, outputs + r * stride, stride, begin, end);
  }
}

// Runs work(begin, end) for tiles of the outputs, at most `tile` each, on all threads. Threads take
// multiples of kOutputs.
template <int kOutputs = 4, typename Work>
void ForTiles(ffi::ThreadPool& pool, const ProductShape& shape, int64_t tile, const Work& work) {
  const bool is_small = shape.rows * shape.inputs * shape.outputs < kSmallWork;
  const int64_t wanted = is_small ? 1 : NumThreads(pool) * kChunksPerThread;
  const int64_t size = (shape.outputs + kOutputs * wanted - 1) / (kOutputs * wanted) * kOutputs;
  const int64_t count = (shape.outputs + size - 1) / size;
  ShareOut(pool, count, [=](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * size, shape.outputs);
    for (int64_t o = chunk * size; o < end; o += tile) work(o, std::min(o + tile, end));
  });
}

}  // namespace jspec
