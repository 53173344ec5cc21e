// A decoder block of few tokens in one call of XLA's: six kernels, whose results in between lie in
// memory that XLA lends. See kernels/cuda_block.py.
//
//     x ── norm · qkv ── attention: splits, their sum ── · out, + x ── norm · gate and up ── · down, +
//
// With `overlaps` each kernel but the first is on the GPU before the one before it has ended, and
// fetches weights, or keys and values, until it has. The first waits for whatever ran before the
// call, so what the others fetch early was written before that: the cache but for the block's slots.

#include "operands.cuh"

namespace jspec {
namespace {

// Returns one of the layer's four products, with weights, units, multipliers and bias.
Product ProductOf(const Call& call, int index) {
  const auto buffer = [&](int part) { return call.operand(12 + index * 4 + part); };
  Product product;
  product.weights = DataOf<void>(buffer(0));
  product.units = DataOf<float>(buffer(1));
  product.multipliers = DataOf<int8_t>(buffer(2));
  product.bias = FloatsOf(buffer(3));
  product.storage = Storage(call.attribute<ffi::Span<const int64_t>>("storages")[index]);
  product.takes_bytes = call.attribute<ffi::Span<const int64_t>>("takes_bytes")[index];
  product.overlaps = call.attribute<bool>("overlaps") && index > 0;
  return product;
}

// Operands: those of attention, of which the third is the stream x; the norms before attention and
// before the feed-forward layer; those of the products. Results: those of attention; queries, keys
// and values; the stream in the middle; gated; the stream.
cudaError_t RunLayer(cudaStream_t stream, const Call& call) {
  const Buffer x = call.operand(2), mixed = call.result(2), qkv = call.result(5);
  const Buffer middle = call.result(6), gated = call.result(7), outputs = call.result(8);
  AttentionCall attention = AttentionOf(call);
  attention.qkv = DataOf<float>(qkv);
  const bool overlaps = call.attribute<bool>("overlaps");
  cudaError_t error = cudaSuccess;
  const auto multiply = [&](const Buffer& rows, const Buffer& result, Product product) {
    Connect(product, rows, result);
    if (error == cudaSuccess) error = LaunchProduct(stream, product);
  };
  const auto normed = [&](int index, const Buffer& norm) {
    Product product = ProductOf(call, index);
    product.norm = FloatsOf(norm);
    product.epsilon = attention.epsilon;
    return product;
  };
  const auto added = [&](int index, const Buffer& residual) {
    Product product = ProductOf(call, index);
    product.scale = call.attribute<float>("residual_scale");
    product.residual = DataOf<float>(residual);
    return product;
  };

  multiply(x, qkv, normed(0, call.operand(10)));
  if (error == cudaSuccess) error = LaunchAttention(stream, attention, overlaps, overlaps);
  multiply(mixed, middle, added(1, x));
  Product gate = normed(2, call.operand(11));
  gate.activation = Activation(call.attribute<int32_t>("activation"));
  multiply(middle, gated, gate);
  multiply(gated, outputs, added(3, middle));
  return error;
}

}  // namespace
}  // namespace jspec

JSPEC_CUDA_HANDLER(jspec_cuda_layer, "the layer", jspec::RunLayer);
