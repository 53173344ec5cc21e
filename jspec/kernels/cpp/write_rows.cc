// Writes a block [b t k h] into a layer of a cache [b k s h], in the layer's type and in place,
// each row from its own slot on. What falls past the last slot is lost, never shifted onto a good
// one.

#include "lanes.h"

namespace {

using namespace jspec;

struct Shape {
  int64_t batch, heads, slots, dims, tokens;
};

template <typename T>
void Write(const float* block, const int32_t* starts, const Shape& shape, T* layer) {
  for (int64_t row = 0; row < shape.batch; ++row) {
    const int64_t first = starts[row];
    if (first < 0) continue;
    const int64_t count = shape.tokens < shape.slots - first ? shape.tokens : shape.slots - first;
    for (int64_t token = 0; token < count; ++token) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const int64_t from = (row * shape.tokens + token) * shape.heads + head;
        const int64_t to = (row * shape.heads + head) * shape.slots + first + token;
        Convert(block + from * shape.dims, shape.dims, layer + to * shape.dims);
      }
    }
  }
}

ffi::Error WriteRows(ffi::AnyBuffer layer, ffi::BufferR4<ffi::F32> block,
                     ffi::BufferR1<ffi::S32> start, ffi::Result<ffi::AnyBuffer> outputs) {
  const auto size = layer.dimensions();
  const Shape shape{size[0], size[1], size[2], size[3], block.dimensions()[1]};
  void* to = outputs->untyped_data();
  // XLA passes the same buffer as operand and result, unless the old layer is needed elsewhere.
  if (to != layer.untyped_data()) std::memcpy(to, layer.untyped_data(), layer.size_bytes());
  return WithNumbers(*outputs, [&](auto* numbers) {
    Write(block.typed_data(), start.typed_data(), shape, numbers);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_write_rows, WriteRows);
