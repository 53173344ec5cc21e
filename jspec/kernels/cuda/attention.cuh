// Attention of a block of few tokens over one layer's cache; see attention.cu.

#pragma once

#include "operands.cuh"

namespace jspec {

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

}  // namespace jspec
