// Products of rows with a kernel of floats. Decoding is bound by the bytes of the weights, so each
// weight is read from memory once, in order, and serves all rows.

#include "tiles.h"

namespace {

using namespace jspec;

template <typename T>
void MultiplyEqual(ffi::ThreadPool& pool, const T* from, const T* weights, float* outputs,
                   const ProductShape& shape) {
  static thread_local Space<RowNumber<T>> space;
  const FloatKernel<T> kernel{weights, shape.inputs};
  const auto rows = Arrange<FloatKernel<T>>(from, shape, space);
  const int64_t count = shape.rows, stride = shape.outputs;
  ForTiles(pool, shape, kTile, [=](int64_t begin, int64_t end) {
    if (count > kMaxRows) return MultiplyTile(count, rows, kernel, outputs, stride, begin, end);
    MultiplyRows<kMaxRows, true>(count, rows, kernel, outputs, stride, begin, end);
  });
}

// Rounds the rows to the type of the weights, as XLA does, and multiplies.
void Multiply(ffi::ThreadPool& pool, const float* rows, const BFloat16* weights, float* outputs,
              const ProductShape& shape) {
#ifdef JSPEC_HAS_TILES
  if (HasTiles()) return MultiplyInTiles(pool, rows, weights, outputs, shape);
#endif
  static thread_local Space<BFloat16> space;
  const int64_t count = shape.rows * shape.inputs;
  BFloat16* rounded = space.Take(count);
  Convert(rows, count, rounded);
  MultiplyEqual(pool, rounded, weights, outputs, shape);
}

void Multiply(ffi::ThreadPool& pool, const float* rows, const float* weights, float* outputs,
              const ProductShape& shape) {
  MultiplyEqual(pool, rows, weights, outputs, shape);
}

ffi::Error Product(Threads pool, ffi::BufferR2<ffi::F32> rows, ffi::AnyBuffer kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], kernel.dimensions()[0]};
  const float* from = rows.typed_data();
  float* to = outputs->typed_data();
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  return WithNumbers(kernel, [&](auto* weights) { Multiply(pool, from, weights, to, shape); });
}

// The first sizes[0] rows times the first of the kernels, the next sizes[1] times the second, ...
ffi::Error GroupedProduct(Threads pool, ffi::BufferR2<ffi::F32> rows, ffi::AnyBuffer kernels,
                          ffi::BufferR1<ffi::S32> sizes,
                          ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const int64_t inputs = rows.dimensions()[1], width = kernels.dimensions()[1];
  const int64_t num_groups = kernels.dimensions()[0];
  int64_t left = rows.dimensions()[0];
  const float* from = rows.typed_data();
  float* to = outputs->typed_data();
  return WithNumbers(kernels, [&](auto* weights) {
    for (int64_t group = 0; group < num_groups; ++group, weights += width * inputs) {
      const int64_t count = std::min<int64_t>(left, sizes.typed_data()[group]);
      if (count <= 0) continue;
      Multiply(pool, from, weights, to, ProductShape{count, inputs, width});
      from += count * inputs, to += count * width, left -= count;
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_product, Product);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_grouped_product, GroupedProduct);

// Whether this processor multiplies pairs of bfloat16 numbers, which makes many rows fast, too.
extern "C" bool jspec_has_pairs() { return kHasPairs; }

// Whether it multiplies tiles of them, which makes each row cheaper the more rows there are.
extern "C" bool jspec_has_tiles() {
#ifdef JSPEC_HAS_TILES
  return HasTiles();
#else
  return false;
#endif
}
