// How weights are loaded and decoded for tensor cores.
//
// A tile is 16 outputs. A warp takes it in steps of a format's kStep inputs, 32 of them at a time: a
// piece. Lane 4g + t holds outputs 2g and 2g + 1, the rows g and g + 8 of the instruction, and of each
// piece 8 inputs in the order of Order, 4 pairs of bfloat16 of each output. In which order inputs are
// multiplied is free, as long as the rows' are staged in the same one.
//
// A format is: kStep; kUnroll, the steps that a warp loads at once; kBlocks, the blocks of threads that
// fit a multiprocessor by their registers; Order, where in the staged step an input lies; Raw, what a lane loads
// of a step; Load; Pairs, the decoded integers or floats; and, where kHasFactors, Factors: what the
// sums of a piece, or of each half where kHalves, are multiplied by, and what of the inputs' sum is
// subtracted, where kHasMinimum.

#pragma once

#include "common.cuh"

namespace jspec {

constexpr int kTile = 16;

struct Weights {
  const uint8_t* values;
  const int8_t* multipliers;
  int num_inputs;
};

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

// The bytes of a word in the order 0, 2, 1, 3: so a mask makes pairs of them.
JSPEC_BOTH inline int Spread(int input) { return input % 4 / 2 + input % 2 * 2; }

// Adds 128 to each of 4 codes below 128, which gives the upper bits of bfloat16s, and takes that and
// the offset away again: all exact.
JSPEC_BOTH inline void ToPairs(uint32_t codes, int offset, uint32_t& even, uint32_t& odd) {
  const uint32_t bits = BitsOf(-128.0f - offset), less = bits | bits >> 16;
  even = MultiplyAddPairs((codes & 0x00ff00ffu) | 0x43004300u, 0x3f803f80u, less);
  odd = MultiplyAddPairs((codes >> 8 & 0x00ff00ffu) | 0x43004300u, 0x3f803f80u, less);
}

JSPEC_BOTH inline void SignedToPairs(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  const auto number = [bytes](int i) { return float(int32_t(bytes << (24 - 8 * i)) >> 24); };
  even = ToPair(number(0), number(2));
  odd = ToPair(number(1), number(3));
}

struct Unscaled {
  static constexpr bool kHasFactors = false, kHalves = false, kHasMinimum = false;
  static constexpr int kBlocks = 2;
};

struct Bfloat16Format : Unscaled {
  static constexpr int kStep = 32, kUnroll = 4;
  struct Raw {
    uint4 outputs[2];
  };
  JSPEC_BOTH static int Order(int input) { return input; }
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const int64_t first = (tile * kTile + 2 * lane.g) * weights.num_inputs + step * kStep + 8 * lane.t;
    raw.outputs[0] = LoadOnce<uint4>(weights.values + 2 * first);
    raw.outputs[1] = LoadOnce<uint4>(weights.values + 2 * (first + weights.num_inputs));
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) memcpy(pairs[k], &raw.outputs[k], 16);
  }
};

struct Int8Format : Unscaled {
  static constexpr int kStep = 64, kUnroll = 4;
  struct Raw {
    uint4 outputs[2];
  };
  JSPEC_BOTH static int Order(int input) {
    return (input % 16 / 8 * 4 + input / 16) * 8 + input % 8 / 4 * 4 + Spread(input);
  }
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const int input = step * kStep + 16 * lane.t;
    const int64_t first = (tile * kTile + 2 * lane.g) * weights.num_inputs + input;
    const bool is_input = input < weights.num_inputs;
    raw.outputs[0] = is_input ? LoadOnce<uint4>(weights.values + first) : uint4{};
    raw.outputs[1] =
        is_input ? LoadOnce<uint4>(weights.values + first + weights.num_inputs) : uint4{};
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      const uint4& bytes = raw.outputs[k];
      SignedToPairs(at.piece ? bytes.z : bytes.x, pairs[k][0], pairs[k][1]);
      SignedToPairs(at.piece ? bytes.w : bytes.y, pairs[k][2], pairs[k][3]);
    }
  }
};

