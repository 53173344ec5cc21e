// The product in the emulator, and its formats decoded by themselves.

#include "handlers.h"
#include "multiply_blocks.cu"
#include "multiply_large_blocks.cu"
#include "multiply_numbers.cu"
#include "product.cu"

JSPEC_EMULATED(jspec_cuda_product)

namespace {

// Writes the weights of a tile, [16 i], as the lanes of a warp decode them.
template <class Format>
void Decode(const jspec::Weights& weights, float* result) {
  const int num_inputs = weights.num_inputs;
  const int steps = (num_inputs + Format::kStep - 1) / Format::kStep;
  for (int step = 0; step < steps; ++step) {
    for (int lane_index = 0; lane_index < jspec::kWarp; ++lane_index) {
      const jspec::Lane lane = {lane_index / 4, lane_index % 4};
      typename Format::Raw raw;
      Format::Load(weights, 0, step, lane, raw);
      for (int k = 0; k < Format::kStep; ++k) {
        const int order = Format::Order(k), input = step * Format::kStep + k;
        if (order / 8 % 4 != lane.t || input >= num_inputs) continue;
        const jspec::Place at = {step, order / jspec::kGroup, lane};
        jspec::Pieces pairs;
        Format::Pairs(raw, at, pairs);
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = pairs[i][order % 8 / 2];
          float weight = order % 2 ? jspec::SecondOf(pair) : jspec::FirstOf(pair);
          if constexpr (Format::kHasFactors) {
            const jspec::Factor factors = Format::Factors(raw, at, order % 8 / 4);
            weight *= factors.factor[i];
            if (Format::kHasMinimum) weight -= factors.minimum[i];
          }
          result[(2 * lane.g + i) * num_inputs + input] = weight;
        }
      }
    }
  }
}

}  // namespace

extern "C" void check_decode(int storage, const uint8_t* values, const int8_t* multipliers,
                             int num_inputs, float* result) {
  void (*decoders[])(const jspec::Weights&, float*) = {
      Decode<jspec::Bfloat16Format>, Decode<jspec::Int8Format>, Decode<jspec::Int4Format>,
      Decode<jspec::Q40Format>,      Decode<jspec::Q50Format>,  Decode<jspec::Q80Format>,
      Decode<jspec::Q4KFormat>,      Decode<jspec::Q5KFormat>,  Decode<jspec::Q6KFormat>};
  decoders[storage]({values, multipliers, num_inputs}, result);
}
