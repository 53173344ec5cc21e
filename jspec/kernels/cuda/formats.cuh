// How weights are loaded and decoded for tensor cores.
//
// A tile is 16 outputs. A warp takes it in steps of a format's kStep inputs, 32 of them at a time: a
// piece. Lane 4g + t holds outputs 2g and 2g + 1, the rows g and g + 8 of the instruction, and of each
// piece 8 inputs, two fours of neighbours, as 4 pairs of bfloat16 of each output. In which order
// inputs are multiplied is free, as long as the rows' are taken in the same one.
//
// A format is: kStep; TileBytes, the bytes of a tile with its steps, and BytesBefore, how far apart in
// them steps lie; kTiles and kDepth, the tiles that a warp takes together and the steps of them that
// are under way at once; First, the first of the four inputs that a lane takes of each half of a
// piece, and whether they are spread over the pairs (kSpread); Raw, what a lane has of a step, fields
// of 4, 8 or 16 bytes, of which the first kRawBytes are copied; Load, which visits each with its
// address; Pairs, the decoded integers or floats; and, where kHasFactors, Factors: what the sums of a
// piece, or of each half where kHalves, are multiplied by, and what of the inputs' sum is subtracted,
// where kHasMinimum. Where kSharesHeader, the header of a step is copied by all lanes, 16 bytes each,
// and each takes what it needs of it.

#pragma once

#include "common.cuh"

namespace jspec {

constexpr int kTile = 16;

struct Weights {
  const uint8_t* values;
  const int8_t* multipliers;  // of 4-bit integers, a byte for 16 of the values
  int num_inputs;             // of each output
};

// Returns the weights that begin some tiles and some steps of a tile later.
template <class Format>
JSPEC_BOTH Weights From(const Weights& weights, int64_t tiles, int steps) {
  const int64_t bytes = tiles * Format::TileBytes(weights.num_inputs) + Format::BytesBefore(steps);
  return {weights.values + bytes, weights.multipliers + bytes / 16, weights.num_inputs};
}

// Which lane it is: g and t.
struct Lane {
  int g, t;
};

// Where a piece is: its step of a tile, and its number in the step.
struct Place {
  int step, piece;
  Lane lane;
};

using Pieces = uint32_t[2][4];  // of each output 8 inputs

struct Factor {
  float factor[2], minimum[2];  // of each output
};

// Returns two bfloat16s: the bits of the mask in each half of a word are the integers, below 128, that
// are added to 128. That makes them its last bits. The pair `less` is added, exactly.
JSPEC_BOTH inline uint32_t PairOf(uint32_t word, uint32_t mask, uint32_t less) {
  return MultiplyAddPairs(MaskOr(word, mask | mask << 16, 0x43004300u), 0x3f803f80u, less);
}

// Of 4 codes below 128, one in each byte's bits of the mask, takes an offset away.
JSPEC_BOTH inline void ToPairs(uint32_t codes, uint32_t mask, int offset, uint32_t& even,
                               uint32_t& odd) {
  const uint32_t bits = BitsOf(-128.0f - offset), less = bits | bits >> 16;
  even = PairOf(codes, mask, less);
  odd = PairOf(codes >> 8, mask, less);
}

// A signed byte is its lower 7 bits, less 128 if the eighth is set. That bit, in -128's exponent,
// makes -256 of it.
JSPEC_BOTH inline void SignedToPairs(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  even = PairOf(bytes, 0x7f, MaskOr(bytes, 0x00800080u, 0xc300c300u));
  odd = PairOf(bytes >> 8, 0x7f, MaskOr(bytes >> 8, 0x00800080u, 0xc300c300u));
}

// Of outputs that lie one after another, each with 64 bytes a step.
template <int kInputBits>
struct Plain {
  JSPEC_BOTH static int64_t TileBytes(int num_inputs) {
    return int64_t(num_inputs) * (kTile * kInputBits / 8);
  }
  JSPEC_BOTH static int64_t BytesBefore(int steps) { return 64 * steps; }
};

struct Unscaled {
  static constexpr bool kHasFactors = false, kHalves = false, kHasMinimum = false;
  static constexpr bool kSharesHeader = false;
};

struct Bfloat16Format : Unscaled, Plain<16> {
  static constexpr int kStep = 32, kTiles = 4, kDepth = 2;
  static constexpr bool kSpread = false;
  struct Raw {
    uint4 outputs[2];
  };
  static constexpr int kRawBytes = sizeof(Raw);
  JSPEC_BOTH static int First(int, int t, int half) { return 8 * t + 4 * half; }
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const int64_t first = int64_t(2 * lane.g) * weights.num_inputs + 8 * lane.t;
    visit(raw.outputs[0], weights.values + 2 * first, true);
    visit(raw.outputs[1], weights.values + 2 * (first + weights.num_inputs), true);
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) memcpy(pairs[k], &raw.outputs[k], 16);
  }
};

