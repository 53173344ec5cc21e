// The product in the emulator, and its formats decoded by themselves.

#include "handlers.h"
#include "multiply_blocks.cu"
#include "multiply_large_blocks.cu"
#include "multiply_numbers.cu"
#include "multiply_q6_k.cu"
#include "product.cu"

JSPEC_EMULATED(jspec_cuda_product)

namespace {

// Loads a field as it is.
struct LoadField {
  template <class Field>
  void operator()(Field& field, const void* address, bool is_there) const {
    field = is_there ? *static_cast<const Field*>(address) : Field{};
  }
  template <class Field>
  void Take(Field& field, const uint4&, const uint8_t* header, int byte) const {
    field = *reinterpret_cast<const Field*>(header + byte);
  }
};

// Decodes the eight inputs of a lane's piece, of its two outputs.
template <class Format>
void DecodePiece(const typename Format::Raw& raw, const jspec::Place& at, int num_inputs,
                 float* result) {
  jspec::Pieces pairs;
  Format::Pairs(raw, at, pairs);
  for (int place = 0; place < 16; ++place) {
    const int output = place / 8, half = place / 4 % 2, i = place % 4;
    const int first = Format::First(at.piece, at.lane.t, half);
    const int input = at.step * Format::kStep + first + i;
    if (input >= num_inputs) continue;
    const uint32_t pair = pairs[output][2 * half + (Format::kSpread ? i % 2 : i / 2)];
    const bool is_second = Format::kSpread ? i / 2 : i % 2;
    float weight = is_second ? jspec::SecondOf(pair) : jspec::FirstOf(pair);
    if constexpr (Format::kHasFactors) {
      const jspec::Factor factors = Format::Factors(raw, at, half);
      weight *= factors.factor[output];
      if (Format::kHasMinimum) weight -= factors.minimum[output];
    }
    result[(2 * at.lane.g + output) * num_inputs + input] = weight;
  }
}

// Writes the weights of a tile, [16 i], as the lanes of a warp decode them.
template <class Format>
void Decode(const jspec::Weights& weights, float* result) {
  const int num_inputs = weights.num_inputs;
  const int steps = (num_inputs + Format::kStep - 1) / Format::kStep;
  for (int step = 0; step < steps; ++step) {
    for (int lane_index = 0; lane_index < jspec::kWarp; ++lane_index) {
      const jspec::Lane lane = {lane_index / 4, lane_index % 4};
      typename Format::Raw raw;
      if (step * Format::kStep + Format::First(0, lane.t, 0) >= num_inputs) continue;
      Format::Load(jspec::From<Format>(weights, 0, step), step, lane, raw, LoadField());
      for (int piece = 0; piece < Format::kStep / jspec::kGroup; ++piece) {
        DecodePiece<Format>(raw, {step, piece, lane}, num_inputs, result);
      }
    }
  }
}

template <class... Formats>
int MostSharedBytes() {
  return std::max({jspec::Block<Formats, 1, 2, 1>::kSharedBytes...});
}

}  // namespace

extern "C" int check_shared_bytes() {
  using namespace jspec;
  return MostSharedBytes<Bfloat16Format, Int8Format, Int4Format, Q40Format, Q50Format, Q80Format,
                         Q4KFormat, Q5KFormat, Q6KFormat>();
}

extern "C" void check_decode(int storage, const uint8_t* values, const int8_t* multipliers,
                             int num_inputs, float* result) {
  void (*decoders[])(const jspec::Weights&, float*) = {
      Decode<jspec::Bfloat16Format>, Decode<jspec::Int8Format>, Decode<jspec::Int4Format>,
      Decode<jspec::Q40Format>,      Decode<jspec::Q50Format>,  Decode<jspec::Q80Format>,
      Decode<jspec::Q4KFormat>,      Decode<jspec::Q5KFormat>,  Decode<jspec::Q6KFormat>};
  decoders[storage]({values, multipliers, num_inputs}, result);
}
