// The product of few rows with a kernel of any format that decoding meets.

#pragma once

#include "common.cuh"

namespace jspec {

// How a kernel [o i] is kept. The numbers are those of kernels/cuda_block.py.
enum class Storage {
  kBfloat16 = 0,  // [o i]
  kInt8 = 1,      // int8 [o i], units [o]
  kInt4 = 2,      // uint8 [o i/2], units [o], multipliers [o i/32]; see kernels/quantized.py
  kQ40 = 3,       // this and the next: strips of 16 outputs; see kernels/packed.py
  kQ50 = 4,
  kQ80 = 5,
  kQ4K = 6,
  kQ5K = 7,
  kQ6K = 8,
};

enum class Activation { kNone = 0, kSilu = 1, kGeluTanh = 2 };

// Numbers in either type; those that are left out have no data.
struct Floats {
  const void* data = nullptr;
  bool is_bfloat16 = false;
};

__device__ inline float LoadFloat(const Floats& numbers, int64_t place) {
  if (!numbers.is_bfloat16) return static_cast<const float*>(numbers.data)[place];
  return FloatOf(uint32_t(static_cast<const uint16_t*>(numbers.data)[place]) << 16);
}

// With p outputs and o = p of the kernel, or o = 2 p with an activation: the first p are gates, the
// second what they multiply.
struct Product {
  Floats rows;                          // [r i]
  const void* weights = nullptr;        // aligned to 16 bytes
  Storage storage = Storage::kBfloat16;
  const float* units = nullptr;         // [o], the scales of integers
  const int8_t* multipliers = nullptr;  // [o i/32], of 4-bit integers
  Floats norm;                          // [i]: the product takes the rows' RMSNorm times this
  float epsilon = 0;                    // of the norm
  bool takes_bytes = false;             // rows are rounded as `round_to_bytes` does
  Floats bias;                          // [o]
  Activation activation = Activation::kNone;
  float scale = 1;                      // of the result, before the residual is added
  const float* residual = nullptr;      // [r p]; it may be the result
  void* result = nullptr;               // [r p]
  bool has_bfloat16_result = false;
  int num_rows = 0;                     // r: any number; 16 of them are a tile that reads all weights
  int num_inputs = 0;                   // i: a multiple of 32, of a format's block, of 128 of int4
  int num_outputs = 0;                  // p: a multiple of 16
  bool overlaps = false;                // see Shape
};

// Starts result = residual + scale · activation(norm(rows) · kernelᵀ + bias) on a stream. The product
// is of bfloat16 rows, summed in float32 in an order that does not depend on the number of rows.
cudaError_t LaunchProduct(cudaStream_t stream, const Product& product);

}  // namespace jspec