struct Int8Format : Unscaled, Plain<8> {
  static constexpr int kStep = 64, kTiles = 4, kDepth = 2;
  static constexpr bool kSpread = true;
  struct Raw {
    uint4 outputs[2];
  };
  static constexpr int kRawBytes = sizeof(Raw);
  JSPEC_BOTH static int First(int piece, int t, int half) { return 16 * t + 8 * piece + 4 * half; }
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const int64_t first = int64_t(2 * lane.g) * weights.num_inputs + 16 * lane.t;
    visit(raw.outputs[0], weights.values + first, true);
    visit(raw.outputs[1], weights.values + first + weights.num_inputs, true);
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      const uint4& bytes = raw.outputs[k];
      SignedToPairs(at.piece ? bytes.z : bytes.x, pairs[k][0], pairs[k][1]);
      SignedToPairs(at.piece ? bytes.w : bytes.y, pairs[k][2], pairs[k][3]);
    }
  }
};

// A lane takes a group of 32 inputs, which share a multiplier. A row has whole steps.
struct Int4Format : Unscaled, Plain<4> {
  static constexpr int kStep = 128, kTiles = 2, kDepth = 2;
  static constexpr bool kSpread = true;
  struct Raw {
    uint4 outputs[2];
    uint32_t multipliers[2];  // of the step's four groups
  };
  static constexpr int kRawBytes = 40;
  JSPEC_BOTH static int First(int piece, int t, int half) { return 32 * t + 4 * piece + 16 * half; }
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const int num_groups = weights.num_inputs / 32;
    for (int k = 0; k < 2; ++k) {
      const int64_t place = int64_t(2 * lane.g + k) * num_groups;
      visit(raw.outputs[k], weights.values + 16 * (place + lane.t), true);
      visit(raw.multipliers[k], weights.multipliers + place, true);
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      const uint4& w = raw.outputs[k];
      const uint32_t words[4] = {w.x, w.y, w.z, w.w}, codes = words[at.piece] ^ 0x88888888u;
      ToPairs(codes, 15, 8, pairs[k][0], pairs[k][1]);
      ToPairs(codes >> 4, 15, 8, pairs[k][2], pairs[k][3]);
      // The products are int8, which bfloat16 holds exactly.
      const auto multiplier = int8_t(raw.multipliers[k] >> 8 * at.lane.t & 255);
      const uint32_t multipliers = ToPair(multiplier, multiplier);
      for (uint32_t& pair : pairs[k]) pair = MultiplyAddPairs(pair, multipliers, 0x80008000u);
    }
  }
};

// Numbers of both outputs.
JSPEC_BOTH inline uint32_t Word(uint2 both, int k) { return k ? both.y : both.x; }
JSPEC_BOTH inline float Half(uint32_t both, int k) { return FloatOfHalf(uint16_t(both >> 16 * k)); }
JSPEC_BOTH inline int Byte(uint16_t both, int k) { return both >> 8 * k & 255; }

