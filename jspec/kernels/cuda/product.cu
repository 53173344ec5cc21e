// The product of few rows as a call of XLA's; see product.cuh.

#include "formats.cuh"
#include "operands.cuh"

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

ffi::Error Run(cudaStream_t stream, Buffer rows, Buffer weights,
               Buffer units, Buffer multipliers, Buffer norm,
               Buffer bias, Buffer residual, ffi::Result<Buffer> result,
               int32_t storage, int32_t activation, float epsilon, float scale, bool takes_bytes,
               bool overlaps) {
  Product product;
  product.rows = FloatsOf(rows);
  product.weights = weights.untyped_data();
  product.storage = Storage(storage);
  product.units = DataOf<float>(units);
  product.multipliers = DataOf<int8_t>(multipliers);
  product.norm = FloatsOf(norm);
  product.epsilon = epsilon;
  product.takes_bytes = takes_bytes;
  product.bias = FloatsOf(bias);
  product.activation = Activation(activation);
  product.scale = scale;
  product.residual = DataOf<float>(residual);
  product.result = result->untyped_data();
  product.has_bfloat16_result = result->element_type() == ffi::BF16;
  product.num_rows = rows.dimensions()[0];
  product.num_inputs = rows.dimensions()[1];
  product.num_outputs = result->dimensions()[1];
  product.overlaps = overlaps;
  return ErrorOf(LaunchProduct(stream, product), "the product");
}

}  // namespace
}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_cuda_product, jspec::Run,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<bool>("takes_bytes")
                                  .Attr<bool>("overlaps"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
