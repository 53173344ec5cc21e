// The kernel of the product of few rows: weights are the left operand of the tensor cores, 16 outputs
// by 16 inputs, and the rows, 8 or 16 of them, are the right one.
//
// A block computes kTiles tiles of 16 outputs, one unit after another. Its 8 warps share a unit's
// inputs: warp w takes steps w, w + 8 ..., and their sums are added in one order. Where there are few
// units, the blocks of a cluster share the inputs in the same way, each a slice of them. So a row's
// result depends on no other row, nor on how many there are.
//
//     inputs          block 0 of the cluster | block 1 ...
//     steps           w0 w1 ... w7 w0 w1 ... |
//     shared memory   kDepth steps of each lane's weights, under way while others are multiplied
//
// A lane copies the weights that it multiplies, and no other but for a part of the header of a large
// block, which the lanes of a warp share: so no warp waits for another one's copies. They are under
// way from one unit to the next, and before the kernel before has ended. The rows come to registers, a
// piece ahead. The factor of their norm, one of each row, is multiplied at the end.

#pragma once

#include "formats.cuh"
#include "product.cuh"

namespace jspec {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRowTile = 16;  // rows of a block
constexpr int kGroup = 32;    // inputs of a piece, which are rounded to bytes together
constexpr int kBlocks = 2;    // of a multiprocessor, at most

// Four numbers as they lie in memory, and as floats.
struct Four {
  uint4 bits;

  __device__ void Load(const Floats& numbers, int64_t place) {
    if (!numbers.is_bfloat16) {
      bits = *reinterpret_cast<const uint4*>(static_cast<const float*>(numbers.data) + place);
    } else {
      const uint16_t* first = static_cast<const uint16_t*>(numbers.data) + place;
      const uint2 pairs = *reinterpret_cast<const uint2*>(first);
      bits.x = pairs.x, bits.y = pairs.y;
    }
  }

  __device__ void ToFloats(bool is_bfloat16, float* numbers) const {
    if (is_bfloat16) {
      numbers[0] = FirstOf(bits.x), numbers[1] = SecondOf(bits.x);
      numbers[2] = FirstOf(bits.y), numbers[3] = SecondOf(bits.y);
    } else {
      numbers[0] = FloatOf(bits.x), numbers[1] = FloatOf(bits.y);
      numbers[2] = FloatOf(bits.z), numbers[3] = FloatOf(bits.w);
    }
  }
};

__device__ inline float Activate(float gate, Activation activation) {
  if (activation == Activation::kSilu) return gate / (1 + expf(-gate));
  // The tanh approximation of gelu (arXiv 1606.08415): (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
  const float cubic = fmaf(0.044715f * gate * gate, gate, gate);
  return gate / (1 + expf(-1.5957691216f * cubic));
}

// Where the fields of a lane's weights of a tile lie in shared memory, as CopyFields fills and
// ReadFields reads them. A field of all lanes lies together.
template <class Raw>
struct Fields {
  Raw& raw;
  unsigned char* place;
  int lane;

  template <class Field>
  __device__ unsigned char* PlaceOf(const Field& field) const {
    const auto offset = reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&raw);
    return place + kWarp * offset + lane * sizeof(Field);
  }
};

template <class Raw>
struct CopyFields : Fields<Raw> {
  bool is_there;

  template <class Field>
  __device__ void operator()(Field& field, const void* address, bool is_input) const {
    CopyAsync<sizeof(Field)>(this->PlaceOf(field), address, is_there && is_input);
  }
  template <class Field>
  __device__ void Take(Field&, const uint4&, const void*, int) const {}  // comes with the header
};

template <class Raw>
struct ReadFields : Fields<Raw> {
  template <class Field>
  __device__ void operator()(Field& field, const void*, bool) const {
    field = *reinterpret_cast<const Field*>(this->PlaceOf(field));
  }
  template <class Field>
  __device__ void Take(Field& field, const uint4& header, const void*, int byte) const {
    const unsigned char* first = this->PlaceOf(header) - this->lane * sizeof(header);
    field = *reinterpret_cast<const Field*>(first + byte);
  }
};

