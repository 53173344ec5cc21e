// What a layer computes between its products, on all threads: the norm, the rotation of heads, and
// the gate.

#include <cmath>

#include "lanes.h"

namespace {

using namespace jspec;

// The order is fixed. XLA on CPU adds up the squares of eight rows or more in another order than
// those of fewer, so a row's result would depend on the number of rows.
inline float SumOfSquares(const float* from, int64_t count) {
  Lanes first = {}, second = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const Pair pair = Load(from + i);
    first = MultiplyAdd(first, pair.first, pair.first);
    second = MultiplyAdd(second, pair.second, pair.second);
  }
  float sum = Total(first + second);
  for (; i < count; ++i) sum += from[i] * from[i];
  return sum;
}

template <typename T>
void Normalise(const float* from, const T* scale, float epsilon, int64_t count,
               float* __restrict to) {
  const float mean = SumOfSquares(from, count) / static_cast<float>(count);
  const float factor = 1 / std::sqrt(mean + epsilon);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor * AsFloat(scale[i]);
}

ffi::Error RmsNorm(Threads pool, ffi::BufferR3<ffi::F32> inputs, ffi::AnyBuffer scale,
                   ffi::BufferR0<ffi::F32> epsilon, ffi::Result<ffi::BufferR3<ffi::F32>> outputs) {
  const auto size = inputs.dimensions();
  const int64_t rows = size[0] * size[1], width = size[2];
  const float* from = inputs.typed_data();
  const float small = *epsilon.typed_data();
  float* to = outputs->typed_data();
  return WithNumbers(scale, [&](auto* scales) {
    ForRows(pool, rows, width, [=](int64_t r) {
      Normalise(from + r * width, scales, small, width, to + r * width);
    });
  });
}

// XLA on CPU would compute the cosines and sines anew for every head of every layer.
using Heads = ffi::Buffer<ffi::F32, 5>;  // [b t k g+2 h]

struct Shape {
  int64_t kv_heads, group, half;  // `group` query heads, a key head and a value head
};

inline void Rotate(const float* head, const float* cos, const float* sin, float scale,
                   int64_t half, float* __restrict to) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    to[i] = (first * cos[i] - second * sin[i]) * scale;
    to[half + i] = (second * cos[i] + first * sin[i]) * scale;
  }
}

void RotateToken(const float* heads, const float* cos, const float* sin, const Shape& shape,
                 float* queries, float* keys, float* values) {
  const int64_t dims = 2 * shape.half;
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dims)));
  for (int64_t k = 0; k < shape.kv_heads; ++k) {
    for (int64_t q = 0; q < shape.group; ++q, heads += dims, queries += dims) {
      Rotate(heads, cos, sin, scale, shape.half, queries);
    }
    Rotate(heads, cos, sin, 1, shape.half, keys);
    std::memcpy(values, heads + dims, dims * sizeof(float));
    heads += 2 * dims;
    keys += dims;
    values += dims;
  }
}

ffi::Error RotateHeads(Threads pool, Heads heads,
                       ffi::BufferR3<ffi::F32> cos, ffi::BufferR3<ffi::F32> sin,
                       ffi::Result<ffi::BufferR4<ffi::F32>> queries,
                       ffi::Result<ffi::BufferR4<ffi::F32>> keys,
                       ffi::Result<ffi::BufferR4<ffi::F32>> values) {
  const auto size = heads.dimensions();
  const int64_t tokens = size[0] * size[1];
  const Shape shape{size[2], size[3] - 2, size[4] / 2};
  const int64_t from_stride = size[2] * size[3] * size[4], key_stride = size[2] * size[4];
  const float *from = heads.typed_data(), *cosines = cos.typed_data(), *sines = sin.typed_data();
  float *to_queries = queries->typed_data(), *to_keys = keys->typed_data();
  float* to_values = values->typed_data();
  ForRows(pool, tokens, from_stride, [=](int64_t t) {
    RotateToken(from + t * from_stride, cosines + t * shape.half, sines + t * shape.half, shape,
                to_queries + t * key_stride * shape.group, to_keys + t * key_stride,
                to_values + t * key_stride);
  });
  return ffi::Error::Success();
}

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rms_norm, RmsNorm);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rotate_heads, RotateHeads);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_swiglu, SwiGlu);
