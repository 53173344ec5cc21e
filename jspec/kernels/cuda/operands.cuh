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

// Sizes are b rows, t tokens, k key heads with g query heads each, h numbers of a head, s slots.
struct AttentionCall {
  int b, t, k, g, h, s, num_splits;
  const float* qkv;             // [b t k g+2 h]
  const float *cos, *sin;       // [b t h/2]
  const int* start;             // [b], the block's first slot
  const uint8_t* visible;       // [b t s]
  Floats query_norm, key_norm;  // [h]
  float epsilon, scale, cap;    // no cap: 0
  const int* table;             // [b s/page], or null
  int page;                     // slots of a page, a multiple of 16; without pages s
  uint16_t *keys, *values;      // bfloat16 [b k s h], or [pages k page h]
  float* parts;                 // [b k t*g splits h], not yet divided by their totals
  float2* sums;                 // [b k t*g splits], the largest score and the total of a part
  uint16_t* mixed;              // bfloat16 [b t k*g h]
};

// Launches two kernels. They may overlap with the kernel before them, which writes qkv, and with each
// other; see Shape.
cudaError_t LaunchAttention(cudaStream_t stream, const AttentionCall& call, bool overlaps_before,
                            bool overlaps);

// Operands: keys, values, qkv, cos, sin, start, visible, table, query norm, key norm. Results: keys
// and values, in the operands' memory, mixed, parts, sums. A layer has these and others after them.
// `qkv` is not set: a layer's are no operand.
inline AttentionCall AttentionOf(const Call& call) {
  const auto sizes = call.result(3).dimensions();
  AttentionCall attention = {};
  attention.b = sizes[0];
  attention.t = call.operand(3).dimensions()[1];
  attention.k = sizes[1];
  attention.g = sizes[2] / attention.t;
  attention.h = sizes[4];
  attention.s = call.operand(6).dimensions()[2];
  attention.num_splits = sizes[3];
  attention.cos = DataOf<float>(call.operand(3));
  attention.sin = DataOf<float>(call.operand(4));
  attention.start = DataOf<int>(call.operand(5));
  attention.visible = DataOf<uint8_t>(call.operand(6));
  attention.query_norm = FloatsOf(call.operand(8));
  attention.key_norm = FloatsOf(call.operand(9));
  attention.epsilon = call.attribute<float>("epsilon");
  attention.scale = call.attribute<float>("scale");
  attention.cap = call.attribute<float>("cap");
  attention.table = DataOf<int>(call.operand(7));
  attention.page = call.result(0).dimensions()[2];
  attention.keys = DataOf<uint16_t>(call.result(0));
  attention.values = DataOf<uint16_t>(call.result(1));
  attention.mixed = DataOf<uint16_t>(call.result(2));
  attention.parts = DataOf<float>(call.result(3));
  attention.sums = DataOf<float2>(call.result(4));
  return attention;
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
