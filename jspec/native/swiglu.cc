// The gate of a feed-forward layer, silu(gate) * up, which XLA on CPU computes on one thread, however
// many rows there are.

#include "lanes.h"

namespace {

using namespace jspec;

constexpr int64_t kWork = 8;  // of a gate, in those of a number that is moved or multiplied

inline Lanes All(float number) { return Lanes{} + number; }

// e to the power of each, which is at most 0; to two units in the last place; 0 below -87.
// The power of two nearest to it, times a polynomial (Cephes' expf) in what is left.
inline Lanes ExpOfNegative(Lanes x) {
  constexpr float kLowest = -87, kPerTwo = 1.44269504088896341f;
  constexpr float kRounding = 3 << 22;  // added to a number, leaves its integer in the low bits
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
  const Lanes scaled = power * (Lanes)(((Words)sum + 127u) << 23);
  return (Lanes)((Words)scaled & (Words)(x >= All(kLowest)));
}

inline Lanes Gated(Lanes gate, Lanes up) {
  const Lanes small = ExpOfNegative((Lanes)((Words)gate | 0x80000000u));  // of -|gate|
  const Words is_negative = (Words)(gate < Lanes{});
  const Lanes numerator = (Lanes)(((Words)small & is_negative) | ((Words)All(1) & ~is_negative));
  return gate * numerator / (small + 1.0f) * up;
}

void GateRow(const float* gate, const float* up, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes gated = Gated(LoadLanes(gate + i), LoadLanes(up + i));
    std::memcpy(to + i, &gated, sizeof(gated));
  }
  if (i == count) return;
  Lanes gates = {}, ups = {};
  std::memcpy(&gates, gate + i, (count - i) * sizeof(float));
  std::memcpy(&ups, up + i, (count - i) * sizeof(float));
  const Lanes gated = Gated(gates, ups);
  std::memcpy(to + i, &gated, (count - i) * sizeof(float));
}

ffi::Error SwiGlu(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> gate_up,
                  ffi::Result<ffi::BufferR3<ffi::F32>> outputs) {
  const auto size = gate_up.dimensions();  // [b t 2 f]
  const int64_t rows = size[0] * size[1], width = size[3];
  const float* from = gate_up.typed_data();
  float* to = outputs->typed_data();
  ForRows(pool, rows, kWork * width, [=](int64_t r) {
    const float* gate = from + 2 * r * width;
    GateRow(gate, gate + width, width, to + r * width);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_swiglu, SwiGlu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>());
