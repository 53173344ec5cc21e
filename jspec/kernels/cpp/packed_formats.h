// How the blocks of GGUF files are decoded where those of 16 outputs lie side by side, element by
// element, as `kernels/packed.py` lays them out. A vector holds the codes of four inputs of as many
// outputs as it has words. Codes are unsigned bytes; a format may subtract an offset from them.

#pragma once

#include "multiply.h"

namespace jspec {

constexpr int kStrip = 16;  // outputs side by side

// The outputs of a strip that fill a vector: all of them, or one half.
struct Block {
  const uint8_t* first;  // of the strip's block
  int output;            // the first one

  // Returns where an element of `kBytes` bytes is that begins at this byte of an output's block.
  template <int kBytes>
  const uint8_t* At(int byte) const {
    return first + kStrip * byte + kBytes * output;
  }
};

inline Words LoadFours(Block block, int byte) {
  Words words;
  std::memcpy(&words, block.At<4>(byte), sizeof(words));
  return words;
}

#ifdef __AVX512F__
inline Lanes LoadHalves(Block block, int byte) {
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)block.At<2>(byte)));
}

inline Words LoadBytes(Block block, int byte) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)block.At<1>(byte)));
}

inline Lanes ToLanes(Words integers) {
  return (Lanes)_mm512_cvtepi32_ps((__m512i)integers);
}
#elif defined(__AVX2__)
inline Lanes LoadHalves(Block block, int byte) {
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)block.At<2>(byte)));
}

inline Words LoadBytes(Block block, int byte) {
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)block.At<1>(byte)));
}

inline Lanes ToLanes(Words integers) {
  return (Lanes)_mm256_cvtepi32_ps((__m256i)integers);
}
#endif

// The lowest bits of every byte, after a shift to the right.
inline Words Bits(Words words, int shift, int bits) {
  return (words >> shift) & ((1u << bits) - 1) * 0x01010101u;
}

// The scales of a block's groups, or of their halves, for each output.
struct Scales {
  Lanes* factor;
  Lanes* minimum;
};

// What a format is: bytes and groups of a block, whether 16 inputs share a scale or 32, whether a
// minimum is subtracted, what is subtracted from each code; Read, which fills in the scales; and
// Codes, those of the inputs 4 * four to 4 * four + 3 of a group.

// Four bits of each code, and in Q5 a fifth.
template <bool kFifth, bool kHasMinimum>
struct Nibbles {
  static constexpr int kCodes = (kHasMinimum ? 4 : 2) + (kFifth ? 4 : 0), kBytes = kCodes + 16;
  static constexpr int kGroups = 1, kOffset = kHasMinimum ? 0 : kFifth ? 16 : 8;
  static constexpr bool kHalves = false, kMinimum = kHasMinimum;
  static void Read(Block block, const Scales& scales) {
    scales.factor[0] = LoadHalves(block, 0);
    if (kMinimum) scales.minimum[0] = -LoadHalves(block, 2);
  }
  static Words Codes(Block block, int, int four) {
    const Words low = Bits(LoadFours(block, kCodes + 4 * (four % 4)), four / 4 * 4, 4);
    if constexpr (!kFifth) return low;
    // Bit i of each output's 32 belongs to input i: the multiplication spreads four over the bytes.
    const Words bits = (LoadFours(block, kCodes - 4) >> (4 * four)) & 0xfu;
    return low | (bits * 0x02040810u & 0x10101010u);
  }
};

struct Q8 {
  static constexpr int kBytes = 34, kGroups = 1;
  static constexpr bool kHalves = false, kMinimum = false;
  static constexpr int kOffset = 128;
  static void Read(Block block, const Scales& scales) { scales.factor[0] = LoadHalves(block, 0); }
  static Words Codes(Block block, int, int four) {
    return LoadFours(block, 2 + 4 * four) ^ 0x80808080u;
  }
};

