// Rounds kernels packed as in GGUF files to Q4_0, in strips of 16 outputs: see `to_q4_0` in
// `weights/quantize.py`, which does the same to floats. A vector holds one input of as many outputs
// as it has lanes, so nothing is taken across lanes.

#include "multiply.h"

#ifdef JSPEC_HAS_PACKED
#include "packed_formats.h"

namespace {

using namespace jspec;

constexpr int kInputs = 32;  // of a block of Q4_0
using Rounded4 = Nibbles<false, false>;

// To the nearest integer, the even one of two, of numbers below 2^22.
inline Lanes Nearest(Lanes numbers) { return (numbers + 12582912.0f) - 12582912.0f; }

// The integers from -8 to 7 that stand for weights in units of a scale.
inline Lanes Codes(Lanes weights, Lanes scale) {
  const Lanes codes = Nearest(weights / scale);
  return codes < -8.0f ? Lanes{} - 8.0f : codes > 7.0f ? Lanes{} + 7.0f : codes;
}

inline Lanes Divisor(Lanes scale) { return scale == 0.0f ? Lanes{} + 1.0f : scale; }

// The scale of least squared error among a few, each fitted to its codes.
inline Lanes BestScale(const Lanes* weights) {
  Lanes most = weights[0], least = weights[0];
  for (int i = 1; i < kInputs; ++i) {
    most = weights[i] > most ? weights[i] : most;
    least = weights[i] < least ? weights[i] : least;
  }
  const Lanes usual = (most > -least ? most : least) / -8.0f;
  Lanes best_gain = {}, best = {};
  for (int trial = 0; trial < 7; ++trial) {
    const Lanes scale = Divisor(usual * (0.75f + 0.05f * trial));
    Lanes along = {}, square = {};
    for (int i = 0; i < kInputs; ++i) {
      const Lanes codes = Codes(weights[i], scale);
      along = MultiplyAdd(along, weights[i], codes);
      square = MultiplyAdd(square, codes, codes);
    }
    square = square > 1.0f ? square : Lanes{} + 1.0f;
    const Lanes gain = along * along / square;
    best = gain > best_gain ? along / square : best;
    best_gain = gain > best_gain ? gain : best_gain;
  }
  return best;
}

// Stores scales as float16 and returns them as they are stored.
inline Lanes StoreHalves(Lanes numbers, uint8_t* to) {
#ifdef __AVX512F__
  const __m256i halves = _mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256((__m256i*)to, halves);
  return (Lanes)_mm512_cvtph_ps(halves);
#else
  const __m128i halves = _mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128((__m128i*)to, halves);
  return (Lanes)_mm256_cvtph_ps(halves);
#endif
}

void WriteBlock(const Lanes* weights, int output, uint8_t* block) {
  const Lanes scale = Divisor(StoreHalves(BestScale(weights), block + 2 * output));
  for (int four = 0; four < kInputs / 8; ++four) {
    Words words = {};
    for (int i = 0; i < 4; ++i) {
      const Lanes low = Codes(weights[4 * four + i], scale) + 8.0f;
      const Lanes high = Codes(weights[kInputs / 2 + 4 * four + i], scale) + 8.0f;
      words |= (__builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 4)
               << (8 * i);
    }
    std::memcpy(block + kStrip * (2 + 4 * four) + 4 * output, &words, sizeof(words));
  }
}

template <typename Format>
void RoundStrips(const uint8_t* from, int64_t num_blocks, uint8_t* to) {
  constexpr int kScales = Format::kHalves ? 2 : 1, kShared = kInputs / kScales;
  for (; num_blocks > 0; --num_blocks, from += kStrip * Format::kBytes) {
    for (int output = 0; output < kStrip; output += kLanes) {
      const Block block{from, output};
      Lanes factor[kScales * Format::kGroups], minimum[kScales * Format::kGroups] = {};
      Format::Read(block, {factor, minimum});
      for (int g = 0; g < Format::kGroups; ++g) {
        Lanes weights[kInputs];
        for (int four = 0; four < kInputs / 4; ++four) {
          const Words codes = Format::Codes(block, g, four);
          const int scale = g * kScales + 4 * four / kShared;
          for (int i = 0; i < 4; ++i) {
            const Lanes code = ToLanes(codes >> (8 * i) & 0xff) - float(Format::kOffset);
            weights[4 * four + i] = code * factor[scale];
            if (Format::kMinimum) weights[4 * four + i] -= minimum[scale];
          }
        }
        WriteBlock(weights, output, to + g * kStrip * Rounded4::kBytes);
      }
    }
    to += Format::kGroups * kStrip * Rounded4::kBytes;
  }
}

}  // namespace

// `num_blocks` are those of an output, in all strips.
#define JSPEC_ROUND(name, ...)                                                          \
  extern "C" void jspec_round_##name(const uint8_t* from, int64_t num_blocks, uint8_t* to) { \
    RoundStrips<__VA_ARGS__>(from, num_blocks, to);                                     \
  }

JSPEC_ROUND(q4_1, Nibbles<false, true>)
JSPEC_ROUND(q5_0, Nibbles<true, false>)
JSPEC_ROUND(q5_1, Nibbles<true, true>)
JSPEC_ROUND(q8_0, Q8)
JSPEC_ROUND(q2_k, Q2K)
JSPEC_ROUND(q3_k, Q3K)
JSPEC_ROUND(q4_k, SixBitScales<false>)
JSPEC_ROUND(q5_k, SixBitScales<true>)
JSPEC_ROUND(q6_k, Q6K)

#endif
