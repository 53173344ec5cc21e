// The exponential of numbers that are at most 0.

#pragma once

#include "lanes.h"

namespace jspec {

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

}  // namespace jspec
