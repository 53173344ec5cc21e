// The product of few rows as a call of XLA's; see product.cuh.

#include <iterator>

#include "formats.cuh"
#include "operands.cuh"

namespace jspec {

template <class Format>
cudaError_t LaunchFormat(cudaStream_t stream, const Product& product);

cudaError_t LaunchProduct(cudaStream_t stream, const Product& product) {
  constexpr decltype(&LaunchFormat<Bfloat16Format>) kLaunches[] = {  // in the order of Storage
      LaunchFormat<Bfloat16Format>, LaunchFormat<Int8Format>, LaunchFormat<Int4Format>,
      LaunchFormat<Q40Format>,      LaunchFormat<Q50Format>,  LaunchFormat<Q80Format>,
      LaunchFormat<Q4KFormat>,      LaunchFormat<Q5KFormat>,  LaunchFormat<Q6KFormat>};
  const size_t index = size_t(product.storage);
  return index < std::size(kLaunches) ? kLaunches[index](stream, product) : cudaErrorInvalidValue;
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
