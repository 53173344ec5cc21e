// How the blocks of GGUF files are decoded where those of 16 outputs lie side by side, element by
// element, as `kernels/packed.py` lays them out. A register holds one pair of inputs of all 16
// outputs. Codes are looked up as bfloat16 numbers, which hold them exactly, by one shuffle.

#pragma once

#include "multiply.h"

namespace jspec {

constexpr int kStrip = 16;  // outputs side by side

using Block = const uint8_t*;

// Returns elements of `kBytes` bytes that begin at this byte of each output's block.
inline Block At(Block block, int byte) { return block + kStrip * byte; }

inline __m512 LoadHalves(Block block, int byte) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)At(block, byte)));
}

inline __m128i LoadBytes(Block block, int byte) {
  return _mm_loadu_si128((const __m128i*)At(block, byte));
}

inline __m512 Unsigned(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline __m512 Signed(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

// Returns a pair of bytes of each output as 32 words.
inline __m512i LoadPairs(Block block, int byte) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)At(block, byte)));
}

inline __m512i ShiftRight(__m512i words, int bits) {
  return _mm512_srl_epi16(words, _mm_cvtsi32_si128(bits));
}

inline __m512i ShiftLeft(__m512i words, int bits) {
  return _mm512_sll_epi16(words, _mm_cvtsi32_si128(bits));
}

// Takes the bits of `mask` from `high`, the others from `low`.
inline __m512i Select(__m512i mask, __m512i high, __m512i low) {
  return _mm512_ternarylogic_epi32(mask, high, low, 0xca);
}

// The bfloat16 numbers first, first + 1 ... for codes of up to six bits, repeated to fill the table.
template <int kBits, int kFirst>
struct Table {
  alignas(64) BFloat16 numbers[64];
  Table() {
    for (int i = 0; i < 64; ++i) numbers[i] = Rounded(i % (1 << kBits) + kFirst);
  }
  // Bits of a word above the code's are ignored.
  static __m512i Look(__m512i words) {
    static const Table table;
    const __m512i low = _mm512_load_si512(table.numbers);
    if constexpr (kBits <= 5) return _mm512_permutexvar_epi16(words, low);
    return _mm512_permutex2var_epi16(low, words, _mm512_load_si512(table.numbers + 32));
  }
};

// The scales of a block's groups, or of their halves, for each of the 16 outputs.
struct Scales {
  __m512* factor;
  __m512* minimum;
};

// What a format is: bytes and groups of a block, whether 16 inputs share a scale or 32, whether a
// minimum is subtracted; Read, which fills in the scales; and Codes, the bfloat16 numbers of one
// pair of a group's inputs, 0 to 15.

template <bool kHasMinimum>
struct Q4 {
  static constexpr int kBytes = kHasMinimum ? 20 : 18, kGroups = 1, kCodes = kBytes - 16;
  static constexpr bool kHalves = false, kMinimum = kHasMinimum;
  static void Read(Block block, const Scales& scales) {
    scales.factor[0] = LoadHalves(block, 0);
    if (kMinimum) scales.minimum[0] = _mm512_sub_ps(_mm512_setzero_ps(), LoadHalves(block, 2));
  }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words = LoadPairs(block, kCodes + 2 * (pair % 8));
    return Table<4, kHasMinimum ? 0 : -8>::Look(pair < 8 ? words : _mm512_srli_epi16(words, 4));
  }
};

template <bool kHasMinimum>
struct Q5 {
  static constexpr int kBytes = kHasMinimum ? 24 : 22, kGroups = 1, kCodes = kBytes - 16;
  static constexpr bool kHalves = false, kMinimum = kHasMinimum;
  static void Read(Block block, const Scales& scales) { Q4<kHasMinimum>::Read(block, scales); }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words = LoadPairs(block, kCodes + 2 * (pair % 8));
    // Bit i of each output's 32 belongs to input i: those of the pair go to bit 4 of each word.
    const __m512i bits = _mm512_loadu_si512(At(block, kCodes - 4));
    const __m512i first = _mm512_rolv_epi32(bits, _mm512_set1_epi32((4 - 2 * pair) & 31));
    const __m512i second = _mm512_rolv_epi32(bits, _mm512_set1_epi32((19 - 2 * pair) & 31));
    const __m512i low = pair < 8 ? words : _mm512_srli_epi16(words, 4);
    const __m512i with_first = Select(_mm512_set1_epi32(0x10), first, low);
    const __m512i codes = Select(_mm512_set1_epi32(0x100000), second, with_first);
    return Table<5, kHasMinimum ? 0 : -16>::Look(codes);
  }
};

struct Q8 {
  static constexpr int kBytes = 34, kGroups = 1;
  static constexpr bool kHalves = false, kMinimum = false;
  static void Read(Block block, const Scales& scales) { scales.factor[0] = LoadHalves(block, 0); }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)At(block, 2 + 2 * pair)));
    // Eight bits are exact in bfloat16, the upper half of a float: no rounding is needed.
    const __m512i even = (__m512i)_mm512_cvtepi32_ps(
        _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    return Select(_mm512_set1_epi32(0xffff), _mm512_srli_epi32(even, 16), odd);
  }
};

