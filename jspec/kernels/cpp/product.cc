// Products of rows with a kernel of floats or integers. Decoding is bound by the bytes of the
// weights, so each weight is read from memory once, in order, and serves all rows.

#include "tiles.h"

namespace {

using namespace jspec;
using jspec::Store;

template <typename T>
void MultiplyEqual(ffi::ThreadPool& pool, const T* from, const T* weights, float* outputs,
                   const ProductShape& shape) {
  static thread_local Space<RowNumber<T>> space;
  const FloatKernel<T> kernel{weights, shape.inputs};
  const auto rows = Arrange<FloatKernel<T>>(from, shape, space);
  const int64_t count = shape.rows, stride = shape.outputs;
  ForTiles(pool, shape, kTile, [=](int64_t begin, int64_t end) {
    if (count > kMaxRows) return MultiplyTile(count, rows, kernel, outputs, stride, begin, end);
    MultiplyRows<kMaxRows, true>(count, rows, kernel, outputs, stride, begin, end);
  });
}

// Rounds the rows to the type of the weights, as XLA does, and multiplies.
void Multiply(ffi::ThreadPool& pool, const float* rows, const BFloat16* weights, float* outputs,
              const ProductShape& shape) {
#ifdef JSPEC_HAS_TILES
  if (HasTiles()) return MultiplyInTiles(pool, rows, weights, outputs, shape);
#endif
  static thread_local Space<BFloat16> space;
  const int64_t count = shape.rows * shape.inputs;
  BFloat16* rounded = space.Take(count);
  Convert(rows, count, rounded);
  MultiplyEqual(pool, rounded, weights, outputs, shape);
}

void Multiply(ffi::ThreadPool& pool, const float* rows, const float* weights, float* outputs,
              const ProductShape& shape) {
  MultiplyEqual(pool, rows, weights, outputs, shape);
}

ffi::Error Product(Threads pool, ffi::BufferR2<ffi::F32> rows, ffi::AnyBuffer kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], kernel.dimensions()[0]};
  const float* from = rows.typed_data();
  float* to = outputs->typed_data();
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  return WithNumbers(kernel, [&](auto* weights) { Multiply(pool, from, weights, to, shape); });
}

// The first sizes[0] rows times the first of the kernels, the next sizes[1] times the second, ...
ffi::Error GroupedProduct(Threads pool, ffi::BufferR2<ffi::F32> rows, ffi::AnyBuffer kernels,
                          ffi::BufferR1<ffi::S32> sizes,
                          ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const int64_t inputs = rows.dimensions()[1], width = kernels.dimensions()[1];
  const int64_t num_groups = kernels.dimensions()[0];
  int64_t left = rows.dimensions()[0];
  const float* from = rows.typed_data();
  float* to = outputs->typed_data();
  return WithNumbers(kernels, [&](auto* weights) {
    for (int64_t group = 0; group < num_groups; ++group, weights += width * inputs) {
      const int64_t count = std::min<int64_t>(left, sizes.typed_data()[group]);
      if (count <= 0) continue;
      Multiply(pool, from, weights, to, ProductShape{count, inputs, width});
      from += count * inputs, to += count * width, left -= count;
    }
  });
}

// Kernels of integers are laid out as in `kernels/quantized.py`. The weights of a few outputs at a
// time are converted to the rows' type, which holds them exactly, and multiplied while they are in
// the processor's cache. So only integers are read from memory.
constexpr int kGroup = 32;          // inputs that share a multiplier
constexpr int kGroupBytes = 16;     // input j in the low bits of byte j, input j + 16 in the high ones
constexpr int64_t kFewOutputs = 4;  // outputs unpacked at a time for few rows: they stay very near

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

inline Lanes ToLanes(const Integers& integers) { return __builtin_convertvector(integers, Lanes); }

inline Integers Widen(const int8_t* from) {
#if defined(__AVX512F__)  // GCC 12 would widen byte by byte
  return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Integers);
#endif
}

#ifdef __AVX512BF16__
// Stores integers of eight bits, which bfloat16 holds exactly.
inline void Store(BFloat16* to, const Pair& pair) {
  const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)pair.second, (__m512)pair.first);
  std::memcpy(to, &packed, sizeof(packed));
}
#endif

struct Int8Kernel {
  using Number = float;
  static constexpr int kBits = 8;
  static constexpr bool kIsInOrder = true;

  const int8_t* values;
  int64_t inputs;

  static Numbers<float> Widened(const int8_t* from) {
    return {{ToLanes(Widen(from)), ToLanes(Widen(from + kLanes))}};
  }
  Numbers<float> Step(int64_t output, int64_t input) const {
    return Widened(values + output * inputs + input);
  }
  Numbers<float> Rest(int64_t output, int64_t input) const {
    int8_t padded[kStep] = {};
    std::memcpy(padded, values + output * inputs + input, inputs - input);
    return Widened(padded);
  }
};

struct Int4Kernel {
  using Number = float;
  static constexpr int kBits = 4;
  static constexpr bool kIsInOrder = kStep == kGroup;

