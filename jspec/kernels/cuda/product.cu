// The product of few rows as a call of XLA's; see product.cuh.

#include "product.cuh"

#include "formats.cuh"
#include "xla/ffi/api/ffi.h"

namespace jspec {

template <class Format>
cudaError_t LaunchFormat(cudaStream_t stream, const Product& product);

cudaError_t LaunchProduct(cudaStream_t stream, const Product& product) {
  switch (product.storage) {
    case Storage::kBfloat16:
      return LaunchFormat<Bfloat16Format>(stream, product);
    case Storage::kInt8:
      return LaunchFormat<Int8Format>(stream, product);
    case Storage::kInt4:
      return LaunchFormat<Int4Format>(stream, product);
    case Storage::kQ40:
      return LaunchFormat<Q40Format>(stream, product);
    case Storage::kQ50:
      return LaunchFormat<Q50Format>(stream, product);
    case Storage::kQ80:
      return LaunchFormat<Q80Format>(stream, product);
    case Storage::kQ4K:
      return LaunchFormat<Q4KFormat>(stream, product);
    case Storage::kQ5K:
      return LaunchFormat<Q5KFormat>(stream, product);
    case Storage::kQ6K:
      return LaunchFormat<Q6KFormat>(stream, product);
  }
  return cudaErrorInvalidValue;
}

namespace {

namespace ffi = xla::ffi;

Floats FloatsOf(ffi::AnyBuffer buffer) {
  if (buffer.element_count() == 0) return {};
  return {buffer.untyped_data(), buffer.element_type() == ffi::BF16};
}

template <class T>
const T* PointerTo(ffi::AnyBuffer buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

// Arrays that are left out have no elements.
ffi::Error Run(cudaStream_t stream, ffi::AnyBuffer rows, ffi::AnyBuffer weights,
               ffi::AnyBuffer units, ffi::AnyBuffer multipliers, ffi::AnyBuffer norm,
               ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> result,
               int32_t storage, int32_t activation, float epsilon, float scale, bool takes_bytes,
               bool overlaps) {
  Product product;
  product.rows = FloatsOf(rows);
  product.weights = weights.untyped_data();
  product.storage = Storage(storage);
  product.units = PointerTo<float>(units);
  product.multipliers = PointerTo<int8_t>(multipliers);
  product.norm = FloatsOf(norm);
  product.epsilon = epsilon;
  product.takes_bytes = takes_bytes;
  product.bias = FloatsOf(bias);
  product.activation = Activation(activation);
  product.scale = scale;
  product.residual = PointerTo<float>(residual);
  product.result = result->untyped_data();
  product.has_bfloat16_result = result->element_type() == ffi::BF16;
  product.num_rows = rows.dimensions()[0];
  product.num_inputs = rows.dimensions()[1];
  product.num_outputs = result->dimensions()[1];
  product.overlaps = overlaps;
  const cudaError_t error = LaunchProduct(stream, product);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("the product: ") + cudaGetErrorString(error));
}

}  // namespace
}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_cuda_product, jspec::Run,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<bool>("takes_bytes")
                                  .Attr<bool>("overlaps"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
