// Products of rows with kernels packed as in GGUF files. The codes of 16 outputs and 256 inputs are
// taken out at a time, into a tile that stays in the processor's first cache, and all rows are
// multiplied from there: each code is taken out once, and no sum is taken across lanes.
//
// A row's sums are taken in one order, however many rows share a pass: its result does not depend
// on the rows beside it.

#include "multiply.h"

#if defined(__AVX512BW__) || defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define JSPEC_HAS_PACKED
#include "packed_rows.h"

namespace {

using namespace jspec;

constexpr int kMostGroups = 8;                      // groups of inputs in a tile
constexpr int kFours = kGroup / 4;                  // vectors of codes in a group
constexpr int64_t kRowsATile = 64;                  // that use a tile before the next is taken out
constexpr int kRowsOnce = kRegisters == 32 ? 8 : 2;  // whose sums fit the registers

struct Tile {
  Words codes[kMostGroups * kFours];
  Lanes factor[2 * kMostGroups], minimum[2 * kMostGroups];
};

// Takes whole blocks of a strip out.
template <typename Format>
void Read(Block block, int groups, Tile& tile) {
  constexpr int kScales = ScalingOf<Format>::kScales;
  constexpr int kBytes = kStrip * Format::kBytes;
  Words* codes = tile.codes;
  for (int first = 0; first < groups; first += Format::kGroups) {
    for (int line = 0; line < kBytes; line += kCacheLine) {
      __builtin_prefetch(block.first + kAhead + line, 0, kIntoL2);
    }
    Format::Read(block, {tile.factor + first * kScales, tile.minimum + first * kScales});
    for (int g = 0; g < Format::kGroups; ++g) {
#pragma GCC unroll 8
      for (int four = 0; four < kFours; ++four) *codes++ = Format::Codes(block, g, four);
    }
    block = block.Next(Format::kBytes);
  }
}

// Adds a tile's products with `count` rows to their totals, of which each row has kStrip.
template <int kRows, typename Rows>
void MultiplyRows(Tile& tile, int groups, const Rows& rows, int64_t row, int64_t count,
                  int64_t group, float* totals) {
  for (; count >= kRows; count -= kRows, row += kRows, totals += kRows * kStrip) {
    Lanes own[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) own[r] = LoadLanes(totals + r * kStrip);
    for (int g = 0; g < groups; ++g) {
      const int scale = g * Rows::kScales;
      rows.template Multiply<kRows>(row, group + g, tile.codes + g * kFours,
                                    {tile.factor + scale, tile.minimum + scale}, own);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) std::memcpy(totals + r * kStrip, &own[r], sizeof(Lanes));
  }
  if constexpr (kRows > 1) {
    if (count) MultiplyRows<kRows - 1>(tile, groups, rows, row, count, group, totals);
  }
}

// Returns the rows, prepared in the space given, for codes that are too large by `offset`.
template <typename Rows>
Rows Prepare(ffi::ThreadPool& pool, const typename Rows::Number* from, const ProductShape& shape,
             int offset, Space<typename Rows::Group>& space) {
  const int64_t groups = shape.inputs / kGroup;
  Rows rows;
  rows.groups = {space.Take(shape.rows * groups), groups};
  ForRows(pool, shape.rows, shape.inputs, [=](int64_t r) {
    for (int64_t g = 0; g < groups; ++g) {
      Rows::Prepare(from + r * shape.inputs + g * kGroup, offset, rows.groups.At(r, g));
    }
  });
  return rows;
}

template <typename Format, typename Rows>
void Multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& from, const uint8_t* strips,
              float* outputs, const ProductShape& shape) {
  static thread_local Space<typename Rows::Group> space;
  const auto* numbers = static_cast<const typename Rows::Number*>(from.untyped_data());
  const Rows rows = Prepare<Rows>(pool, numbers, shape, Format::kOffset, space);
  const int64_t groups = rows.groups.stride;
  constexpr int64_t kGroupBytes = kStrip * Format::kBytes / Format::kGroups;  // of a strip
  ForTiles<kStrip>(pool, shape, kStrip, [=](int64_t begin, int64_t end) {
    const uint8_t* strip = strips + begin / kStrip * groups * kGroupBytes;
    Tile tile;
    for (int64_t r = 0; r < shape.rows; r += kRowsATile) {
      const int64_t count = std::min(kRowsATile, shape.rows - r);
      alignas(64) float totals[kRowsATile * kStrip] = {};
      for (int64_t g = 0; g < groups; g += kMostGroups) {
        const int own = std::min<int64_t>(kMostGroups, groups - g);
        for (int output = 0; output < kStrip; output += kLanes) {
          Read<Format>({strip + g * kGroupBytes, output}, own, tile);
          MultiplyRows<kRowsOnce>(tile, own, rows, r, count, g, totals + output);
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(totals + i * kStrip, end - begin, outputs + (r + i) * shape.outputs + begin);
      }
    }
  });
}

// If `kInBytes`, the rows are float32 numbers, to be rounded to bytes.
template <typename Format, bool kInBytes>
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], outputs->dimensions()[1]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  using Scaling = ScalingOf<Format>;
  using OfFloats = std::conditional_t<kInBytes, ByteRows<Scaling>, FloatRows<Scaling>>;
  const auto multiply = rows.element_type() == ffi::F32 ? Multiply<Format, OfFloats>
                                                        : Multiply<Format, BFloat16Rows<Scaling>>;
  multiply(pool, rows, kernel.typed_data(), outputs->typed_data(), shape);
  return ffi::Error::Success();
}

}  // namespace

#define JSPEC_PRODUCT(name, ...)                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name, (__VA_ARGS__),     \
                                ffi::Ffi::Bind()                 \
                                    .Ctx<ffi::ThreadPool>()      \
                                    .Arg<ffi::AnyBuffer>()       \
                                    .Arg<ffi::BufferR2<ffi::U8>>() \
                                    .Ret<ffi::BufferR2<ffi::F32>>())
#define JSPEC_PACKED(name, ...)                                        \
  JSPEC_PRODUCT(name##_product, Product<__VA_ARGS__, false>);          \
  JSPEC_PRODUCT(name##_byte_product, Product<__VA_ARGS__, true>)

JSPEC_PACKED(q4_0, Nibbles<false, false>);
JSPEC_PACKED(q4_1, Nibbles<false, true>);
JSPEC_PACKED(q5_0, Nibbles<true, false>);
JSPEC_PACKED(q5_1, Nibbles<true, true>);
JSPEC_PACKED(q8_0, Q8);
JSPEC_PACKED(q2_k, Q2K);
JSPEC_PACKED(q3_k, Q3K);
JSPEC_PACKED(q4_k, SixBitScales<false>);
JSPEC_PACKED(q5_k, SixBitScales<true>);
JSPEC_PACKED(q6_k, Q6K);

#endif

extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}
