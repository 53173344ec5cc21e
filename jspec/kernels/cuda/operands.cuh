// What XLA hands over to the kernels. Buffers that are left out have no elements.

#pragma once

#include "product.cuh"
#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;
using Buffer = ffi::AnyBuffer;

template <class T>
T* DataOf(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

inline Floats FloatsOf(const Buffer& buffer) {
  return {DataOf<void>(buffer), buffer.element_type() == ffi::BF16};
}

// A call of a handler: its operands and results in order, and its attributes by name.
struct Call {
  ffi::Dictionary attributes;
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;

  Buffer operand(int index) const { return operands.get<Buffer>(index).value(); }
  Buffer result(int index) const { return *results.get<Buffer>(index).value(); }
  template <class T>
  T attribute(const char* name) const {
    return attributes.get<T>(name).value();
  }
};

// Sets what goes into a product, and what comes out of it: both are matrices.
inline void Connect(Product& product, const Buffer& rows, const Buffer& result) {
  product.rows = FloatsOf(rows);
  product.result = result.untyped_data();
  product.has_bfloat16_result = result.element_type() == ffi::BF16;
  product.num_rows = rows.dimensions()[0];
  product.num_inputs = rows.dimensions()[1];
  product.num_outputs = result.dimensions()[1];
}

inline ffi::Error ErrorOf(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace jspec

// Defines a handler of XLA's, which may be a part of a CUDA graph. It runs function(stream, call),
// which returns a cudaError_t; `what` is computed, as an error names it.
#define JSPEC_CUDA_HANDLER(name, what, function)                                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                           \
      name,                                                                                \
      [](cudaStream_t stream, xla::ffi::Dictionary attributes,                             \
         xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results) {              \
        return jspec::ErrorOf(function(stream, jspec::Call{attributes, operands, results}), \
                              what);                                                       \
      },                                                                                   \
      xla::ffi::Ffi::Bind()                                                                \
          .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()                                   \
          .Attrs()                                                                         \
          .RemainingArgs()                                                                 \
          .RemainingRets(),                                                                \
      {xla::ffi::Traits::kCmdBufferCompatible})
