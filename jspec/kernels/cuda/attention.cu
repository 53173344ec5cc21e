// Attention of a block of few tokens over one layer's cache, in two kernels: the slots are split
// over the blocks of the first, and the second adds the splits up.
//
//     slots    0 .. 63 | 64 .. 127 | 128 .. 191 | 192 .. 255 | 256 ..     tiles of 64
//     split    0       | 1         | 0          | 1          | 0          of two splits
//     warp     0 1 2 3   0 1 2 3     0 1 2 3      0 1 2 3      0 1 2 3    strips of 16 slots
//     holds    committed slots, and earlier ones of the block  | the block's, in one tile or two
//
// Each warp goes through its strips by an online softmax (arXiv 1805.02867). Keys and values come
// straight to the registers that tensor cores read: which slot and which dimension stands where in a
// product is free to choose, and is chosen so that each lane reads 16 bytes that lie together.
//
// Where a slot of the block lies, key and value come from the products (`qkv`) and not from the
// cache, into which one block writes them. So no block waits for another. And a query adds the slots
// in one order, whatever the number of tokens: what is masked adds nothing, not even a rounding. A
// token's result is the same in a decoding step and in a verify call.

#include "operands.cuh"

namespace jspec {
namespace {

constexpr int kStrip = 16, kStrips = 4, kTile = kStrip * kStrips;  // slots
constexpr int kQueries = 16;       // of a product on tensor cores
constexpr int kMostTokens = 16;    // of a row
constexpr float kMasked = -1e30f;  // finite: a query that sees nothing gives no NaN

// exp(x) for x <= 0.
__device__ float Exp(float x) { return exp2f(x * 1.44269504f); }

// How many tiles hold something that a query of the row may see.
__device__ int NumTiles(const AttentionCall& call, int start) {
  return (min(start + call.t, call.s) + kTile - 1) / kTile;
}

// The page of a slot, or without pages its row.
__device__ int PageOf(const AttentionCall& call, int row, int slot) {
  return call.table ? call.table[row * (call.s / call.page) + slot / call.page] : row;
}

// Where a slot's key or value begins; the slots of a strip follow each other.
__device__ size_t PlaceOf(const AttentionCall& call, int page, int head, int slot) {
  return ((size_t(page) * call.k + head) * call.page + slot % call.page) * call.h;
}

struct Head {
  const float* numbers;  // in qkv; null: there is none
  size_t angles;         // where those of its token begin
  Floats norm;
  float scale;
  uint16_t* result;
};

// Norms, rotates, scales and rounds a few heads, by a warp. All numbers are asked for before any is
// used, so that the warp waits for memory once.
template <int kPairs, int kHeads>
__device__ void Rotate(const AttentionCall& call, const Head (&heads)[kHeads]) {
  const int lane = threadIdx.x % kWarp, half = call.h / 2;
  float first[kHeads][kPairs], second[kHeads][kPairs], cos[kHeads][kPairs], sin[kHeads][kPairs];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = j * kWarp + lane;
      const bool is_there = heads[i].numbers && pair < half;
      first[i][j] = is_there ? heads[i].numbers[pair] : 0;
      second[i][j] = is_there ? heads[i].numbers[pair + half] : 0;
      cos[i][j] = is_there ? call.cos[heads[i].angles + pair] : 0;
      sin[i][j] = is_there ? call.sin[heads[i].angles + pair] : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const Head& head = heads[i];
    if (!head.numbers) continue;
    float factor = 1;
    if (head.norm.data) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        squares = fmaf(first[i][j], first[i][j], squares);
        squares = fmaf(second[i][j], second[i][j], squares);
      }
      factor = rsqrtf(SumOfWarp(squares) / call.h + call.epsilon);
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = j * kWarp + lane;
      if (pair >= half) continue;
      float x = first[i][j], y = second[i][j];
      if (head.norm.data) {
        x *= factor * LoadFloat(head.norm, pair);
        y *= factor * LoadFloat(head.norm, pair + half);
      }
      const float product = -y * sin[i][j], other = x * sin[i][j];
      head.result[pair] = ToBfloat16(fmaf(x, cos[i][j], product) * head.scale);
      head.result[pair + half] = ToBfloat16(fmaf(y, cos[i][j], other) * head.scale);
    }
  }
}

// Of a block's shared memory: bfloat16 rows for its queries, the keys and the values of the block's
// tokens, each with 16 bytes after it, so that rows lie in different banks; then floats, in which
// its warps hand over what they have mixed.
struct Memory {
  int tiles, h;

