// Rows of inputs, prepared for products with packed kernels: in groups of 32, as blocks have them.
//
// bfloat16 rows are multiplied as integers of 15 bits with one unit for each group, a power of two.
// So a number is exact if the group's largest is less than 64 times as large, and wrong by less
// than 1 / 16,000 of the largest otherwise: by less, in a sum, than bfloat16's own rounding. One
// instruction multiplies two of them by codes of 16 bits.
//
// Where a model asks for it, rows are rounded to one byte instead, with the largest of a group as
// 127. That is half the work, and what llama.cpp does; it is another model by a little.

#pragma once

#include <cmath>

#include "packed_formats.h"

namespace jspec {

constexpr int kGroup = 32;  // inputs

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) && !defined(__AVX512F__)
using Byte = int8_t;
#else
using Byte = int16_t;  // no instruction multiplies four bytes at once without losing bits
#endif
typedef uint16_t Shorts __attribute__((vector_size(4 * kLanes)));

// x - 0 is x, where x + 0 is another zero than -0: the compiler drops only the first.
inline Lanes Broadcast(float number) { return number - Lanes{}; }

#ifdef __AVX512F__
constexpr bool kHasPowers = true;

// Returns factors * 2 ** exponent, without the units that multiply: those have the most to do.
inline Lanes TimesPower(Lanes factors, float exponent) {
  return (Lanes)_mm512_scalef_ps((__m512)factors, (__m512)Broadcast(exponent));
}
#else
constexpr bool kHasPowers = false;

inline Lanes TimesPower(Lanes factors, float) { return factors; }
#endif

// Returns sums + the products of each output's four codes with four signed bytes.
inline Words AddProducts(Words sums, Words codes, const int8_t* bytes) {
  uint32_t four;
  std::memcpy(&four, bytes, sizeof(four));
  const Words numbers = Words{} + four;
#if defined(__AVX512VNNI__)
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)numbers);
#elif defined(__AVXVNNI__)
  return (Words)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)numbers);
#else
  return sums;  // see Byte
#endif
}

// The same of two codes and two integers of 16 bits.
inline Words AddProducts(Words sums, Words codes, const int16_t* integers) {
  uint32_t two;
  std::memcpy(&two, integers, sizeof(two));
  const Words numbers = Words{} + two;
#if defined(__AVX512VNNI__)
  return (Words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, (__m512i)numbers);
#elif defined(__AVX512F__)
  return sums + (Words)_mm512_madd_epi16((__m512i)codes, (__m512i)numbers);
#elif defined(__AVXVNNI__)
  return (Words)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)numbers);
#else
  return sums + (Words)_mm256_madd_epi16((__m256i)codes, (__m256i)numbers);
#endif
}