// A lane takes a group of 32 inputs, which share a multiplier.
struct Int4Format : Unscaled {
  static constexpr int kStep = 128, kUnroll = 2;
  struct Raw {
    uint4 outputs[2];
    int8_t multipliers[2];
  };
  JSPEC_BOTH static int Order(int input) {
    return (input % 16 / 4 * 4 + input / 32) * 8 + input % 32 / 16 * 4 + Spread(input);
  }
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const int num_groups = weights.num_inputs / 32, group = step * 4 + lane.t;
    for (int k = 0; k < 2; ++k) {
      const int64_t place = (tile * kTile + 2 * lane.g + k) * num_groups + group;
      const bool is_input = group < num_groups;
      raw.outputs[k] = is_input ? LoadOnce<uint4>(weights.values + 16 * place) : uint4{};
      raw.multipliers[k] = is_input ? LoadOnce<int8_t>(weights.multipliers + place) : int8_t(0);
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      const uint4& w = raw.outputs[k];
      const uint32_t words[4] = {w.x, w.y, w.z, w.w}, codes = words[at.piece] ^ 0x88888888u;
      ToPairs(codes & 0x0f0f0f0fu, 8, pairs[k][0], pairs[k][1]);
      ToPairs(codes >> 4 & 0x0f0f0f0fu, 8, pairs[k][2], pairs[k][3]);
      // The products are int8, which bfloat16 holds exactly.
      const uint32_t multipliers = ToPair(raw.multipliers[k], raw.multipliers[k]);
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
  static constexpr int kBlock = kBlockInputs, kBytes = kBlockBytes;
  static constexpr int kStep = kBlockInputs == 32 ? 32 : 128;  // a half of a large block
  static constexpr int kBlocks = kBlockInputs == 32 ? 2 : 1;
  JSPEC_BOTH static int Order(int input) {
    return (input / 32 * 4 + input % 16 / 4) * 8 + input % 32 / 16 * 4 + Spread(input);
  }
  // Returns a lane's element of the block; `byte` says where it begins in an output's own block.
  template <class Element>
  JSPEC_BOTH static Element Get(const uint8_t* block, Lane lane, int byte) {
    return LoadOnce<Element>(block + kTile * byte + sizeof(Element) * lane.g);
  }
  JSPEC_BOTH static const uint8_t* Block(const Weights& weights, int64_t tile, int step) {
    const int64_t block = tile * (weights.num_inputs / kBlock) + step / (kBlock / kStep);
    return weights.values + block * (kTile * kBytes);
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
  static constexpr int kUnroll = 6;
  struct Raw {
    uint32_t halves;
    uint2 fifths, codes;
  };
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const uint8_t* block = Base::Block(weights, tile, step);
    raw.halves = Base::template Get<uint32_t>(block, lane, 0);
    if (kFifth) raw.fifths = Base::template Get<uint2>(block, lane, 2);
    raw.codes = Base::template Get<uint2>(block, lane, Base::kBytes - 16 + 4 * lane.t);
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      for (int half = 0; half < 2; ++half) {
        uint32_t codes = Word(raw.codes, k) >> 4 * half & 0x0f0f0f0fu;
        if (kFifth) {  // bit i is of input i: the multiplication spreads four over the bytes
          const uint32_t bits = Word(raw.fifths, k) >> (16 * half + 4 * at.lane.t) & 15;
          codes |= (bits * 0x00204081u & 0x01010101u) << 4;
        }
        ToPairs(codes, kFifth ? 16 : 8, pairs[k][2 * half], pairs[k][2 * half + 1]);
      }
    }
  }
};
using Q40Format = NibblesFormat<false>;
using Q50Format = NibblesFormat<true>;

struct Q80Format : Strips<32, 34, false, false> {
  static constexpr int kUnroll = 4;
  struct Raw {
    uint32_t halves;
    uint2 codes[2];
  };
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const uint8_t* block = Block(weights, tile, step);
    raw.halves = Get<uint32_t>(block, lane, 0);
    for (int i = 0; i < 2; ++i) raw.codes[i] = Get<uint2>(block, lane, 2 + 4 * (lane.t + 4 * i));
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
  static constexpr int kUnroll = 2;
  struct Raw {
    uint32_t factors, minimums;
    uint16_t scales[12];
    uint2 fifths[2], codes[2][2];
  };
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const uint8_t* block = Base::Block(weights, tile, step);
    raw.factors = Base::template Get<uint32_t>(block, lane, 0);
    raw.minimums = Base::template Get<uint32_t>(block, lane, 2);
    for (int i = 0; i < 12; ++i) raw.scales[i] = Base::template Get<uint16_t>(block, lane, 4 + i);
    for (int i = 0; i < 2; ++i) {
      const int four = 4 * (lane.t + 4 * i), codes = Base::kBytes - 128 + step % 2 * 64 + four;
      if (kFifth) raw.fifths[i] = Base::template Get<uint2>(block, lane, 16 + four);
      for (int j = 0; j < 2; ++j) {
        raw.codes[j][i] = Base::template Get<uint2>(block, lane, codes + 32 * j);
      }
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    const int group = at.step % 2 * 4 + at.piece;
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 2; ++i) {
        uint32_t codes = Word(raw.codes[at.piece / 2][i], k) >> at.piece % 2 * 4 & 0x0f0f0f0fu;
        if (kFifth) codes |= (Word(raw.fifths[i], k) >> group & 0x01010101u) << 4;
        ToPairs(codes, 0, pairs[k][2 * i], pairs[k][2 * i + 1]);
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
  static constexpr int kUnroll = 2;
  struct Raw {
    uint32_t factors;
    uint16_t scales[8];
    uint2 low[2][2], high[2];
  };
  JSPEC_BOTH static void Load(const Weights& weights, int64_t tile, int step, Lane lane, Raw& raw) {
    const uint8_t* block = Block(weights, tile, step);
    const int half = step % 2;
    raw.factors = Get<uint32_t>(block, lane, 208);
    for (int i = 0; i < 8; ++i) raw.scales[i] = Get<uint16_t>(block, lane, 192 + 8 * half + i);
    for (int i = 0; i < 2; ++i) {
      const int four = 4 * (lane.t + 4 * i);
      raw.high[i] = Get<uint2>(block, lane, 128 + 32 * half + four);
      for (int j = 0; j < 2; ++j) {
        raw.low[j][i] = Get<uint2>(block, lane, 64 * half + 32 * j + four);
      }
    }
  }
  JSPEC_BOTH static void Pairs(const Raw& raw, Place at, Pieces& pairs) {
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 2; ++i) {
        const uint32_t low = Word(raw.low[at.piece % 2][i], k) >> at.piece / 2 * 4;
        const uint32_t high = Word(raw.high[i], k) >> 2 * at.piece;
        const uint32_t codes = (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
        ToPairs(codes, 32, pairs[k][2 * i], pairs[k][2 * i + 1]);
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
