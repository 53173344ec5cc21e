// Rows of inputs, prepared for products with packed kernels: in groups of 32, as blocks have them.
//
// bfloat16 rows are multiplied as integers of 15 bits with one unit for each group, a power of two.
// So a number is exact if the group's largest is less than 64 times as large, and wrong by less
// than 1 / 16,000 of the largest otherwise: by less, in a sum, than bfloat16's own rounding. An
// integer is split into two bytes, which one instruction multiplies by codes, four at a time.
//
// Where a model asks for it, rows are rounded to one byte instead, with the largest of a group as
// 127. That is half the work, and what llama.cpp does; it is another model by a little.

#pragma once

#include <cmath>

#include "packed_formats.h"

namespace jspec {

constexpr int kGroup = 32;  // inputs

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));

// Returns sums + the products of each output's four codes, unsigned, with four signed bytes.
inline Words AddFour(Words sums, Words codes, const int8_t* bytes) {
  uint32_t four;
  std::memcpy(&four, bytes, sizeof(four));
#if defined(__AVX512VNNI__)
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#else
  const Words numbers = Words{} + four;
#if defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Words)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)numbers);
#else
  // Bytes at even places, and at odd ones, as integers of 16 bits.
  const Words even = codes & 0x00ff00ffu, odd = (codes >> 8) & 0x00ff00ffu;
  const Shorts first = (Shorts)(numbers << 8) >> 8, second = (Shorts)numbers >> 8;
#ifdef __AVX512F__
  const auto add = [](Words a, Shorts b) {
    return (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  };
#else
  const auto add = [](Words a, Shorts b) {
    return (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  };
#endif
  return sums + add(even, first) + add(odd, second);
#endif
#endif
}

// How groups are scaled, which is all that products know of a format.
template <int kScalesAGroup, bool kHasMinimum>
struct Scaling {
  static constexpr int kScales = kScalesAGroup;
  static constexpr int kShared = kGroup / kScales;  // inputs that share a scale
  static constexpr bool kMinimum = kHasMinimum;
};
template <typename Format>
using ScalingOf = Scaling<Format::kHalves ? 2 : 1, Format::kMinimum>;

// The groups of all rows.
template <typename Group>
struct Groups {
  Group* first;
  int64_t stride;  // groups of a row

  Group& At(int64_t row, int64_t group) const { return first[row * stride + group]; }
};

// Rows of integers, each of one or two bytes.
template <typename Scaling, int kPlanes>
struct IntegerRows {
  static constexpr int kScales = Scaling::kScales, kShared = Scaling::kShared;

  struct Group {
    int8_t bytes[kPlanes][kGroup];  // a number is 256 * its upper byte + its lower one, in units
    float unit;
    int32_t offset[kScales];  // what the sum of the products with codes begins with
    float minimum[kScales];   // minus the sum of the inputs

    // Completes a group whose numbers, with these sums, have been written; `code_offset` is
    // subtracted from each code.
    void Finish(const int32_t* sums, float its_unit, int code_offset) {
      unit = its_unit;
      for (int s = 0; s < kScales; ++s) {
        offset[s] = -code_offset * sums[s];
        minimum[s] = -unit * sums[s];
      }
    }
  };
  Groups<Group> groups;

  // Adds kRows rows' products with a group's codes to their totals.
  template <int kRows>
  void Multiply(int64_t row, int64_t group, const Words* codes, const Scales& scales,
                Lanes* totals) const {
    for (int s = 0; s < kScales; ++s) {
      Words sums[kPlanes][kRows] = {};  // the lower bytes' last
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[kPlanes - 1][r] = Words{} + groups.At(row + r, group).offset[s];
      }
#pragma GCC unroll 8
      for (int i = s * kShared; i < (s + 1) * kShared; i += 4) {
        const Words four = codes[i / 4];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int p = 0; p < kPlanes; ++p) {
            sums[p][r] = AddFour(sums[p][r], four, groups.At(row + r, group).bytes[p] + i);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Group& own = groups.At(row + r, group);
        Words sum = sums[kPlanes - 1][r];
        if constexpr (kPlanes == 2) sum += sums[0][r] << 8;
        totals[r] = MultiplyAdd(totals[r], ToLanes(sum), scales.factor[s] * own.unit);
        if constexpr (Scaling::kMinimum) {
          totals[r] = MultiplyAdd(totals[r], scales.minimum[s], Lanes{} + own.minimum[s]);
        }
      }
    }
  }
};

// Rows of bfloat16 numbers.
template <typename Scaling>
struct BFloat16Rows : IntegerRows<Scaling, 2> {
  using Number = BFloat16;
  using Group = typename IntegerRows<Scaling, 2>::Group;

  static void Prepare(const Number* from, int code_offset, Group& group) {
    float numbers[kGroup];
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t size = from[i] & 0x7fffu;
      largest = size > largest ? size : largest;
      numbers[i] = AsFloat(from[i]);
    }
    constexpr uint32_t kInfinite = 0xff, kLeast = 27;  // exponents; 2 ** -100 is as good as 0
    const uint32_t exponent = std::max(largest >> 7, kLeast);
    const bool is_finite = exponent < kInfinite;
    const float units = is_finite ? PowerOfTwo(127 + 13 + 127 - exponent) : 0;  // of 1.0
    constexpr float kRounding = 3 << 22;  // added to a small number, leaves an integer's bits
    int32_t sums[Scaling::kScales] = {};
    for (int i = 0; i < kGroup; ++i) {
      const float rounded = numbers[i] * units + kRounding;
      int32_t integer;
      std::memcpy(&integer, &rounded, sizeof(integer));
      integer -= 0x4b400000;  // kRounding's bits
      const int32_t upper = (integer + 128) >> 8;
      group.bytes[0][i] = upper;
      group.bytes[1][i] = integer - 256 * upper;
      sums[i / Scaling::kShared] += integer;
    }
    group.Finish(sums, is_finite ? PowerOfTwo(exponent - 13) : __builtin_nanf(""), code_offset);
  }

  static float PowerOfTwo(uint32_t exponent) {
    const uint32_t word = exponent << 23;
    float power;
    std::memcpy(&power, &word, sizeof(power));
    return power;
  }
};

