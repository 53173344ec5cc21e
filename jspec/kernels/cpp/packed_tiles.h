// Tiles of decoded weights, and their products with rows. The order of a row's sums does not depend
// on how many rows are multiplied at a time.

#pragma once

#include "packed_formats.h"

namespace jspec {

constexpr int kMostGroups = 8;  // groups of 32 inputs in a tile
constexpr int kPairs = 16;      // pairs of inputs in a group
constexpr int kStrips = 2;      // multiplied together
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
  static __m512bh Load(const Number* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static __m512 Add(__m512 sum, Weights weights, __m512bh pair) {
    return _mm512_dpbf16_ps(sum, weights, pair);
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
  static Pair Load(const Number* pair) {
    return {(Lanes)_mm512_set1_ps(pair[0]), (Lanes)_mm512_set1_ps(pair[1])};
  }
  static __m512 Add(__m512 sum, const Weights& weights, const Pair& pair) {
    return (__m512)AddProducts((Lanes)sum, weights, pair);
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

// Adds the products of two strips' tiles with kRows rows to their totals. Both strips use an input
// that is loaded once: loads, two a cycle, would take as long as the multiplications otherwise.
template <int kRows, typename Scaling, typename Multiplier, typename Number>
void MultiplyTiles(const Tile* tiles, int groups, const Inputs<Number>& inputs, int64_t group,
                   float (*totals)[kStrips][kStrip]) {
  for (int g = 0; g < groups; ++g) {
    for (int half = 0; half < 2; ++half) {
      __m512 sums[kRows][kStrips];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < kPairs / 2; ++i) {
        const int pair = g * kPairs + half * kPairs / 2 + i;
        const auto one = Multiplier::From(tiles[0].codes[pair]);
        const auto other = Multiplier::From(tiles[1].codes[pair]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const auto input = Multiplier::Load(inputs.rows[r] + 2 * (group * kPairs + pair));
          sums[r][0] = Multiplier::Add(sums[r][0], one, input);
          sums[r][1] = Multiplier::Add(sums[r][1], other, input);
        }
      }
      const int scale = (2 * g + half) * Scaling::kScales / 2;
      const bool has_minimum = Scaling::kMinimum && (Scaling::kScales == 2 || half == 1);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int strip = 0; strip < kStrips; ++strip) {
          __m512 total = _mm512_loadu_ps(totals[r][strip]);
          total = _mm512_fmadd_ps(sums[r][strip], tiles[strip].factor[scale], total);
          if (has_minimum) {
            const __m512 sum = _mm512_set1_ps(inputs.sums[r][group * Scaling::kScales + scale]);
            total = _mm512_fnmadd_ps(tiles[strip].minimum[scale], sum, total);
          }
          _mm512_storeu_ps(totals[r][strip], total);
        }
      }
    }
  }
}

// Does the same for `count` rows.
template <int kRows, typename Scaling, typename Multiplier, typename Number>
void MultiplyRowsByTiles(const Tile* tiles, int groups, Inputs<Number> inputs, int64_t group,
                         float (*totals)[kStrips][kStrip], int64_t count) {
  for (; count >= kRows; count -= kRows, totals += kRows) {
    MultiplyTiles<kRows, Scaling, Multiplier>(tiles, groups, inputs, group, totals);
    inputs.rows.first = inputs.rows[kRows];
    inputs.sums.first = inputs.sums[kRows];
  }
  if constexpr (kRows > 1) {
    constexpr int kFewer = kRows > 4 ? kRows - 2 : kRows / 2;  // few variants: they are compiled
    MultiplyRowsByTiles<kFewer, Scaling, Multiplier>(tiles, groups, inputs, group, totals, count);
  }
}

}  // namespace jspec
