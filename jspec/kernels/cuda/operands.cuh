// Operands of a handler as the kernels take them. Those that are left out have no elements.

#pragma once

#include "product.cuh"
#include "xla/ffi/api/ffi.h"

namespace jspec {

using Buffer = xla::ffi::AnyBuffer;

template <class T>
T* DataOf(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

inline Floats FloatsOf(const Buffer& buffer) {
  return {DataOf<void>(buffer), buffer.element_type() == xla::ffi::BF16};
}

inline xla::ffi::Error ErrorOf(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace jspec