// What the functions of a block share. kParts is 2 where half of the tiles are gates.
template <class Format, int kParts, int kFragments, int kCluster>
struct Block {
  using Raw = typename Format::Raw;
  static constexpr int kTiles = Format::kTiles, kDepth = Format::kDepth;
  static constexpr int kPieces = Format::kStep / kGroup, kColumns = 8 * kFragments;
  static constexpr int kOwnTiles = kTiles / kParts, kOutputs = kOwnTiles * kTile;  // of a unit
  // Bytes of shared memory: of a tile's step, of the copies under way, of the warps' sums, of the
  // block's sums and of the rows' squares.
  static constexpr int kTileBytes = kWarp * Format::kRawBytes;
  static constexpr int kCopies = kWarps * kDepth * kTiles * kTileBytes;
  static constexpr int kPartial = kWarps / 2 * kTiles * kFragments * kWarp * 16;
  static constexpr int kSums = kTiles * kTile * kColumns * 4;
  static constexpr int kSquares = kWarps * kColumns * 4;
  static constexpr int kSharedBytes = kCopies + kPartial + kSums + kSquares + kColumns * 4;

  const Product& product;
  const int warp, lane_index;
  const Lane lane;
  const int first_row, num_rows, num_tiles, first_step, num_steps, end_step;
  const Weights weights;
  unsigned char* const copies;
  float4* const partial;
  float* const sums;
  float* const squares;
  float* const block_squares;

  __device__ explicit Block(const Product& product)
      : product(product),
        warp(threadIdx.x / kWarp),
        lane_index(threadIdx.x % kWarp),
        lane{lane_index / 4, lane_index % 4},
        first_row(blockIdx.y * kRowTile),
        num_rows(min(kRowTile, product.num_rows - first_row)),
        num_tiles(product.num_outputs / kTile),
        first_step(int(blockIdx.x) % kCluster * StepsOfBlock(product.num_inputs)),
        num_steps((StepsOfBlock(product.num_inputs) + kWarps - 1) / kWarps),
        end_step(min(first_step + StepsOfBlock(product.num_inputs), AllSteps(product.num_inputs))),
        weights{static_cast<const uint8_t*>(product.weights), product.multipliers,
                product.num_inputs},
        copies(SharedMemory()),
        partial(reinterpret_cast<float4*>(copies + kCopies)),
        sums(reinterpret_cast<float*>(copies + kCopies + kPartial)),
        squares(sums + kSums / 4),
        block_squares(squares + kSquares / 4) {}

  JSPEC_BOTH static int UnitsOf(int num_outputs) {
    return (num_outputs / kTile + kOwnTiles - 1) / kOwnTiles;
  }

  JSPEC_BOTH static int AllSteps(int num_inputs) {
    return (num_inputs + Format::kStep - 1) / Format::kStep;
  }

  // Steps of a block's slice of the inputs.
  JSPEC_BOTH static int StepsOfBlock(int num_inputs) {
    return (AllSteps(num_inputs) + kCluster - 1) / kCluster;
  }

  __device__ int StepOf(int turn) const { return first_step + turn * kWarps + warp; }

  __device__ unsigned char* PlaceOf(int slot, int i) const {
    return copies + ((warp * kDepth + slot) * kTiles + i) * kTileBytes;
  }

  // What is copied next: a turn of a unit, in which each warp takes a step of every tile.
  struct Source {
    int unit, turn;
    Weights first;  // of the unit's tiles
  };

  __device__ void BeginUnit(Source& source, int unit) const {
    source.unit = unit, source.turn = 0;
    source.first = From<Format>(weights, unit * kOwnTiles, StepOf(0));
  }

