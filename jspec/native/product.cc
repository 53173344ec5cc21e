// Products of rows with a kernel of floats. Decoding is bound by the bytes of the weights: each is
// read from memory once, in order, and serves all rows.

#include "multiply.h"

namespace {

using namespace jspec;

template <typename T>
void Multiply(ffi::ThreadPool& pool, const T* rows, const T* kernel, float* outputs,
              const ProductShape& shape) {
  ForTiles(pool, shape, kTile, [=](int64_t begin, int64_t end) {
    if (shape.rows > kMaxRows) return MultiplyTile(rows, kernel, outputs, shape, begin, end);
    MultiplyRows<kMaxRows, true>(shape.rows, rows, kernel, outputs, shape, begin, end);
  });
}

ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], kernel.dimensions()[0]};
  float* to = outputs->typed_data();
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  if (kernel.element_type() == ffi::F32) {
    Multiply(pool, static_cast<const float*>(rows.untyped_data()),
             static_cast<const float*>(kernel.untyped_data()), to, shape);
  } else {
    Multiply(pool, static_cast<const BFloat16*>(rows.untyped_data()),
             static_cast<const BFloat16*>(kernel.untyped_data()), to, shape);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

// Whether this processor multiplies bfloat16 numbers two by two: many rows are fast then, too.
extern "C" bool jspec_has_pairs() { return kHasPairs; }
