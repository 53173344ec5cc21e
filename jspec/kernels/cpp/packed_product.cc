// Products of rows with kernels packed as in GGUF files. The weights of 16 outputs and 256 inputs
// are decoded at a time, into a tile that stays in the processor's first cache, and all rows are
// multiplied from there: each code is decoded once, and no sum is taken across lanes.
//
// The scales are applied to the sums of 16 or 32 inputs, in float32. A row's sums are taken in one
// order, however many rows share a pass: its result does not depend on the rows beside it.

#include "multiply.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define JSPEC_HAS_PACKED
#include "packed_formats.h"

namespace {

using namespace jspec;

constexpr int kMostGroups = 8;  // groups of 32 inputs in a tile
constexpr int kPairs = 16;      // pairs of inputs in a group
constexpr int kRowsATile = 64;  // that use a tile before the next is decoded

struct Tile {
  __m512i codes[kMostGroups * kPairs];
  __m512 factor[2 * kMostGroups], minimum[2 * kMostGroups];
};

// Decodes whole blocks of a strip.
using Decode = void (*)(Block block, int groups, Tile& tile);

template <typename Format>
void DecodeBlocks(Block block, int groups, Tile& tile) {
  constexpr int kSize = kStrip * Format::kBytes, kScales = Format::kHalves ? 2 : 1;
  __m512i* codes = tile.codes;
  for (int first = 0; first < groups; first += Format::kGroups, block += kSize) {
    for (int line = 0; line < kSize; line += kCacheLine) __builtin_prefetch(block + kAhead + line);
    Format::Read(block, {tile.factor + first * kScales, tile.minimum + first * kScales});
    for (int g = 0; g < Format::kGroups; ++g) {
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) *codes++ = Format::Codes(block, g, pair);
    }
  }
}

#ifdef __AVX512BF16__
// Rows of pairs of bfloat16 numbers, two of which are multiplied by one instruction.
struct Pairs {
  using Number = BFloat16;
  using Weights = __m512bh;
  static Weights From(__m512i codes) { return (__m512bh)codes; }
  static __m512 Add(__m512 sum, Weights weights, const Number* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi32(both));
  }
};
#endif

struct Floats {
  using Number = float;
  using Weights = Pair;
  static Weights From(__m512i codes) {
    const Words words = (Words)codes;
    return {(Lanes)(words << 16), (Lanes)(words & 0xffff0000u)};
  }
  static __m512 Add(__m512 sum, const Weights& weights, const Number* pair) {
    sum = _mm512_fmadd_ps((__m512)weights.first, _mm512_set1_ps(pair[0]), sum);
    return _mm512_fmadd_ps((__m512)weights.second, _mm512_set1_ps(pair[1]), sum);
  }
};

// Whether 16 inputs share a scale or 32, and whether a minimum is subtracted.
template <bool kHasHalves, bool kHasMinimum>
struct Scaling {
  static constexpr bool kMinimum = kHasMinimum;
  static constexpr int kScales = kHasHalves ? 2 : 1, kShared = 32 / kScales;
};

// The inputs of rows, and the sum of every 16 or 32 of them, which a minimum is multiplied by.
template <typename Number>
struct Inputs {
  Rows<Number> rows;
  Rows<float> sums;
};

// Adds a tile's products with kRows rows, first to first + kRows, to their totals.
template <int kRows, typename Scaling, typename Multiplier, typename Number>
void MultiplyTile(const Tile& tile, int groups, const Inputs<Number>& inputs, int64_t group,
                  float (*totals)[kStrip]) {
  for (int g = 0; g < groups; ++g) {
    __m512 first[kRows], second[kRows];  // of the group's two halves
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) first[r] = second[r] = _mm512_setzero_ps();
    const __m512i* codes = tile.codes + g * kPairs;
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs / 2; ++pair) {
      const auto one = Multiplier::From(codes[pair]);
      const auto other = Multiplier::From(codes[pair + kPairs / 2]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Number* from = inputs.rows[r] + 2 * ((group + g) * kPairs + pair);
        first[r] = Multiplier::Add(first[r], one, from);
        second[r] = Multiplier::Add(second[r], other, from + kPairs);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      __m512 total = _mm512_loadu_ps(totals[r]);
      const __m512* factor = tile.factor + g * Scaling::kScales;
      if constexpr (Scaling::kScales == 2) {
        total = _mm512_fmadd_ps(first[r], factor[0], total);
        total = _mm512_fmadd_ps(second[r], factor[1], total);
      } else {
        total = _mm512_fmadd_ps(_mm512_add_ps(first[r], second[r]), factor[0], total);
      }
      for (int i = 0; Scaling::kMinimum && i < Scaling::kScales; ++i) {
        const __m512 sum = _mm512_set1_ps(inputs.sums[r][(group + g) * Scaling::kScales + i]);
        total = _mm512_fnmadd_ps(tile.minimum[g * Scaling::kScales + i], sum, total);
      }
      _mm512_storeu_ps(totals[r], total);
    }
  }
}

