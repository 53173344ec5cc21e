// The gate of a feed-forward layer, silu(gate) * up. XLA on CPU computes it on one thread, however
// many rows there are.

#include "exp.h"

namespace {

using namespace jspec;

constexpr int64_t kWork = 8;  // cost of one gate, relative to moving or multiplying one number

// silu(x) = x / (1 + exp(-x)). The exponential is taken of -|x| only, so it cannot overflow; for a
// negative x numerator and denominator are multiplied by it.
inline Lanes Gated(Lanes gate, Lanes up) {
  const Lanes small = ExpOfNegative((Lanes)((Words)gate | 0x80000000u));  // exp(-|gate|)
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

ffi::Error SwiGlu(Threads pool, ffi::BufferR4<ffi::F32> gate_up,
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_swiglu, SwiGlu);