// The same of one weight and one number.
inline Lanes AddProducts(Lanes sums, Lanes weights, const float* number) {
  return MultiplyAdd(sums, weights, Broadcast(*number));
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

// The groups of all rows; the rows' first groups lie side by side, then their second ones, ...
template <typename Group>
struct Groups {
  using Type = Group;
  Group* first;
  int64_t rows;

  Group& At(int64_t row, int64_t group) const { return first[group * rows + row]; }
};

// Rows of integers of type T; units are powers of two if kPowers.
template <typename Scaling, typename T, bool kPowers>
struct IntegerRows {
  static constexpr int kScales = Scaling::kScales, kShared = Scaling::kShared;
  static constexpr int kVectors = sizeof(T);  // of the codes of four inputs
  using Weights = Words;

  struct Group {
    T numbers[kGroup];  // in units; of every four, 16 bits each, in the order 0, 2, 1, 3
    float unit;               // its exponent if kPowers
    int32_t offset[kScales];  // what the sum of the products with codes begins with
    float minimum[kScales];   // minus the sum of the inputs

    // Takes numbers, in units; `code_offset` is subtracted from each code that they will meet.
    // Loops are short and of one kind each, so that the compiler makes vectors of them.
    void Take(const int32_t* integers, float its_unit, float exponent, int code_offset) {
      unit = kPowers ? exponent : its_unit;
      for (int s = 0; s < kScales; ++s) {
        int32_t sum = 0;
        for (int i = 0; i < kShared; ++i) sum += integers[s * kShared + i];
        offset[s] = -code_offset * sum;
        minimum[s] = -its_unit * sum;
      }
      constexpr int second = sizeof(T) == 1 ? 1 : 2;  // where the second of every four goes
      for (int i = 0; i < kGroup; i += 4) {
        numbers[i] = integers[i];
        numbers[i + second] = integers[i + 1];
        numbers[i + 3 - second] = integers[i + 2];
        numbers[i + 3] = integers[i + 3];
      }
    }

    Words Begin(int scale) const { return Words{} + offset[scale]; }

    // Adds a sum of products to a total.
    Lanes AddTo(Lanes total, Words sum, Lanes factor, Lanes its_minimum, int scale) const {
      const Lanes scaled = kPowers ? TimesPower(factor, unit) : factor * unit;
      total = MultiplyAdd(total, ToLanes(sum), scaled);
      if constexpr (!Scaling::kMinimum) return total;
      return MultiplyAdd(total, its_minimum, Broadcast(minimum[scale]));
    }
  };
  Groups<Group> groups;

  // Spreads the codes of four inputs over vectors.
  static void Spread(Words codes, int, Words* weights) {
    if constexpr (sizeof(T) == 1) {
      weights[0] = codes;
    } else {
      weights[0] = codes & 0x00ff00ffu;
      weights[1] = (Words)((Shorts)codes >> 8);
    }
  }
};

// Rows of bfloat16 numbers.
template <typename Scaling>
struct BFloat16Rows : IntegerRows<Scaling, int16_t, kHasPowers> {
  using Number = BFloat16;
  using Group = typename IntegerRows<Scaling, int16_t, kHasPowers>::Group;

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
    int32_t integers[kGroup];
    for (int i = 0; i < kGroup; ++i) numbers[i] = numbers[i] * units + kRounding;
    std::memcpy(integers, numbers, sizeof(integers));
    for (int i = 0; i < kGroup; ++i) integers[i] -= 0x4b400000;  // kRounding's bits
    const float nan = __builtin_nanf("");
    const float power = static_cast<int>(exponent) - 127 - 13;
    group.Take(integers, is_finite ? PowerOfTwo(exponent - 13) : nan, is_finite ? power : nan,
               code_offset);
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
struct ByteRows : IntegerRows<Scaling, Byte, false> {
  using Number = float;
  using Group = typename IntegerRows<Scaling, Byte, false>::Group;

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
    int32_t integers[kGroup];
    for (int i = 0; i < kGroup; ++i) integers[i] = std::nearbyint(from[i] * units);
    group.Take(integers, is_finite ? largest / 127 : __builtin_nanf(""), 0, code_offset);
  }
};

// Rows of float32 numbers.
template <typename Scaling>
struct FloatRows {
  using Number = float;
  static constexpr int kScales = Scaling::kScales, kShared = Scaling::kShared, kVectors = 4;
  using Weights = Lanes;

  struct Group {
    float numbers[kGroup];
    float minimum[kScales];  // minus the sum of the inputs

    Lanes Begin(int) const { return Lanes{}; }

    Lanes AddTo(Lanes total, Lanes sum, Lanes factor, Lanes its_minimum, int scale) const {
      total = MultiplyAdd(total, sum, factor);
      if constexpr (!Scaling::kMinimum) return total;
      return MultiplyAdd(total, its_minimum, Broadcast(minimum[scale]));
    }
  };
  Groups<Group> groups;

  static void Spread(Words codes, int code_offset, Lanes* weights) {
    for (int i = 0; i < 4; ++i) {
      weights[i] = ToLanes((codes >> (8 * i)) & 0xffu) - static_cast<float>(code_offset);
    }
  }

  static void Prepare(const Number* from, int, Group& group) {
    std::copy_n(from, kGroup, group.numbers);
    for (int s = 0; s < kScales; ++s) {
      float sum = 0;
      for (int i = 0; i < kShared; ++i) sum += from[s * kShared + i];
      group.minimum[s] = -sum;
    }
  }
};

}  // namespace jspec