// Does the same for `count` rows.
template <int kRows, typename Scaling, typename Multiplier, typename Number>
void MultiplyRowsByTile(const Tile& tile, int groups, Inputs<Number> inputs, int64_t group,
                        float (*totals)[kStrip], int64_t count) {
  for (; count >= kRows; count -= kRows, totals += kRows) {
    MultiplyTile<kRows, Scaling, Multiplier>(tile, groups, inputs, group, totals);
    inputs.rows.first = inputs.rows[kRows];
    inputs.sums.first = inputs.sums[kRows];
  }
  if constexpr (kRows > 1) {
    MultiplyRowsByTile<kRows / 2, Scaling, Multiplier>(tile, groups, inputs, group, totals, count);
  }
}

inline __m512 LoadSixteen(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 LoadSixteen(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (__m512)_mm512_slli_epi32(wide, 16);
}

// Returns the sums of every kShared numbers of each row.
template <int kShared, typename Number>
Rows<float> SumUp(ffi::ThreadPool& pool, Rows<Number> rows, int64_t count, Space<float>& space) {
  const int64_t num_sums = rows.stride / kShared;
  float* sums = space.Take(count * num_sums);
  ForRows(pool, count, rows.stride, [=](int64_t r) {
    for (int64_t i = 0; i < num_sums; ++i) {
      __m512 numbers = LoadSixteen(rows[r] + i * kShared);
      if (kShared > 16) numbers = _mm512_add_ps(numbers, LoadSixteen(rows[r] + i * kShared + 16));
      sums[r * num_sums + i] = _mm512_reduce_add_ps(numbers);
    }
  });
  return {sums, num_sums};
}

struct Kernel {
  Block strips;
  int64_t group_bytes;  // of a strip
  Decode decode;
};

template <typename Scaling, typename Multiplier, typename Number>
void Multiply(ffi::ThreadPool& pool, const Number* from, const Kernel& kernel, float* outputs,
              const ProductShape& shape) {
  static thread_local Space<float> space;
  Inputs<Number> all{{from, shape.inputs}, {nullptr, 0}};
  if (Scaling::kMinimum) all.sums = SumUp<Scaling::kShared>(pool, all.rows, shape.rows, space);
  const int64_t groups = shape.inputs / 32;
  ForTiles<kStrip>(pool, shape, kStrip, [=](int64_t begin, int64_t end) {
    const Block strip = kernel.strips + begin / kStrip * groups * kernel.group_bytes;
    Tile tile;
    for (int64_t r = 0; r < shape.rows; r += kRowsATile) {
      const int64_t count = std::min<int64_t>(kRowsATile, shape.rows - r);
      const Inputs<Number> inputs{{all.rows[r], shape.inputs}, {all.sums[r], all.sums.stride}};
      float totals[kRowsATile][kStrip] = {};
      for (int64_t g = 0; g < groups; g += kMostGroups) {
        const int own = std::min<int64_t>(kMostGroups, groups - g);
        kernel.decode(strip + g * kernel.group_bytes, own, tile);
        MultiplyRowsByTile<8, Scaling, Multiplier>(tile, own, inputs, g, totals, count);
      }
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(totals[i], end - begin, outputs + (r + i) * shape.outputs + begin);
      }
    }
  });
}

template <typename Scaling>
void MultiplyAny(ffi::ThreadPool& pool, const ffi::AnyBuffer& rows, const Kernel& kernel,
                 float* outputs, const ProductShape& shape) {
  if (rows.element_type() == ffi::F32) {
    const auto* numbers = static_cast<const float*>(rows.untyped_data());
    return Multiply<Scaling, Floats>(pool, numbers, kernel, outputs, shape);
  }
  const auto* numbers = static_cast<const BFloat16*>(rows.untyped_data());
#ifdef __AVX512BF16__
  Multiply<Scaling, Pairs>(pool, numbers, kernel, outputs, shape);
#else
  static thread_local Space<float> space;
  float* floats = space.Take(shape.rows * shape.inputs);
  for (int64_t i = 0; i < shape.rows * shape.inputs; ++i) floats[i] = AsFloat(numbers[i]);
  Multiply<Scaling, Floats>(pool, (const float*)floats, kernel, outputs, shape);
#endif
}

template <typename Format>
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], outputs->dimensions()[1]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  const int64_t group_bytes = kStrip * Format::kBytes / Format::kGroups;
  const Kernel packed{kernel.typed_data(), group_bytes, DecodeBlocks<Format>};
  using Own = Scaling<Format::kHalves, Format::kMinimum>;
  MultiplyAny<Own>(pool, rows, packed, outputs->typed_data(), shape);
  return ffi::Error::Success();
}

}  // namespace

#define JSPEC_PACKED(name, Format)                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name##_product, Product<Format>, \
                                ffi::Ffi::Bind()                         \
                                    .Ctx<ffi::ThreadPool>()              \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::BufferR2<ffi::U8>>()       \
                                    .Ret<ffi::BufferR2<ffi::F32>>())

JSPEC_PACKED(q4_0, Q4<false>);
JSPEC_PACKED(q4_1, Q4<true>);
JSPEC_PACKED(q5_0, Q5<false>);
JSPEC_PACKED(q5_1, Q5<true>);
JSPEC_PACKED(q8_0, Q8);
JSPEC_PACKED(q2_k, Q2K);
JSPEC_PACKED(q3_k, Q3K);
JSPEC_PACKED(q4_k, Q4K);
JSPEC_PACKED(q5_k, Q5K);
JSPEC_PACKED(q6_k, Q6K);

#endif

extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}