  // Starts to copy this lane's weights of a turn to a slot, and of the turn after it next time. Zeros
  // are copied of what is not there.
  __device__ void Copy(Source& source, int slot) const {
    const int step = StepOf(source.turn);
    const bool is_input = step * Format::kStep + Format::First(0, lane.t, 0) < product.num_inputs;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const bool is_tile = source.unit * kOwnTiles + i % kOwnTiles < num_tiles;
      const bool is_there = step < end_step && is_input && is_tile;
      Raw raw;
      const CopyFields<Raw> visit = {{raw, PlaceOf(slot, i), lane_index}, is_there};
      const int tile = i % kOwnTiles + i / kOwnTiles * num_tiles;
      Format::Load(From<Format>(source.first, tile, 0), StepOf(0), lane, raw, visit);
    }
    source.first = From<Format>(source.first, 0, kWarps);
    EndCopies();
    if (++source.turn == num_steps) BeginUnit(source, source.unit + gridDim.x / kCluster);
  }

  // The rows' inputs of a piece, and the norm's scales. Missing rows and inputs are replaced by others:
  // their results are not written, or their weights are zero.
  struct Inputs {
    Four rows[kFragments][2], norm[2];
    bool is_there[2];
  };

  __device__ void LoadInputs(int turn, int piece, Inputs& inputs) const {
    const int step = StepOf(turn);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int input = step * Format::kStep + Format::First(piece, lane.t, half);
      inputs.is_there[half] = step < end_step && input < product.num_inputs;
      if (!inputs.is_there[half]) input = 0;
      if (product.norm.data != nullptr) inputs.norm[half].Load(product.norm, input);
#pragma unroll
      for (int fragment = 0; fragment < kFragments; ++fragment) {
        const int row = first_row + min(fragment * 8 + lane.g, num_rows - 1);
        inputs.rows[fragment][half].Load(product.rows, int64_t(row) * product.num_inputs + input);
      }
    }
  }

  // What a lane hands to the tensor cores of a piece, and the sums of its group of inputs.
  struct Piece {
    uint4 pairs[kFragments];
    float sum[kFragments];
  };

  // Returns the inputs times the norm's scales as bfloat16, and adds their squares.
  __device__ void Round(const Inputs& inputs, Piece& piece, float (&row_squares)[kFragments]) const {
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      float x[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* four = x + 4 * half;
        inputs.rows[fragment][half].ToFloats(product.rows.is_bfloat16, four);
        if (product.norm.data == nullptr) continue;
        float scales[4];
        inputs.norm[half].ToFloats(product.norm.is_bfloat16, scales);
        for (int i = 0; i < 4; ++i) {
          if (inputs.is_there[half]) {
            row_squares[fragment] = fmaf(four[i], four[i], row_squares[fragment]);
          }
          four[i] *= scales[i];
        }
      }
      if (product.takes_bytes) RoundToBytes(x);
      piece.pairs[fragment] = {Pair(x, 0), Pair(x, 1), Pair(x + 4, 0), Pair(x + 4, 1)};
      if (Format::kHasMinimum) {
        float sum = 0;
        for (uint32_t pair : {piece.pairs[fragment].x, piece.pairs[fragment].y,
                              piece.pairs[fragment].z, piece.pairs[fragment].w}) {
          sum += FirstOf(pair) + SecondOf(pair);
        }
        piece.sum[fragment] = SumOfFour(sum);
      }
    }
  }

  __device__ static uint32_t Pair(const float* four, int i) {
    return Format::kSpread ? ToPair(four[i], four[i + 2]) : ToPair(four[2 * i], four[2 * i + 1]);
  }

  // Rounds a group of inputs, of which each of four lanes has eight.
  __device__ static void RoundToBytes(float (&x)[8]) {
    float largest = 0;
    for (float number : x) largest = fmaxf(largest, fabsf(number));
    for (int bits = 1; bits < 4; bits *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    }
    if (!(largest > 0)) return;
    for (float& number : x) number = rintf(number * (127 / largest)) * (largest / 127);
  }

  __device__ static float SumOfFour(float number) {
    for (int bits = 1; bits < 4; bits *= 2) number += __shfl_xor_sync(kAllLanes, number, bits);
    return number;
  }

  // Adds the products of a piece of a tile.
  __device__ void MultiplyPiece(const Raw& raw, const Place& at, const Piece& rows,
                                float (&tile_sums)[kFragments][4]) const {
    Pieces pairs;
    Format::Pairs(raw, at, pairs);
    const uint32_t first[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
    const uint32_t second[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      const uint4& x = rows.pairs[fragment];
      if constexpr (!Format::kHasFactors) {
        MultiplyAdd(tile_sums[fragment], first, {x.x, x.y});
        MultiplyAdd(tile_sums[fragment], second, {x.z, x.w});
      } else {
        float products[4] = {0, 0, 0, 0};
        MultiplyAdd(products, first, {x.x, x.y});
        if (Format::kHalves) {
          Scale(Format::Factors(raw, at, 0), products, tile_sums[fragment]);
          for (float& number : products) number = 0;
        }
        MultiplyAdd(products, second, {x.z, x.w});
        const Factor factors = Format::Factors(raw, at, 1);
        Scale(factors, products, tile_sums[fragment]);
        if (Format::kHasMinimum) {
          for (int i = 0; i < 4; ++i) {
            // That of row 2t or 2t + 1, which other lanes have.
            const float sum = __shfl_sync(kAllLanes, rows.sum[fragment], 8 * lane.t + i % 2 * 4);
            tile_sums[fragment][i] = fmaf(-factors.minimum[i / 2], sum, tile_sums[fragment][i]);
          }
        }
      }
    }
  }

  __device__ static void Scale(const Factor& factors, const float (&products)[4],
                               float (&tile_sums)[4]) {
    for (int i = 0; i < 4; ++i) tile_sums[i] = fmaf(factors.factor[i / 2], products[i], tile_sums[i]);
  }

  using Sums = float[kTiles][kFragments][4];

  __device__ void Run() const {
    const int first_unit = blockIdx.x / kCluster;
    Source source;
    BeginUnit(source, first_unit);
    for (int slot = 0; slot < kDepth; ++slot) Copy(source, slot);
    LetNextStart();
    WaitForPrevious();
    Inputs next;
    LoadInputs(0, 0, next);
    int slot = 0;
    for (int unit = first_unit; unit * kOwnTiles < num_tiles; unit += gridDim.x / kCluster) {
      Sums unit_sums = {};
      float row_squares[kFragments] = {};
      for (int turn = 0; turn < num_steps; ++turn) {
        WaitForCopies<kDepth - 1>();
        if (Format::kSharesHeader) __syncwarp();
#pragma unroll
        for (int number = 0; number < kPieces; ++number) {
          Piece piece;
          Round(next, piece, row_squares);
          if (number + 1 < kPieces) {
            LoadInputs(turn, number + 1, next);
          } else {
            LoadInputs(turn + 1 < num_steps ? turn + 1 : 0, 0, next);
          }
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            Raw raw;
            const ReadFields<Raw> visit = {{raw, PlaceOf(slot, i), lane_index}};
            Format::Load(weights, StepOf(0), lane, raw, visit);
            MultiplyPiece(raw, {StepOf(turn), number, lane}, piece, unit_sums[i]);
          }
        }
        if (Format::kSharesHeader) __syncwarp();
        Copy(source, slot);
        slot = slot + 1 < kDepth ? slot + 1 : 0;
      }
      const float start = StartOf(unit, threadIdx.x);  // comes while the warps' sums are added
      AddWarps(unit_sums, row_squares);
      WaitForCluster<kCluster>();
      Write(unit, start);
      WaitForReaders<kCluster>();
    }
    WaitForCopies<0>();  // those after the last unit, of zeros: none comes when the block has ended
  }

  // Leaves the block's sums, and those of its rows' squares, in shared memory.
  __device__ void AddWarps(Sums& unit_sums, const float (&row_squares)[kFragments]) const {
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      const float sum = SumOfFour(row_squares[fragment]);
      if (lane.t == 0) squares[warp * kColumns + fragment * 8 + lane.g] = sum;
    }