// Reads the eight 6-bit scales and minimums of Q4_K and Q5_K, packed in 12 bytes.
inline void ReadSixBits(Block block, const Scales& scales) {
  const Lanes factor = LoadHalves(block, 0), minimum = LoadHalves(block, 2);
  for (int i = 0; i < 4; ++i) {
    const Words first = LoadBytes(block, 4 + i), second = LoadBytes(block, 8 + i);
    const Words third = LoadBytes(block, 12 + i);
    scales.factor[i] = factor * ToLanes(first & 63);
    scales.minimum[i] = minimum * ToLanes(second & 63);
    scales.factor[i + 4] = factor * ToLanes((third & 15) | (first >> 6) << 4);
    scales.minimum[i + 4] = minimum * ToLanes((third >> 4) | (second >> 6) << 4);
  }
}

// Q4_K, and with a fifth bit Q5_K.
template <bool kFifth>
struct SixBitScales {
  static constexpr int kBytes = kFifth ? 176 : 144, kGroups = 8, kOffset = 0;
  static constexpr bool kHalves = false, kMinimum = true;
  static void Read(Block block, const Scales& scales) { ReadSixBits(block, scales); }
  static Words Codes(Block block, int group, int four) {
    const int codes = kBytes - 128 + group / 2 * 32 + 4 * four;
    const Words low = Bits(LoadFours(block, codes), group % 2 * 4, 4);
    if constexpr (!kFifth) return low;
    return low | Bits(LoadFours(block, 16 + 4 * four), group, 1) << 4;
  }
};

struct Q6K {
  static constexpr int kBytes = 210, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static constexpr int kOffset = 32;
  static void Read(Block block, const Scales& scales) {
    const Lanes factor = LoadHalves(block, 208);
    for (int i = 0; i < 16; ++i) {  // signed bytes
      scales.factor[i] = factor * (ToLanes(LoadBytes(block, 192 + i) ^ 0x80) - 128);
    }
  }
  static Words Codes(Block block, int group, int four) {
    const int half = group / 4, quarter = group % 4;
    const Words low = LoadFours(block, 64 * half + quarter % 2 * 32 + 4 * four);
    const Words high = LoadFours(block, 128 + 32 * half + 4 * four);
    const Words fifths = quarter < 2 ? high << (4 - 2 * quarter) : high >> (2 * quarter - 4);
    return Bits(low, quarter / 2 * 4, 4) | (fifths & 0x30303030u);
  }
};

struct Q2K {
  static constexpr int kBytes = 84, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = true;
  static constexpr int kOffset = 0;
  static void Read(Block block, const Scales& scales) {
    const Lanes factor = LoadHalves(block, 80), minimum = LoadHalves(block, 82);
    for (int i = 0; i < 16; ++i) {
      const Words both = LoadBytes(block, i);
      scales.factor[i] = factor * ToLanes(both & 15);
      scales.minimum[i] = minimum * ToLanes(both >> 4);
    }
  }
  static Words Codes(Block block, int group, int four) {
    return Bits(LoadFours(block, 16 + group / 4 * 32 + 4 * four), group % 4 * 2, 2);
  }
};

struct Q3K {
  static constexpr int kBytes = 110, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static constexpr int kOffset = 4;
  static void Read(Block block, const Scales& scales) {
    const Lanes factor = LoadHalves(block, 108);
    for (int i = 0; i < 16; ++i) {
      // Four bits of byte i % 8, the lower ones first; two of byte 8 + i % 4, a pair for each i / 4.
      const Words low = (LoadBytes(block, 96 + i % 8) >> (i / 8 * 4)) & 15;
      const Words high = (LoadBytes(block, 104 + i % 4) >> (i / 4 * 2)) & 3;
      scales.factor[i] = factor * (ToLanes(low | high << 4) - 32);
    }
  }
  static Words Codes(Block block, int group, int four) {
    const Words low = LoadFours(block, 32 + group / 4 * 32 + 4 * four);
    return Bits(low, group % 4 * 2, 2) | Bits(LoadFours(block, 4 * four), group, 1) << 2;
  }
};

}  // namespace jspec