// Reads the eight 6-bit scales and minimums of Q4_K and Q5_K, packed in 12 bytes.
inline void ReadSixBits(Block block, const Scales& scales) {
  const __m512 factor = LoadHalves(block, 0), minimum = LoadHalves(block, 2);
  const __m128i six = _mm_set1_epi8(0x3f), four = _mm_set1_epi8(0x0f), top = _mm_set1_epi8(0x30);
  for (int i = 0; i < 4; ++i) {
    const __m128i first = LoadBytes(block, 4 + i), second = LoadBytes(block, 8 + i);
    const __m128i both = LoadBytes(block, 12 + i);
    const auto late = [&](__m128i low, __m128i high) {
      return _mm_or_si128(_mm_and_si128(low, four), _mm_and_si128(_mm_srli_epi16(high, 2), top));
    };
    scales.factor[i] = _mm512_mul_ps(factor, Unsigned(_mm_and_si128(first, six)));
    scales.minimum[i] = _mm512_mul_ps(minimum, Unsigned(_mm_and_si128(second, six)));
    scales.factor[i + 4] = _mm512_mul_ps(factor, Unsigned(late(both, first)));
    scales.minimum[i + 4] =
        _mm512_mul_ps(minimum, Unsigned(late(_mm_srli_epi16(both, 4), second)));
  }
}

struct Q4K {
  static constexpr int kBytes = 144, kGroups = 8;
  static constexpr bool kHalves = false, kMinimum = true;
  static void Read(Block block, const Scales& scales) { ReadSixBits(block, scales); }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 16 + group / 2 * 32 + 2 * pair);
    return Table<4, 0>::Look(ShiftRight(words, group % 2 * 4));
  }
};

struct Q5K {
  static constexpr int kBytes = 176, kGroups = 8;
  static constexpr bool kHalves = false, kMinimum = true;
  static void Read(Block block, const Scales& scales) { ReadSixBits(block, scales); }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i low = ShiftRight(LoadPairs(block, 48 + group / 2 * 32 + 2 * pair), group % 2 * 4);
    // Bit `group` of the other byte is the fifth.
    const __m512i high = ShiftLeft(ShiftRight(LoadPairs(block, 16 + 2 * pair), group), 4);
    return Table<5, 0>::Look(Select(_mm512_set1_epi16(0x10), high, low));
  }
};

struct Q6K {
  static constexpr int kBytes = 210, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static void Read(Block block, const Scales& scales) {
    const __m512 factor = LoadHalves(block, 208);
    for (int i = 0; i < 16; ++i) {
      scales.factor[i] = _mm512_mul_ps(factor, Signed(LoadBytes(block, 192 + i)));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const int half = group / 4, quarter = group % 4;
    const __m512i four = LoadPairs(block, 64 * half + quarter % 2 * 32 + 2 * pair);
    const __m512i two = LoadPairs(block, 128 + 32 * half + 2 * pair);
    const __m512i low = ShiftRight(four, quarter / 2 * 4);
    const __m512i high = ShiftLeft(ShiftRight(two, 2 * quarter), 4);
    return Table<6, -32>::Look(Select(_mm512_set1_epi16(0x30), high, low));
  }
};

struct Q2K {
  static constexpr int kBytes = 84, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = true;
  static void Read(Block block, const Scales& scales) {
    const __m512 factor = LoadHalves(block, 80), minimum = LoadHalves(block, 82);
    const __m128i four = _mm_set1_epi8(0x0f);
    for (int i = 0; i < 16; ++i) {
      const __m128i both = LoadBytes(block, i);
      const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), four);
      scales.factor[i] = _mm512_mul_ps(factor, Unsigned(_mm_and_si128(both, four)));
      scales.minimum[i] = _mm512_mul_ps(minimum, Unsigned(high));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 16 + group / 4 * 32 + 2 * pair);
    return Table<2, 0>::Look(ShiftRight(words, group % 4 * 2));
  }
};

struct Q3K {
  static constexpr int kBytes = 110, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static void Read(Block block, const Scales& scales) {
    const __m512 factor = LoadHalves(block, 108), middle = _mm512_set1_ps(32);
    const __m128i four = _mm_set1_epi8(0x0f), top = _mm_set1_epi8(0x30);
    for (int i = 0; i < 16; ++i) {
      // Four bits of byte i % 8, the lower ones first; two of byte 8 + i % 4, a pair for each i / 4.
      const __m128i low = _mm_srli_epi16(LoadBytes(block, 96 + i % 8), i / 8 * 4);
      const __m128i high = _mm_srli_epi16(LoadBytes(block, 104 + i % 4), i / 4 * 2);
      const __m128i code = _mm_or_si128(_mm_and_si128(low, four),
                                        _mm_and_si128(_mm_slli_epi16(high, 4), top));
      scales.factor[i] = _mm512_mul_ps(factor, _mm512_sub_ps(Unsigned(code), middle));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 32 + group / 4 * 32 + 2 * pair);
    const __m512i low = ShiftRight(words, group % 4 * 2);
    const __m512i high = ShiftLeft(ShiftRight(LoadPairs(block, 2 * pair), group), 2);
    return Table<3, -4>::Look(Select(_mm512_set1_epi16(0x4), high, low));
  }
};

}  // namespace jspec
