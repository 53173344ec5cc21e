// Handlers of XLA whose kernels run in the emulator, on a CPU: they take no stream, and what they do
// not write is NaN.

#pragma once

#include "emulation.h"
#include "xla/ffi/api/ffi.h"

template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};

namespace jspec::emulation {

inline size_t BytesOf(const XLA_FFI_Buffer* buffer) {
  size_t bytes = xla::ffi::ByteWidth(xla::ffi::DataType(buffer->dtype));
  for (int64_t axis = 0; axis < buffer->rank; ++axis) bytes *= buffer->dims[axis];
  return bytes;
}

// Fills the results with ones, which are NaN as floats, but those that lie in an operand's memory.
inline void Poison(const XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    const auto* result = static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    bool is_in_place = false;
    for (int64_t j = 0; j < frame->args.size; ++j) {
      is_in_place |= static_cast<const XLA_FFI_Buffer*>(frame->args.args[j])->data == result->data;
    }
    if (!is_in_place) std::memset(result->data, 0xff, BytesOf(result));
  }
}

}  // namespace jspec::emulation

// Defines emulated_NAME, the handler NAME with poisoned results.
#define JSPEC_EMULATED(name)                                            \
  extern "C" XLA_FFI_Error* emulated_##name(XLA_FFI_CallFrame* frame) { \
    jspec::emulation::Poison(frame);                                    \
    return name(frame);                                                 \
  }

extern "C" inline __attribute__((used)) void jspec_set_order(unsigned order) {
  jspec::emulation::order = order;
}

extern "C" inline __attribute__((used)) void jspec_set_processors(int number) {
  num_processors = number;
}