  const int8_t* values;
  const int8_t* multipliers;
  int64_t inputs;

  // Both integers of each of kLanes bytes: inputs of the group's first half, and of its second.
  Numbers<float> Step(int64_t output, int64_t input) const {
    const uint64_t place = output * inputs + input;
    const Integers both = Widen(values + place / 2);
    const Lanes multiplier = Lanes{} + static_cast<float>(multipliers[place / kGroup]);
    const Integers low = (Integers)((Words)both << 28) >> 28;
    return {{ToLanes(low) * multiplier, ToLanes(both >> 4) * multiplier}};
  }
  Numbers<float> Rest(int64_t, int64_t) const { return Numbers<float>(); }  // none

  static void Arrange(float* row, int64_t count) {
    for (int64_t group = 0; group < count; group += kGroup) {
      float halves[kGroup];
      std::copy_n(row + group, kGroup, halves);
      for (int64_t i = 0; i < kGroupBytes; i += kLanes) {
        Store(row + group + 2 * i, {LoadLanes(halves + i), LoadLanes(halves + kGroupBytes + i)});
      }
    }
  }
};

template <typename T, typename Kernel>
void Unpack(const Kernel& kernel, int64_t output, T* to) {
  int64_t i = 0;
  for (; i + kStep <= kernel.inputs; i += kStep) {
    AskFor<kStep>(kernel, output * kernel.inputs + i);
    Store(to + i, kernel.Step(output, i).pair);
  }
  if (i < kernel.inputs) {
    T rest[kStep];
    Store(rest, kernel.Rest(output, i).pair);
    std::memcpy(to + i, rest, (kernel.inputs - i) * sizeof(T));
  }
}

void Scale(const float* scales, float* outputs, int64_t count, int64_t stride, int64_t begin,
           int64_t end) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t o = begin; o < end; ++o) outputs[r * stride + o] *= scales[o];
  }
}

template <typename T, typename Kernel>
void Multiply(ffi::ThreadPool& pool, const T* from, const Kernel& kernel, const float* scales,
              float* outputs, const ProductShape& shape) {
  using Number = RowNumber<T>;
  static thread_local Space<Number> space;
  const auto rows = Arrange<Kernel>(from, shape, space);
  const int64_t count = shape.rows, stride = shape.outputs;
  const int64_t tile = count <= kMaxRows ? kFewOutputs : kTile;
  ForTiles(pool, shape, tile, [=](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<Number, float>) {
      if (count <= kMaxRows) {
        MultiplyRows<kMaxRows, true>(count, rows, kernel, outputs, stride, begin, end);
        return Scale(scales, outputs, count, stride, begin, end);
      }
    }
    static thread_local Space<Number> near;
    Number* weights = near.Take(tile * shape.inputs);
    for (int64_t o = begin; o < end; ++o) {
      Unpack(kernel, o, weights + (o - begin) * shape.inputs);
    }
    const FloatKernel<Number> unpacked{weights, shape.inputs};
    MultiplyTile(count, rows, unpacked, outputs + begin, stride, 0, end - begin);
    Scale(scales, outputs, count, stride, begin, end);
  });
}

template <typename Kernel>
ffi::Error IntegerProduct(ffi::ThreadPool& pool, ffi::AnyBuffer& rows, const Kernel& kernel,
                          const ffi::BufferR1<ffi::F32>& scales,
                          ffi::Result<ffi::BufferR2<ffi::F32>>& outputs) {
  const ProductShape shape{rows.dimensions()[0], kernel.inputs, scales.dimensions()[0]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  return WithNumbers(rows, [&](auto* from) {
    Multiply(pool, from, kernel, scales.typed_data(), outputs->typed_data(), shape);
  });
}

ffi::Error Int8Product(Threads pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::S8> values,
                       ffi::BufferR1<ffi::F32> scales,
                       ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const Int8Kernel kernel{values.typed_data(), rows.dimensions()[1]};
  return IntegerProduct(pool, rows, kernel, scales, outputs);
}

ffi::Error Int4Product(Threads pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> values,
                       ffi::BufferR1<ffi::F32> scales, ffi::BufferR2<ffi::S8> multipliers,
                       ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const auto* pairs = reinterpret_cast<const int8_t*>(values.typed_data());
  const Int4Kernel kernel{pairs, multipliers.typed_data(), rows.dimensions()[1]};
  return IntegerProduct(pool, rows, kernel, scales, outputs);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_product, Product);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_grouped_product, GroupedProduct);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_int8_product, Int8Product);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_int4_product, Int4Product);

// Whether this processor multiplies pairs of bfloat16 numbers, which makes many rows fast, too.
extern "C" bool jspec_has_pairs() { return kHasPairs; }

// Whether it multiplies tiles of them, which makes each row cheaper the more rows there are.
extern "C" bool jspec_has_tiles() {
#ifdef JSPEC_HAS_TILES
  return HasTiles();
#else
  return false;
#endif
}

// Whether kernels packed as in GGUF files are multiplied here.
extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}

// The threads that the libraries of packed formats share.
extern "C" void* jspec_team() { return Team::Shared(); }
