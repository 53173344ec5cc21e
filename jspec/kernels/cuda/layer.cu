// A decoder block of few tokens in one call of XLA's: six kernels, whose results in between lie in
// memory that XLA lends. See kernels/cuda_block.py.
//
//     x ── norm · qkv ── attention: splits, their sum ── · out, + x ── norm · gate and up ── · down, +
//
// With `overlaps` each kernel but the first is on the GPU before the one before it has ended, and
// fetches weights, or keys and values, until it has. The first waits for whatever ran before the
// call, so what the others fetch early was written before that: the cache but for the block's slots.

#include "attention.cuh"

namespace jspec {
namespace {

namespace ffi = xla::ffi;
using Result = ffi::Result<Buffer>;

// The kernels of the four products; each has its weights, units, multipliers and bias.
struct Kernels {
  ffi::RemainingArgs buffers;
  ffi::Span<const int64_t> storages, takes_bytes;

  Product Of(int index) const {
    const auto buffer = [&](int part) { return *buffers.get<Buffer>(index * 4 + part); };
    Product product;
    product.weights = DataOf<void>(buffer(0));
    product.units = DataOf<float>(buffer(1));
    product.multipliers = DataOf<int8_t>(buffer(2));
    product.bias = FloatsOf(buffer(3));
    product.storage = Storage(storages[index]);
    product.takes_bytes = takes_bytes[index];
    return product;
  }
};

ffi::Error Layer(cudaStream_t stream, ffi::Span<const int64_t> storages,
                 ffi::Span<const int64_t> takes_bytes, int32_t activation, float epsilon,
                 float scale, float cap, float residual_scale, bool overlaps, Buffer, Buffer,
                 Buffer x, Buffer cos, Buffer sin, Buffer start, Buffer visible, Buffer table,
                 Buffer query_norm, Buffer key_norm, Buffer attention_norm, Buffer mlp_norm,
                 ffi::RemainingArgs buffers, Result keys, Result values, Result outputs, Result qkv,
                 Result mixed, Result parts, Result sums, Result middle, Result gated) {
  const Kernels kernels = {buffers, storages, takes_bytes};
  const int num_rows = x.dimensions()[0];
  cudaError_t error = cudaSuccess;
  // Each product goes from rows to a result, both matrices.
  const auto multiply = [&](int index, const Buffer& rows, Result& result, Product product) {
    product.rows = FloatsOf(rows);
    product.result = result->untyped_data();
    product.has_bfloat16_result = result->element_type() == ffi::BF16;
    product.num_rows = num_rows;
    product.num_inputs = rows.dimensions()[1];
    product.num_outputs = result->dimensions()[1];
    product.overlaps = overlaps && index > 0;
    if (error == cudaSuccess) error = LaunchProduct(stream, product);
  };
  const auto normed = [&](int index, const Buffer& norm) {
    Product product = kernels.Of(index);
    product.norm = FloatsOf(norm);
    product.epsilon = epsilon;
    return product;
  };
  const auto added = [&](int index, const Buffer& residual) {
    Product product = kernels.Of(index);
    product.scale = residual_scale;
    product.residual = DataOf<float>(residual);
    return product;
  };

  multiply(0, x, qkv, normed(0, attention_norm));
  AttentionCall call = CallOf(
      {*keys, *values, cos, sin, start, visible, table, query_norm, key_norm, *parts, *sums});
  call.epsilon = epsilon;
  call.scale = scale;
  call.cap = cap;
  call.qkv = DataOf<float>(*qkv);
  call.mixed = DataOf<uint16_t>(*mixed);
  if (error == cudaSuccess) error = LaunchAttention(stream, call, overlaps, overlaps);
  multiply(1, *mixed, middle, added(1, x));
  Product gate = normed(2, mlp_norm);
  gate.activation = Activation(activation);
  multiply(2, *middle, gated, gate);
  multiply(3, *gated, outputs, added(3, *middle));
  return ErrorOf(error, "the layer");
}

}  // namespace
}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_cuda_layer, jspec::Layer,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<xla::ffi::Span<const int64_t>>("storages")
                                  .Attr<xla::ffi::Span<const int64_t>>("takes_bytes")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<float>("residual_scale")
                                  .Attr<bool>("overlaps")
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .Arg<jspec::Buffer>()
                                  .RemainingArgs()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>()
                                  .Ret<jspec::Buffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
