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

// Operands of an attention but for qkv; keys and values are results, in the operands' memory.
struct AttentionBuffers {
  Buffer keys, values, cos, sin, start, visible, table, query_norm, key_norm, parts, sums;
};

inline AttentionCall CallOf(const AttentionBuffers& buffers) {
  const auto sizes = buffers.parts.dimensions();
  AttentionCall call = {};
  call.b = sizes[0];
  call.t = buffers.cos.dimensions()[1];
  call.k = sizes[1];
  call.g = sizes[2] / call.t;
  call.h = sizes[4];
  call.s = buffers.visible.dimensions()[2];
  call.num_splits = sizes[3];
  call.cos = DataOf<float>(buffers.cos);
  call.sin = DataOf<float>(buffers.sin);
  call.start = DataOf<int>(buffers.start);
  call.visible = DataOf<uint8_t>(buffers.visible);
  call.query_norm = FloatsOf(buffers.query_norm);
  call.key_norm = FloatsOf(buffers.key_norm);
  call.table = DataOf<int>(buffers.table);
  call.page = buffers.keys.dimensions()[2];
  call.keys = DataOf<uint16_t>(buffers.keys);
  call.values = DataOf<uint16_t>(buffers.values);
  call.parts = DataOf<float>(buffers.parts);
  call.sums = DataOf<float2>(buffers.sums);
  return call;
}

}  // namespace jspec
