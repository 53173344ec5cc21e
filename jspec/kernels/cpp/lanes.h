// Vectors of floats, as wide as the processor's registers, which all kernels share.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "threads.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jspec {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kStep = 2 * kLanes;  // numbers that are loaded at a time: two vectors

using BFloat16 = uint16_t;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct Pair {
  Lanes first, second;
};

// sum + a * b, rounded once where the processor can do that. A compiler left to itself may round
// once in one loop and twice in another; a result would then depend on how many others are computed
// with it.
inline Lanes MultiplyAdd(Lanes sum, Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

inline Lanes AddProducts(Lanes sum, Pair a, Pair b) {
  return MultiplyAdd(MultiplyAdd(sum, a.first, b.first), a.second, b.second);
}

inline Lanes LoadLanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline Pair Load(const float* from) { return {LoadLanes(from), LoadLanes(from + kLanes)}; }

// The numbers at even places, and those at odd places. A bfloat16 is the upper half of a float, so
// a shift and a mask convert two of them at once, without a shuffle.
inline Pair Load(const BFloat16* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return {(Lanes)(words << 16), (Lanes)(words & 0xffff0000u)};
}

inline float AsFloat(float number) { return number; }

inline float AsFloat(BFloat16 number) {
  const uint32_t word = static_cast<uint32_t>(number) << 16;
  float widened;
  std::memcpy(&widened, &word, sizeof(word));
  return widened;
}

// The nearest bfloat16, the even one of two that are equally near; NaN stays NaN.
inline BFloat16 Rounded(float number) {
  uint32_t word;
  std::memcpy(&word, &number, sizeof(word));
  const uint32_t nearest = word + 0x7fff + ((word >> 16) & 1);
  return (number == number ? nearest : word | 0x400000) >> 16;
}

inline void Convert(const float* from, int64_t count, BFloat16* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Rounded(from[i]);
}

inline void Convert(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

// Picks lanes from both halves of a pair. The second half's lanes are numbered from kLanes on.
template <int... kPlaces>
inline Lanes Pick(const Pair& pair, std::integer_sequence<int, kPlaces...>) {
#ifdef __clang__
  return __builtin_shufflevector(pair.first, pair.second, kPlaces...);
#else
  return __builtin_shuffle(pair.first, pair.second, Words{kPlaces...});
#endif
}

template <int kFirst, int... kIndex>
inline Lanes PickEverySecond(const Pair& pair, std::integer_sequence<int, kIndex...>) {
  return Pick(pair, std::integer_sequence<int, kFirst + 2 * kIndex...>());
}

// Lanes from place kFirst on, by turns from the first and from the second half.
template <int kFirst, int... kIndex>
inline Lanes PickInTurn(const Pair& pair, std::integer_sequence<int, kIndex...>) {
  return Pick(pair, std::integer_sequence<int, kFirst + kIndex / 2 + kIndex % 2 * kLanes...>());
}

using LaneIndices = std::make_integer_sequence<int, kLanes>;

// The lanes at even places of both halves, and those at odd places.
inline Pair Unzip(const Pair& pair) {
  return {PickEverySecond<0>(pair, LaneIndices()), PickEverySecond<1>(pair, LaneIndices())};
}

// Undoes Unzip.
inline Pair Zip(const Pair& pair) {
  return {PickInTurn<0>(pair, LaneIndices()), PickInTurn<kLanes / 2>(pair, LaneIndices())};
}

// Floats in the order in which Load gives numbers of type T.
template <typename T>
inline Pair LoadLike(const float* from) {
  const Pair pair = Load(from);
  return sizeof(T) == sizeof(BFloat16) ? Unzip(pair) : pair;
}

inline void Store(float* to, const Pair& pair) {
  std::memcpy(to, &pair.first, sizeof(Lanes));
  std::memcpy(to + kLanes, &pair.second, sizeof(Lanes));
}

// Undoes LoadLike.
template <typename T>
inline void StoreLike(float* to, const Pair& pair) {
  Store(to, sizeof(T) == sizeof(BFloat16) ? Zip(pair) : pair);
}

// The sum of all lanes, always in the same order: halves are added until four lanes are left.
inline float Total(Lanes lanes) {
  typedef float Four __attribute__((vector_size(4 * sizeof(float))));
  Four fours[kLanes / 4];
  std::memcpy(fours, &lanes, sizeof(lanes));
  for (int count = kLanes / 8; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i) fours[i] += fours[i + count];
  }
  const Four sum = fours[0];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The totals of kLanes vectors, vector i's in lane i, all summed in the same order. The vectors are
// overwritten.
inline Lanes Totals(Lanes* lanes) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) {
      const Pair halves = Unzip({lanes[2 * i], lanes[2 * i + 1]});
      lanes[i] = halves.first + halves.second;
    }
  }
  return lanes[0];
}

inline Lanes All(float number) { return Lanes{} + number; }

// The exponential of each number, all at most 0, to two units in the last place; 0 below -87, and
// NaN of NaN. It is the nearest power of two, times a polynomial (Cephes' expf) of the rest.
inline Lanes ExpOfNegative(Lanes x) {
  constexpr float kLowest = -87, kPerTwo = 1.44269504088896341f;
  constexpr float kRounding = 3 << 22;  // adding it leaves the nearest integer in the low bits
  constexpr float kCoefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                     1.6666665459e-1f, 5.0000001201e-1f};
  const Lanes sum = MultiplyAdd(All(kRounding), x, All(kPerTwo));
  const Lanes twos = sum - kRounding;
  Lanes rest = MultiplyAdd(x, twos, All(-0.693359375f));  // ln 2 in two parts, of few digits first
  rest = MultiplyAdd(rest, twos, All(2.12194440e-4f));
  Lanes series = All(1.9875691500e-4f);
  for (const float coefficient : kCoefficients) {
    series = MultiplyAdd(All(coefficient), series, rest);
  }
  const Lanes power = MultiplyAdd(rest + 1.0f, series, rest * rest);
  // The exponent of a float is biased by 127, and begins at bit 23.
  const Lanes scaled = power * (Lanes)(((Words)sum + 127u) << 23);
  return x < All(kLowest) ? Lanes{} : scaled;
}

// Calls work with the numbers of a buffer, which are floats or bfloat16 numbers.
template <typename Work>
ffi::Error WithNumbers(ffi::AnyBuffer& buffer, const Work& work) {
  if (buffer.element_type() == ffi::F32) {
    work(static_cast<float*>(buffer.untyped_data()));
  } else if (buffer.element_type() == ffi::BF16) {
    work(static_cast<BFloat16*>(buffer.untyped_data()));
  } else {
    return ffi::Error::InvalidArgument("numbers are neither float32 nor bfloat16");
  }
  return ffi::Error::Success();
}

// Memory aligned for vectors: a vector that lies across two cache lines is read twice.
template <typename T>
class Space {
 public:
  // Returns space for `count` numbers; earlier contents are lost.
  T* Take(int64_t count) {
    vectors_.resize((count * sizeof(T) + sizeof(Lanes) - 1) / sizeof(Lanes));
    return reinterpret_cast<T*>(vectors_.data());
  }

 private:
  std::vector<Lanes> vectors_;
};

}  // namespace jspec
