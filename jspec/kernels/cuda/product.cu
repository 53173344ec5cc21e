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

// Operands: rows, weights, units, multipliers, norm, bias, residual. Result: the rows' products.
cudaError_t RunProduct(cudaStream_t stream, const Call& call) {
  Product product;
  Connect(product, call.operand(0), call.result(0));
  product.weights = call.operand(1).untyped_data();
  product.units = DataOf<float>(call.operand(2));
  product.multipliers = DataOf<int8_t>(call.operand(3));
  product.norm = FloatsOf(call.operand(4));
  product.bias = FloatsOf(call.operand(5));
  product.residual = DataOf<float>(call.operand(6));
  product.storage = Storage(call.attribute<int32_t>("storage"));
  product.activation = Activation(call.attribute<int32_t>("activation"));
  product.epsilon = call.attribute<float>("epsilon");
  product.scale = call.attribute<float>("scale");
  product.takes_bytes = call.attribute<bool>("takes_bytes");
  product.overlaps = call.attribute<bool>("overlaps");
  return LaunchProduct(stream, product);
}

}  // namespace
}  // namespace jspec

JSPEC_CUDA_HANDLER(jspec_cuda_product, "the product", jspec::RunProduct);