// Strips: elements of 16 outputs side by side, of which a lane loads two. Of each 32 inputs it takes
// the fours t and t + 4.
template <int kBlockInputs, int kBlockBytes, bool kMinimum, bool kHasHalves>
struct Strips {
  static_assert(kBlockInputs == 32 || kBlockInputs == 256);
  static constexpr bool kHasFactors = true, kHalves = kHasHalves, kHasMinimum = kMinimum;
  static constexpr bool kSharesHeader = kBlockInputs == 256;
  static constexpr int kBlock = kBlockInputs, kBytes = kBlockBytes;
  static constexpr int kStep = kBlockInputs == 32 ? 32 : 128;  // a half of a large block
  static constexpr bool kSpread = true;
  JSPEC_BOTH static int First(int piece, int t, int half) { return 32 * piece + 4 * t + 16 * half; }
  // Visits a lane's elements of the block, two of half the field's size; `byte` says where they begin
  // in an output's own block.
  template <class Field, class Visit>
  JSPEC_BOTH static void Get(Field& field, const uint8_t* block, Lane lane, int byte,
                             const Visit& visit) {
    visit(field, block + kTile * byte + sizeof(Field) * lane.g, true);
  }
  // Visits a lane's part of the first bytes of all outputs' blocks, which a warp shares.
  template <class Visit>
  JSPEC_BOTH static void GetHeader(uint4& header, const uint8_t* block, Lane lane, int bytes,
                                   const Visit& visit) {
    const int part = 4 * lane.g + lane.t;
    visit(header, block + (part < bytes ? kTile * part : 0), part < bytes);
  }
  // The same as Get, of the header that begins at the block.
  template <class Field, class Visit>
  JSPEC_BOTH static void Take(Field& field, const uint4& header, const uint8_t* block, Lane lane,
                              int byte, const Visit& visit) {
    visit.Take(field, header, block, kTile * byte + int(sizeof(Field)) * lane.g);
  }
  JSPEC_BOTH static int64_t TileBytes(int num_inputs) {
    return int64_t(num_inputs / kBlock) * (kTile * kBytes);
  }
  JSPEC_BOTH static int64_t BytesBefore(int steps) {
    return int64_t(steps / (kBlock / kStep)) * (kTile * kBytes);
  }
  // What a block of 32 inputs has.
  template <class Raw>
  JSPEC_BOTH static Factor Factors(const Raw& raw, Place, int) {
    return {{Half(raw.halves, 0), Half(raw.halves, 1)}, {}};
  }
};

template <bool kFifth>
struct NibblesFormat : Strips<32, kFifth ? 22 : 18, false, false> {
  using Base = Strips<32, kFifth ? 22 : 18, false, false>;
  static constexpr int kTiles = 4, kDepth = kFifth ? 3 : 4;
  struct Raw {
    uint2 codes;
    uint32_t halves;
    alignas(4) uint32_t fifths[2];
  };
  static constexpr int kRawBytes = kFifth ? 20 : 12;
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const uint8_t* block = weights.values;
    Base::Get(raw.halves, block, lane, 0, visit);
    // The two outputs' lie together, 8 bytes.
    for (int k = 0; kFifth && k < 2; ++k) {
      visit(raw.fifths[k], block + kTile * 2 + 8 * lane.g + 4 * k, true);
    }
    Base::Get(raw.codes, block, lane, Base::kBytes - 16 + 4 * lane.t, visit);
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      for (int half = 0; half < 2; ++half) {
        uint32_t codes = Word(raw.codes, k) >> 4 * half;
        if (kFifth) {  // bit i is of input i: the multiplication spreads four over the bytes
          const uint32_t bits = raw.fifths[k] >> (16 * half + 4 * at.lane.t) & 15;
          codes = MaskOr(codes, 0x0f0f0f0fu, (bits * 0x00204081u & 0x01010101u) << 4);
        }
        ToPairs(codes, kFifth ? 31 : 15, kFifth ? 16 : 8, pairs[k][2 * half], pairs[k][2 * half + 1]);
      }
    }
  }
};
using Q40Format = NibblesFormat<false>;
using Q50Format = NibblesFormat<true>;

struct Q80Format : Strips<32, 34, false, false> {
  static constexpr int kTiles = 4, kDepth = 3;
  struct Raw {
    uint2 codes[2];
    uint32_t halves;
  };
  static constexpr int kRawBytes = 20;
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const uint8_t* block = weights.values;
    Get(raw.halves, block, lane, 0, visit);
    for (int i = 0; i < 2; ++i) Get(raw.codes[i], block, lane, 2 + 4 * (lane.t + 4 * i), visit);
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 2; ++i) {
        SignedToPairs(Word(raw.codes[i], k), pairs[k][2 * i], pairs[k][2 * i + 1]);
      }
    }
  }
};