  JSPEC_BOTH int stride() const { return h + 8; }
  JSPEC_BOTH int rows() const { return tiles * kQueries + 2 * kMostTokens; }
  JSPEC_BOTH int floats() const { return tiles * kStrips * kQueries * (h + 2); }
  JSPEC_BOTH size_t bytes() const { return rows() * stride() * 2 + floats() * 4; }

  __device__ uint16_t* query(int i) const { return (uint16_t*)SharedMemory() + i * stride(); }
  __device__ uint16_t* key(int token) const { return query(tiles * kQueries + token); }
  __device__ uint16_t* value(int token) const { return key(kMostTokens + token); }
  __device__ float* mixed(int tile, int strip, int i) const {
    return (float*)query(rows()) + ((tile * kStrips + strip) * kQueries + i) * h;
  }
  __device__ float* sums(int tile, int strip, int i) const {
    return mixed(tiles, 0, 0) + ((tile * kStrips + strip) * kQueries + i) * 2;
  }
};

// Writes queries, and if the block's tokens stand in one of this split's tiles their keys and
// values, into shared memory.
template <int kHead>
__device__ void Stage(const AttentionCall& call, const Memory& memory, int first_query,
                      int num_queries, bool has_new) {
  const int row = blockIdx.z / call.k, head = blockIdx.z % call.k, parts = call.g + 2;
  const int num_heads = num_queries + (has_new ? call.t : 0), num_warps = blockDim.x / kWarp;
  constexpr int kAtOnce = kHead > 128 ? 2 : 4;
  const auto numbers_of = [&](int token, int part) {
    return call.qkv + (((size_t(row) * call.t + token) * call.k + head) * parts + part) * call.h;
  };
  for (int i = threadIdx.x / kWarp * kAtOnce; i < num_heads; i += num_warps * kAtOnce) {
    Head heads[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const bool is_query = i + j < num_queries;
      const int query = first_query + i + j;
      const int token = is_query ? query / call.g : i + j - num_queries;
      heads[j].numbers =
          i + j < num_heads ? numbers_of(token, is_query ? query % call.g : call.g) : nullptr;
      heads[j].angles = (size_t(row) * call.t + token) * (call.h / 2);
      heads[j].norm = is_query ? call.query_norm : call.key_norm;
      heads[j].scale = is_query ? call.scale : 1;
      heads[j].result = is_query ? memory.query(i + j) : memory.key(token);
    }
    Rotate<kHead / 64>(call, heads);
  }
  for (int i = threadIdx.x; has_new && i < call.t * call.h; i += blockDim.x) {
    const int token = i / call.h, dim = i % call.h;
    memory.value(token)[dim] = ToBfloat16(numbers_of(token, call.g + 1)[dim]);
  }
}

// Writes the block's keys and values into the cache, those in this split's tiles.
__device__ void WriteNew(const AttentionCall& call, const Memory& memory, int start) {
  const int row = blockIdx.z / call.k, head = blockIdx.z % call.k, vectors = call.h / 8;
  for (int i = threadIdx.x; i < call.t * vectors; i += blockDim.x) {
    const int token = i / vectors, dim = i % vectors * 8, slot = start + token;
    const bool is_own = slot / kTile % call.num_splits == int(blockIdx.x);
    if (!is_own || slot >= call.s) continue;
    const int page = PageOf(call, row, slot);
    if (call.table && page == 0) continue;  // nobody's
    const size_t place = PlaceOf(call, page, head, slot) + dim;
    *(uint4*)(call.keys + place) = *(const uint4*)(memory.key(token) + dim);
    *(uint4*)(call.values + place) = *(const uint4*)(memory.value(token) + dim);
  }
}

// What a warp's queries see of a strip.
struct View {
  int first_slot;
  size_t place;   // of that slot, in the cache
  uint32_t sees;  // with r = lane / 4, c = lane % 4: bits m and m + 4 say whether queries r and
                  // r + 8 see slot 4c + m
};

// What a warp holds of the strip at hand, and of all so far. A lane has
//   scores   of queries r and r + 8, slots 4c + (0, 1) and 4c + (2, 3)
//   keys     [i][j]: of slot 4 (r / 2) + r % 2 + 2i, dimensions 32j + 8c + (0 .. 7)
//   values   [i][m]: of slot 4c + m, dimensions 64i + 8r + (0 .. 7)
//   mixed    [i][j]: of queries r and r + 8, dimensions 64i + 16c + j + (0, 8)
template <int kHead>
struct Mixture {
  static constexpr int kParts = kHead > 128 ? 2 : 1;  // warps that share the values of a strip
  static constexpr int kKeys = kHead / 32, kValues = kHead / 64 / kParts;