#pragma unroll
    for (int half = kWarps / 2; half; half /= 2) {
      // A warp writes where only it has read.
      const int given = half == kWarps / 2 ? warp - half : warp;
      const int taken = half == kWarps / 2 ? warp : warp + half;
      if (warp >= half && warp < 2 * half) {
#pragma unroll
        for (int i = 0; i < kTiles * kFragments; ++i) {
          const float(&four)[4] = unit_sums[i / kFragments][i % kFragments];
          partial[(given * kTiles * kFragments + i) * kWarp + lane_index] = {four[0], four[1],
                                                                             four[2], four[3]};
        }
      }
      __syncthreads();
      if (warp < half) {
#pragma unroll
        for (int i = 0; i < kTiles * kFragments; ++i) {
          const float4 four = partial[(taken * kTiles * kFragments + i) * kWarp + lane_index];
          float(&own)[4] = unit_sums[i / kFragments][i % kFragments];
          own[0] += four.x, own[1] += four.y, own[2] += four.z, own[3] += four.w;
        }
      }
    }
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < kTiles * kFragments; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int output = i / kFragments * kTile + 2 * lane.g + j / 2;
          const int row = i % kFragments * 8 + 2 * lane.t + j % 2;
          sums[row * (kTiles * kTile) + output] = unit_sums[i / kFragments][i % kFragments][j];
        }
      }
    }
    if (threadIdx.x >= kThreads - kColumns) {
      const int row = threadIdx.x - (kThreads - kColumns);
      float sum = 0;
      for (int i = 0; i < kWarps; ++i) sum += squares[i * kColumns + row];
      block_squares[row] = sum;
    }
  }

  static constexpr int kShare = kOutputs / kCluster;  // of a unit's outputs, that a block writes

  __device__ int OutputOf(int unit, int i) const {
    return unit * kOutputs + int(blockIdx.x) % kCluster * kShare + i % kShare;
  }

  // What result i of this block's share is added to.
  __device__ float StartOf(int unit, int i) const {
    const int row = i / kShare, output = OutputOf(unit, i);
    if (product.residual == nullptr || row >= num_rows || output >= product.num_outputs) return 0;
    return product.residual[int64_t(first_row + row) * product.num_outputs + output];
  }

  // Adds the sums of the cluster's blocks and writes this block's share of the results; `first_start`
  // is what this thread's first result is added to.
  __device__ void Write(int unit, float first_start) const {
    for (int i = threadIdx.x; i < num_rows * kShare; i += kThreads) {
      const int row = i / kShare, output = OutputOf(unit, i);
      if (output >= product.num_outputs) continue;
      const float start = i == int(threadIdx.x) ? first_start : StartOf(unit, i);
      const float* own = sums + row * (kTiles * kTile) + output % kOutputs;
      const float norm = NormOf(row);
      float parts[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float sum = 0;
        for (int block = 0; block < kCluster; ++block) {
          sum += LoadFromCluster<kCluster>(own + part * kOutputs, block);
        }
        const int kernel_output = output + part * product.num_outputs;
        sum *= norm;
        if (product.units != nullptr) sum *= product.units[kernel_output];
        if (product.bias.data != nullptr) sum += LoadFloat(product.bias, kernel_output);
        parts[part] = sum;
      }
      float result = parts[0];
      if (kParts == 2) result = Activate(parts[0], product.activation) * parts[kParts - 1];
      result = fmaf(product.scale, result, start);
      const int64_t to = int64_t(first_row + row) * product.num_outputs + output;
      if (product.has_bfloat16_result) {
        static_cast<uint16_t*>(product.result)[to] = ToBfloat16(result);
      } else {
        static_cast<float*>(product.result)[to] = result;
      }
    }
  }

  __device__ float NormOf(int row) const {
    if (product.norm.data == nullptr) return 1;
    float sum = 0;
    for (int block = 0; block < kCluster; ++block) {
      sum += LoadFromCluster<kCluster>(block_squares + row, block);
    }
    return rsqrtf(sum / product.num_inputs + product.epsilon);
  }
};

