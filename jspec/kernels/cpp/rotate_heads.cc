// Splits a layer's query, key and value heads, and rotates queries and keys by their positions. XLA
// on CPU would compute the cosines and sines anew for every head of every layer.

#include <cmath>

#include "lanes.h"

namespace {

using namespace jspec;

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rotate_heads, RotateHeads);
