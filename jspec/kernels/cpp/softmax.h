// The softmax of one query's scores, up to its normaliser.

#pragma once

#include <algorithm>

#include "exp.h"

namespace jspec {

constexpr float kMasked = -1e30f;

inline float Highest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float highest = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = std::max(highest, lanes[lane]);
  return highest;
#endif
}

// The scores of kLanes slots, kMasked where a slot is not visible. It is written by hand, because
// compilers widen the bytes of the mask one by one.
inline Lanes Masked(const float* scores, const bool* visible) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(visible));
  const __mmask16 is_visible = _mm_test_epi8_mask(flags, flags);
  return (Lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(kMasked), is_visible, scores);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i flags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(visible));
  return (Words)_mm256_cvtepu8_epi32(flags) != 0 ? LoadLanes(scores) : Lanes{} + kMasked;
#else
  Lanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = visible[lane] ? scores[lane] : kMasked;
  return lanes;
#endif
}

// The same for only `count` slots; kMasked for the others.
inline Lanes Masked(const float* scores, const bool* visible, int64_t count) {
  if (count >= kLanes) return Masked(scores, visible);
  bool flags[kLanes] = {};
  std::copy_n(visible, count, flags);
  return Masked(scores, flags);
}

// Turns the scores of one query for `count` slots into weights relative to the highest, 0 where a
// slot is not visible and up to the next multiple of kLanes.
inline void Weigh(float* scores, const bool* visible, int64_t count, float* highest, float* sum) {
  Lanes most = Lanes{} + kMasked, total = {}, lanes;
  for (int64_t s = 0; s < count; s += kLanes) {
    lanes = Masked(scores + s, visible + s, count - s);
    most = lanes > most ? lanes : most;
    std::memcpy(scores + s, &lanes, sizeof(lanes));
  }
  *highest = Highest(most);
  const float base = *highest == kMasked ? 0 : *highest;
  for (int64_t s = 0; s < count; s += kLanes) {
    lanes = ExpOfNegative(LoadLanes(scores + s) - base);
    total += lanes;
    std::memcpy(scores + s, &lanes, sizeof(lanes));
  }
  *sum = Total(total);
}

}  // namespace jspec