// Two blocks fit a multiprocessor, but of 16 rows with weights to be decoded, which takes registers.
template <class Format, int kParts, int kFragments, int kCluster>
__global__ void __launch_bounds__(kThreads, Format::kSpread && kFragments == 2 ? 1 : 2)
    Multiply(const __grid_constant__ Product product) {
  Block<Format, kParts, kFragments, kCluster>(product).Run();
}

template <class Format, int kParts, int kFragments, int kCluster>
cudaError_t LaunchMultiply(cudaStream_t stream, const Product& product, int processors) {
  using Block = Block<Format, kParts, kFragments, kCluster>;
  const unsigned units = Block::UnitsOf(product.num_outputs);
  const unsigned row_tiles = (product.num_rows + kRowTile - 1) / kRowTile;
  const unsigned most = std::max(1u, kBlocks * processors / row_tiles);
  const unsigned blocks = kCluster == 1 ? std::min(units, most) : units * kCluster;
  const Shape shape = {{blocks, row_tiles}, kThreads, size_t(Block::kSharedBytes),
                       product.overlaps, kCluster};
  return Launch(Multiply<Format, kParts, kFragments, kCluster>, shape, stream, product);
}

// Where there are fewer units than multiprocessors, the blocks of a cluster share one. That depends on
// the kernel, and not on the rows. Gated products have many units: of the smallest models a block or
// two share one of large units, which are 4 tiles.
template <class Format, int kParts, int kFragments>
cudaError_t LaunchCluster(cudaStream_t stream, const Product& product) {
  using Block = Block<Format, kParts, kFragments, 1>;
  int device = 0, processors = 1, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  const int units = Block::UnitsOf(product.num_outputs);
  constexpr int kMost = kParts == 1 ? 4 : Format::kTiles / 2;
  // A warp has a step at least.
  const int most = major < 9 ? 1 : Block::AllSteps(product.num_inputs) / kWarps;
  if constexpr (kMost >= 4) {
    if (most >= 4 && 2 * units < processors) {
      return LaunchMultiply<Format, kParts, kFragments, 4>(stream, product, processors);
    }
  }
  if constexpr (kMost >= 2) {
    if (most >= 2 && units < processors) {
      return LaunchMultiply<Format, kParts, kFragments, 2>(stream, product, processors);
    }
  }
  return LaunchMultiply<Format, kParts, kFragments, 1>(stream, product, processors);
}

// Each format's is compiled by one source only.
template <class Format>
cudaError_t LaunchFormat(cudaStream_t stream, const Product& product) {
  const bool is_gated = product.activation != Activation::kNone, is_wide = product.num_rows > 8;
  if (is_gated) {
    return is_wide ? LaunchCluster<Format, 2, 2>(stream, product)
                   : LaunchCluster<Format, 2, 1>(stream, product);
  }
  return is_wide ? LaunchCluster<Format, 1, 2>(stream, product)
                 : LaunchCluster<Format, 1, 1>(stream, product);
}

}  // namespace jspec