  const AttentionCall& call;
  const Memory memory;
  const int row, head, start, first_query, lane, strip, tile, part;

  View view;
  uint32_t seen;  // bit i: whether some query of the tile sees slot i
  uint4 keys[2][kKeys], values[kValues][4];
  float mixed[kValues][8][4] = {}, most[2] = {kMasked, kMasked}, total[2] = {};

  __device__ Mixture(const AttentionCall& call, const Memory& memory, int start, int first_query)
      : call(call), memory(memory), row(blockIdx.z / call.k), head(blockIdx.z % call.k),
        start(start), first_query(first_query), lane(threadIdx.x % kWarp),
        strip(threadIdx.x / kWarp % kStrips),
        tile(kParts > 1 ? 0 : threadIdx.x / (kWarp * kStrips)),
        part(kParts > 1 ? threadIdx.x / (kWarp * kStrips) : 0) {}

  __device__ int KeySlot(int i) const { return lane / 8 * 4 + lane / 4 % 2 + i * 2; }
  __device__ int KeyDim(int j) const { return j * 32 + lane % 4 * 8; }
  __device__ int ValueSlot(int m) const { return lane % 4 * 4 + m; }
  __device__ int ValueDim(int i) const { return (part * kValues + i) * 64 + lane / 4 * 8; }

  // Asks what the queries see of a turn's strip.
  __device__ View Look(int turn) const {
    View next = {int((turn * call.num_splits + blockIdx.x) * kTile + strip * kStrip), 0, 0};
    if (next.first_slot < call.s) {
      next.place = PlaceOf(call, PageOf(call, row, next.first_slot), head, next.first_slot);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int query = first_query + tile * kQueries + lane / 4 + i / 4 * 8;
      const int slot = next.first_slot + ValueSlot(i % 4);
      if (query >= call.t * call.g || slot >= call.s) continue;
      const size_t token = size_t(row) * call.t + query / call.g;
      next.sees |= uint32_t(call.visible[token * call.s + slot] != 0) << i;
    }
    return next;
  }

  __device__ void Turn(const View& next) {
    view = next;
    // Slots after the block's are seen by no query, whatever it says.
    for (int m = 0; m < 4; ++m) {
      if (view.first_slot + ValueSlot(m) >= start + call.t) view.sees &= ~(0x11u << m);
    }
    seen = ((view.sees | view.sees >> 4) & 15) << ValueSlot(0);
    for (int bits = 1; bits < kWarp; bits *= 2) seen |= __shfl_xor_sync(kAllLanes, seen, bits);
  }

  // Reads keys from the cache, or the block's own from shared memory. What no query sees may be
  // anything, even NaN, and becomes zeros.
  template <bool kIsNew>
  __device__ void TakeKeys() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = KeySlot(i), token = view.first_slot + slot - start;
      const bool is_taken = seen >> slot & 1 && (token >= 0) == kIsNew;
      const uint16_t* key = kIsNew ? memory.key(token) : call.keys + view.place + slot * call.h;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (!kIsNew) keys[i][j] = make_uint4(0, 0, 0, 0);
        if (is_taken && KeyDim(j) < call.h) keys[i][j] = *(const uint4*)(key + KeyDim(j));
      }
    }
  }

  template <bool kIsNew>
  __device__ void TakeValues() {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int slot = ValueSlot(m), token = view.first_slot + slot - start;
      const bool is_taken = seen >> slot & 1 && (token >= 0) == kIsNew;
      const uint16_t* value =
          kIsNew ? memory.value(token) : call.values + view.place + slot * call.h;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (!kIsNew) values[i][m] = make_uint4(0, 0, 0, 0);
        if (is_taken && ValueDim(i) < call.h) values[i][m] = *(const uint4*)(value + ValueDim(i));
      }
    }
  }

  __device__ void Score(float (&scores)[2][4]) const {
    const uint16_t* queries = memory.query(tile * kQueries + lane / 4);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if (j * 32 >= call.h) break;
      const uint4 a = *(const uint4*)(queries + KeyDim(j));
      const uint4 b = *(const uint4*)(queries + 8 * memory.stride() + KeyDim(j));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        MultiplyAdd(scores[i], {a.x, b.x, a.y, b.y}, {keys[i][j].x, keys[i][j].y});
        MultiplyAdd(scores[i], {a.z, b.z, a.w, b.w}, {keys[i][j].z, keys[i][j].w});
      }
    }
  }

  // Makes scores probabilities, but for their total, and what is mixed so far comparable to them.
  __device__ void Soften(float (&scores)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = most[i];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float& score = scores[m / 2][i * 2 + m % 2];
        if (call.cap != 0) score = call.cap * tanhf(score / call.cap);
        if (view.sees >> (i * 4 + m) & 1) now = fmaxf(now, score);
      }
      for (int bits = 1; bits < 4; bits *= 2) {
        now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, bits));
      }
      const float factor = Exp(most[i] - now);
      most[i] = now;
      total[i] *= factor;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float& score = scores[m / 2][i * 2 + m % 2];
        score = view.sees >> (i * 4 + m) & 1 ? Exp(score - now) : 0;
        total[i] += score;
      }