// Eight groups of 32 inputs, with 6-bit factors and minimums packed in 12 bytes. The codes of groups
// 2j and 2j + 1 share words; the fifth bits of all groups do.
template <bool kFifth>
struct SixBitScalesFormat : Strips<256, kFifth ? 176 : 144, true, false> {
  using Base = Strips<256, kFifth ? 176 : 144, true, false>;
  static constexpr int kTiles = 2, kDepth = 2;
  struct Raw {
    uint2 codes[2][2];
    uint4 header;
    uint2 fifths[2];
    uint32_t factors, minimums;
    uint16_t scales[12];
  };
  static constexpr int kRawBytes = kFifth ? 64 : 48;
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const uint8_t* block = weights.values;
    Base::GetHeader(raw.header, block, lane, 16, visit);
    Base::Take(raw.factors, raw.header, block, lane, 0, visit);
    Base::Take(raw.minimums, raw.header, block, lane, 2, visit);
    for (int i = 0; i < 12; ++i) Base::Take(raw.scales[i], raw.header, block, lane, 4 + i, visit);
    for (int i = 0; i < 2; ++i) {
      const int four = 4 * (lane.t + 4 * i), codes = Base::kBytes - 128 + step % 2 * 64 + four;
      if (kFifth) Base::Get(raw.fifths[i], block, lane, 16 + four, visit);
      for (int j = 0; j < 2; ++j) Base::Get(raw.codes[j][i], block, lane, codes + 32 * j, visit);
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    const int group = at.step % 2 * 4 + at.piece;
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 2; ++i) {
        uint32_t codes = Word(raw.codes[at.piece / 2][i], k) >> at.piece % 2 * 4;
        if (kFifth) {
          const uint32_t fifths = (Word(raw.fifths[i], k) >> group & 0x01010101u) << 4;
          codes = MaskOr(codes, 0x0f0f0f0fu, fifths);
        }
        ToPairs(codes, kFifth ? 31 : 15, 0, pairs[k][2 * i], pairs[k][2 * i + 1]);
      }
    }
  }
  JSPEC_BOTH static Factor Factors(const Raw& raw, Place at, int) {
    Factor result;
    for (int k = 0; k < 2; ++k) {
      int factor = Byte(raw.scales[at.piece], k), minimum = Byte(raw.scales[4 + at.piece], k);
      const int both = Byte(raw.scales[8 + at.piece], k);
      const bool is_early = at.step % 2 == 0;
      factor = is_early ? factor & 63 : (both & 15) | factor >> 6 << 4;
      minimum = is_early ? minimum & 63 : both >> 4 | minimum >> 6 << 4;
      result.factor[k] = Half(raw.factors, k) * factor;
      result.minimum[k] = Half(raw.minimums, k) * minimum;
    }
    return result;
  }
};
using Q4KFormat = SixBitScalesFormat<false>;
using Q5KFormat = SixBitScalesFormat<true>;

// Sixteen signed factors, each of 16 inputs: a half of a piece.
struct Q6KFormat : Strips<256, 210, false, true> {
  static constexpr int kTiles = 2, kDepth = 2;
  struct Raw {
    uint2 low[2][2], high[2];
    uint4 header;
    uint32_t factors;
    uint16_t scales[8];
  };
  static constexpr int kRawBytes = 64;
  template <class Visit>
  JSPEC_BOTH static void Load(const Weights& weights, int step, Lane lane, Raw& raw,
                              const Visit& visit) {
    const uint8_t* block = weights.values;
    const int half = step % 2;
    // The half's scales and, after all scales, the factors.
    const uint8_t* header = block + kTile * (192 + 8 * half);
    GetHeader(raw.header, header, lane, 18 - 8 * half, visit);
    Take(raw.factors, raw.header, header, lane, 16 - 8 * half, visit);
    for (int i = 0; i < 8; ++i) Take(raw.scales[i], raw.header, header, lane, i, visit);
    for (int i = 0; i < 2; ++i) {
      const int four = 4 * (lane.t + 4 * i);
      Get(raw.high[i], block, lane, 128 + 32 * half + four, visit);
      for (int j = 0; j < 2; ++j) {
        Get(raw.low[j][i], block, lane, 64 * half + 32 * j + four, visit);
      }
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 2; ++i) {
        const uint32_t low = Word(raw.low[at.piece % 2][i], k) >> at.piece / 2 * 4;
        const uint32_t high = Word(raw.high[i], k) >> 2 * at.piece;
        const uint32_t codes = MaskOr(low, 0x0f0f0f0fu, (high & 0x03030303u) << 4);
        ToPairs(codes, 63, 32, pairs[k][2 * i], pairs[k][2 * i + 1]);
      }
    }
  }
  JSPEC_BOTH static Factor Factors(const Raw& raw, Place at, int half) {
    Factor result = {};
    for (int k = 0; k < 2; ++k) {
      const int8_t scale = Byte(raw.scales[2 * at.piece + half], k);
      result.factor[k] = Half(raw.factors, k) * scale;
    }
    return result;
  }
};

}  // namespace jspec
