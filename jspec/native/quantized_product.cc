// Products of rows with kernels of integers, laid out as in `models/quantized.py`. A few outputs'
// weights at a time become numbers of the rows' type, which holds them exactly, and are multiplied
// while they stand in the processor's cache: only integers are read from memory.

#include <vector>

#include "multiply.h"

namespace {

using namespace jspec;
using jspec::Store;

constexpr int kGroup = 32;          // inputs that share a multiplier
constexpr int kGroupBytes = 16;     // input j in the low bits of byte j, input j + 16 in the high ones
constexpr int64_t kFewOutputs = 4;  // unpacked at a time for few rows: they stay very near

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

struct Int8Kernel {
  const int8_t* values;
  int64_t inputs;
};

struct Int4Kernel {
  const int8_t* values;
  const int8_t* multipliers;
  int64_t inputs;
};

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

// Of integers of eight bits, which bfloat16 holds exactly.
inline void Store(BFloat16* to, const Pair& pair) {
#ifdef __AVX512BF16__
  const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)pair.second, (__m512)pair.first);
  std::memcpy(to, &packed, sizeof(packed));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = ((Words)pair.first)[lane] >> 16;
    to[kLanes + lane] = ((Words)pair.second)[lane] >> 16;
  }
#endif
}

template <typename T>
void Unpack(const Int8Kernel& kernel, int64_t output, T* to) {
  const int8_t* from = kernel.values + output * kernel.inputs;
  int64_t i = 0;
  for (; i + kStep <= kernel.inputs; i += kStep) {
    __builtin_prefetch(from + i + kAhead);
    Store(to + i, {ToLanes(Widen(from + i)), ToLanes(Widen(from + i + kLanes))});
  }
  for (; i < kernel.inputs; ++i) {
    const int8_t rest[kLanes] = {from[i]};
    T numbers[kStep];
    Store(numbers, {ToLanes(Widen(rest)), Lanes{}});
    to[i] = numbers[0];
  }
}

template <typename T>
void Unpack(const Int4Kernel& kernel, int64_t output, T* to) {
  const int64_t groups = kernel.inputs / kGroup;
  const int8_t* from = kernel.values + output * groups * kGroupBytes;
  const int8_t* multipliers = kernel.multipliers + output * groups;
  for (int64_t group = 0; group < groups; ++group) {
    const float multiplier = multipliers[group];
    __builtin_prefetch(from + kAhead);
    Lanes numbers[kGroup / kLanes];
    for (int i = 0; i < kGroupBytes / kLanes; ++i) {
      const Integers both = Widen(from + i * kLanes);
      const Integers low = (Integers)((Words)both << 28) >> 28;
      numbers[i] = ToLanes(low) * multiplier;
      numbers[i + kGroupBytes / kLanes] = ToLanes(both >> 4) * multiplier;
    }
    for (int i = 0; i < kGroup / kLanes; i += 2) {
      Store(to + i * kLanes, {numbers[i], numbers[i + 1]});
    }
    from += kGroupBytes;
    to += kGroup;
  }
}

template <typename T, typename Kernel>
void Multiply(ffi::ThreadPool& pool, const T* rows, const Kernel& kernel, const float* scales,
              float* outputs, const ProductShape& shape) {
  const int64_t tile = shape.rows <= kMaxRows ? kFewOutputs : kTile;
  ForTiles(pool, shape, tile, [=](int64_t begin, int64_t end) {
    static thread_local std::vector<T> weights;
    weights.resize(tile * shape.inputs);
    for (int64_t o = begin; o < end; ++o) {
      Unpack(kernel, o, weights.data() + (o - begin) * shape.inputs);
    }
    MultiplyTile<T>(rows, weights.data(), outputs + begin, shape, 0, end - begin);
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t o = begin; o < end; ++o) outputs[r * shape.outputs + o] *= scales[o];
    }
  });
}

template <typename Kernel>
ffi::Error Product(ffi::ThreadPool& pool, const ffi::AnyBuffer& rows, const Kernel& kernel,
                   const ffi::BufferR1<ffi::F32>& scales,
                   ffi::Result<ffi::BufferR2<ffi::F32>>& outputs) {
  const ProductShape shape{rows.dimensions()[0], kernel.inputs, scales.dimensions()[0]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  auto multiply = [&](auto* from) {
    Multiply(pool, from, kernel, scales.typed_data(), outputs->typed_data(), shape);
  };
  if (rows.element_type() == ffi::F32) {
    multiply(static_cast<const float*>(rows.untyped_data()));
  } else {
    multiply(static_cast<const BFloat16*>(rows.untyped_data()));
  }
  return ffi::Error::Success();
}

ffi::Error Int8Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::S8> values,
                       ffi::BufferR1<ffi::F32> scales,
                       ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const Int8Kernel kernel{values.typed_data(), rows.dimensions()[1]};
  return Product(pool, rows, kernel, scales, outputs);
}

ffi::Error Int4Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> values,
                       ffi::BufferR1<ffi::F32> scales, ffi::BufferR2<ffi::S8> multipliers,
                       ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const auto* pairs = reinterpret_cast<const int8_t*>(values.typed_data());
  const Int4Kernel kernel{pairs, multipliers.typed_data(), rows.dimensions()[1]};
  return Product(pool, rows, kernel, scales, outputs);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_int8_product, Int8Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_int4_product, Int4Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::U8>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