#pragma unroll
      for (int j = 0; j < kValues * 8; ++j) {
        mixed[j / 8][j % 8][i * 2] *= factor;
        mixed[j / 8][j % 8][i * 2 + 1] *= factor;
      }
    }
  }

  __device__ void Mix(const float (&scores)[2][4]) {
    const uint32_t probs[4] = {
        ToPair(scores[0][0], scores[0][1]), ToPair(scores[0][2], scores[0][3]),
        ToPair(scores[1][0], scores[1][1]), ToPair(scores[1][2], scores[1][3])};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto pair = [&](int m) { return (&values[i][m].x)[j]; };
        const auto firsts = [&](int m) { return (pair(m) & 0xffffu) | pair(m + 1) << 16; };
        const auto seconds = [&](int m) { return pair(m) >> 16 | (pair(m + 1) & 0xffff0000u); };
        MultiplyAdd(mixed[i][j * 2], probs, {firsts(0), firsts(2)});
        MultiplyAdd(mixed[i][j * 2 + 1], probs, {seconds(0), seconds(2)});
      }
    }
  }

  // Hands over what the warp has mixed, in shared memory.
  __device__ void HandOver(int num_queries) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = total[i];
      for (int bits = 1; bits < 4; bits *= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
      const int query = lane / 4 + i * 8;
      if (tile * kQueries + query >= num_queries) continue;
      if (part == 0 && lane % 4 == 0) {
        memory.sums(tile, strip, query)[0] = most[i];
        memory.sums(tile, strip, query)[1] = sum;
      }
      float* result = memory.mixed(tile, strip, query);
#pragma unroll
      for (int j = 0; j < kValues * 4; ++j) {  // four dimensions each
        const int dim = (part * kValues + j / 4) * 64 + lane % 4 * 16 + j % 4 * 4;
        if (dim >= call.h) continue;
        const float(*own)[4] = &mixed[j / 4][j % 2 * 4];
        const int column = i * 2 + j % 4 / 2;
        *(float4*)(result + dim) =
            make_float4(own[0][column], own[1][column], own[2][column], own[3][column]);
      }
    }
  }
};

// Adds up what the warps of a block have mixed, strip by strip.
__device__ void AddStrips(const AttentionCall& call, const Memory& memory, int first_query,
                                 int num_queries) {
  const int vectors = call.h / 4;
  for (int i = threadIdx.x; i < num_queries * vectors; i += blockDim.x) {
    const int tile = i / vectors / kQueries, query = i / vectors % kQueries, dim = i % vectors * 4;
    float most = kMasked, total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int strip = 0; strip < kStrips; ++strip) {
      most = fmaxf(most, memory.sums(tile, strip, query)[0]);
    }
    for (int strip = 0; strip < kStrips; ++strip) {
      const float factor = Exp(memory.sums(tile, strip, query)[0] - most);
      const float4 own = *(const float4*)(memory.mixed(tile, strip, query) + dim);
      total = fmaf(factor, memory.sums(tile, strip, query)[1], total);
      sum.x = fmaf(factor, own.x, sum.x);
      sum.y = fmaf(factor, own.y, sum.y);
      sum.z = fmaf(factor, own.z, sum.z);
      sum.w = fmaf(factor, own.w, sum.w);
    }
    const size_t all = size_t(blockIdx.z) * call.t * call.g + first_query + i / vectors;
    const size_t place = all * call.num_splits + blockIdx.x;
    *(float4*)(call.parts + place * call.h + dim) = sum;
    if (dim == 0) call.sums[place] = make_float2(most, total);
  }
}