// Rows of float32 numbers, rounded to bytes.
template <typename Scaling>
struct ByteRows : IntegerRows<Scaling, 1> {
  using Number = float;
  using Group = typename IntegerRows<Scaling, 1>::Group;

  static void Prepare(const Number* from, int code_offset, Group& group) {
    uint32_t bits = 0;  // of the largest; integers, because the compiler does not reorder floats
    for (int i = 0; i < kGroup; ++i) {
      uint32_t own;
      std::memcpy(&own, from + i, sizeof(own));
      bits = std::max(bits, own & 0x7fffffffu);
    }
    constexpr uint32_t kInfinite = 0x7f800000, kLeast = 0x0c800000;  // 2 ** -102 is as good as 0
    const bool is_finite = bits < kInfinite;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    const float units = is_finite && bits > kLeast ? 127 / largest : 0;  // of 1.0
    int32_t sums[Scaling::kScales] = {};
    for (int i = 0; i < kGroup; ++i) {
      const int32_t integer = std::nearbyint(from[i] * units);
      group.bytes[0][i] = integer;
      sums[i / Scaling::kShared] += integer;
    }
    group.Finish(sums, is_finite ? largest / 127 : __builtin_nanf(""), code_offset);
  }
};

// Rows of float32 numbers.
template <typename Scaling>
struct FloatRows {
  using Number = float;
  static constexpr int kScales = Scaling::kScales, kShared = Scaling::kShared;

  struct Group {
    float numbers[kGroup];
    float code_offset;       // what is subtracted from each code
    float minimum[kScales];  // minus the sum of the inputs
  };
  Groups<Group> groups;

  template <int kRows>
  void Multiply(int64_t row, int64_t group, const Words* codes, const Scales& scales,
                Lanes* totals) const {
    const float code_offset = groups.At(row, group).code_offset;
    for (int s = 0; s < kScales; ++s) {
      Lanes sums[kRows] = {};
      for (int i = s * kShared; i < (s + 1) * kShared; ++i) {
        const Words code = (codes[i / 4] >> (i % 4 * 8)) & 0xffu;
        const Lanes weights = ToLanes(code) - code_offset;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r] = MultiplyAdd(sums[r], weights, Lanes{} + groups.At(row + r, group).numbers[i]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        totals[r] = MultiplyAdd(totals[r], sums[r], scales.factor[s]);
        if constexpr (Scaling::kMinimum) {
          const Lanes minimum = Lanes{} + groups.At(row + r, group).minimum[s];
          totals[r] = MultiplyAdd(totals[r], scales.minimum[s], minimum);
        }
      }
    }
  }

  static void Prepare(const Number* from, int code_offset, Group& group) {
    std::copy_n(from, kGroup, group.numbers);
    group.code_offset = code_offset;
    for (int s = 0; s < kScales; ++s) {
      float sum = 0;
      for (int i = 0; i < kShared; ++i) sum += from[s * kShared + i];
      group.minimum[s] = -sum;
    }
  }
};

}  // namespace jspec