// A block for each split, each `tiles` tiles of queries, and each key head of each row.
template <int kHead>
__global__ void __launch_bounds__(256)
    AttendSplit(const __grid_constant__ AttentionCall call, int tiles) {
  const int split = blockIdx.x, start = call.start[blockIdx.z / call.k];
  const int first_query = blockIdx.y * tiles * kQueries;
  const int num_queries = min(tiles * kQueries, call.t * call.g - first_query);
  const int last = min(start + call.t, call.s) - 1, num_tiles = NumTiles(call, start);
  const Memory memory = {tiles, call.h};
  Mixture<kHead> mixture(call, memory, start, first_query);
  const View first = mixture.Look(0);  // does not wait for `start`
  if (split >= num_tiles) return;
  // The block's tokens lie in one tile or two.
  const bool has_new = start < call.s && (start / kTile % call.num_splits == split ||
                                          last / kTile % call.num_splits == split);
  mixture.Turn(first);
  mixture.template TakeKeys<false>();
  mixture.template TakeValues<false>();
  WaitForPrevious();  // the products are needed only now
  LetNextStart();
  Stage<kHead>(call, memory, first_query, num_queries, has_new);
  __syncthreads();
  if (has_new && blockIdx.y == 0) WriteNew(call, memory, start);
  for (int turn = 0; turn * call.num_splits + split < num_tiles; ++turn) {
    const View next = mixture.Look(turn + 1);
    float scores[2][4] = {};
    if (has_new) {
      mixture.template TakeKeys<true>();
      mixture.template TakeValues<true>();
    }
    mixture.Score(scores);
    mixture.Soften(scores);
    mixture.Turn(next);
    mixture.template TakeKeys<false>();  // the next ones, while the values are mixed
    mixture.Mix(scores);
    mixture.template TakeValues<false>();
  }
  mixture.HandOver(num_queries);
  __syncthreads();
  AddStrips(call, memory, first_query, num_queries);
}

// A block for each query of each key head of each row, a thread for each of its dimensions.
__global__ void __launch_bounds__(256) AddSplits(const __grid_constant__ AttentionCall call) {
  const int query = blockIdx.x, row = blockIdx.y / call.k, head = blockIdx.y % call.k;
  // What the others hold was never written.
  const int num_live = min(call.num_splits, NumTiles(call, call.start[row]));
  WaitForPrevious();
  LetNextStart();
  const size_t place = (size_t(blockIdx.y) * call.t * call.g + query) * call.num_splits;
  const float2* sums = call.sums + place;
  const float* parts = call.parts + place * call.h + threadIdx.x;
  float most = kMasked, total = 0, mixed = 0;
#pragma unroll 8
  for (int i = 0; i < num_live; ++i) most = fmaxf(most, sums[i].x);
#pragma unroll 8
  for (int i = 0; i < num_live; ++i) {
    const float factor = Exp(sums[i].x - most);
    total = fmaf(factor, sums[i].y, total);
    mixed = fmaf(factor, parts[size_t(i) * call.h], mixed);
  }
  const int token = query / call.g, own = head * call.g + query % call.g;
  const size_t all = (size_t(row) * call.t + token) * call.k * call.g + own;
  call.mixed[all * call.h + threadIdx.x] = ToBfloat16(mixed / fmaxf(total, 1e-30f));
}

template <int kHead>
cudaError_t LaunchSplit(const AttentionCall& call, bool overlaps, cudaStream_t stream) {
  const int all = (call.t * call.g + kQueries - 1) / kQueries;
  const int tiles = kHead > 128 ? 1 : std::min(all, 2);
  const unsigned threads = kWarp * kStrips * (kHead > 128 ? 2 : tiles);
  const dim3 grid(call.num_splits, (all + tiles - 1) / tiles, call.b * call.k);
  const Shape shape = {grid, dim3(threads), Memory{tiles, call.h}.bytes(), overlaps};
  return Launch(AttendSplit<kHead>, shape, stream, call, tiles);
}

}  // namespace

cudaError_t LaunchAttention(cudaStream_t stream, const AttentionCall& call, bool overlaps_before,
                            bool overlaps) {
  const auto launch = call.h <= 64    ? LaunchSplit<64>
                      : call.h <= 128 ? LaunchSplit<128>
                                      : LaunchSplit<256>;
  const cudaError_t error = launch(call, overlaps_before, stream);
  if (error != cudaSuccess) return error;
  const dim3 grid(call.t * call.g, call.b * call.k);
  return Launch(AddSplits, {grid, dim3(call.h), 0, overlaps}, stream, call);
}

namespace {

cudaError_t RunAttention(cudaStream_t stream, const Call& call) {
  AttentionCall attention = AttentionOf(call);
  attention.qkv = DataOf<float>(call.operand(2));
  return LaunchAttention(stream, attention, false, false);
}

}  // namespace
}  // namespace jspec

JSPEC_CUDA_HANDLER(jspec_cuda_attention, "the attention", jspec::RunAttention);
