// The kernel of the product of few rows: weights are the left operand of the tensor cores, 16 outputs
// by 16 inputs, and the rows, 8 or 16 of them, are the right one.
//
// A block stages the rows in shared memory once, normed and rounded to bfloat16, and then takes one
// tile of outputs after another. Its 8 warps share a tile's inputs: warp w takes steps w, w + 8 ...,
// and their sums are added in the order of the warps. So a row's result depends on no other row, nor
// on how many there are. The weights of the next steps are under way while those that have come are
// multiplied, also from one tile to the next, and before the kernel before has ended.

#pragma once

#include "formats.cuh"
#include "product.cuh"

namespace jspec {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRowTile = 16;  // rows of a block
constexpr int kGroup = 32;    // inputs that are staged, and rounded to bytes, together
// Two blocks of a few rows fit a multiprocessor, and one block any GPU that has bfloat16.
constexpr int kMostSharedBytes = 96 << 10;

__device__ inline float4 LoadFour(const Floats& numbers, int64_t place) {
  if (!numbers.is_bfloat16) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(numbers.data) + place);
  }
  const uint16_t* first = static_cast<const uint16_t*>(numbers.data) + place;
  const uint2 pairs = *reinterpret_cast<const uint2*>(first);
  return {FirstOf(pairs.x), SecondOf(pairs.x), FirstOf(pairs.y), SecondOf(pairs.y)};
}

__device__ inline float MaximumOfWarp(float number) {
  for (int bits = 16; bits; bits >>= 1) {
    number = fmaxf(number, __shfl_xor_sync(kAllLanes, number, bits));
  }
  return number;
}

__device__ inline float Activate(float gate, Activation activation) {
  if (activation == Activation::kSilu) return gate / (1 + expf(-gate));
  // The tanh approximation of gelu (arXiv 1606.08415): (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
  const float cubic = fmaf(0.044715f * gate * gate, gate, gate);
  return gate / (1 + expf(-1.5957691216f * cubic));
}

// How a block's shared memory is laid out, and in how many turns a tile's inputs are taken. A batch
// is what all warps take at once: kUnroll steps of each.
struct Plan {
  int batches;              // of a tile
  int batches_staged;       // at a time
  int row_bytes;            // of a staged row
  // Bytes at which the groups' sums, the warps' sums of a tile, their sums of squares, and nothing
  // begin.
  int sums, partial, squares, total;

  template <class Format>
  JSPEC_BOTH static Plan Make(int num_rows, int num_inputs, int parts) {
    constexpr int kBatch = Format::kStep * Format::kUnroll * kWarps;
    const int rows = num_rows < kRowTile ? num_rows : kRowTile, columns = rows > 8 ? 16 : 8;
    const int partial = 4 * kTile * columns * kWarps * parts;
    const int step_inputs = (num_inputs + Format::kStep - 1) / Format::kStep * Format::kStep;
    Plan plan;
    plan.batches = (num_inputs + kBatch - 1) / kBatch;
    plan.batches_staged = plan.batches;
    while (true) {
      const int inputs = step_inputs < plan.batches_staged * kBatch ? step_inputs
                                                                    : plan.batches_staged * kBatch;
      // So that the 8 lanes that read 16 bytes at a time, 4 of each of 2 rows, meet all banks.
      plan.row_bytes = 2 * inputs % 128 ? 2 * inputs : 2 * inputs + 64;
      plan.sums = plan.row_bytes * rows;
      plan.partial = plan.sums + (Format::kHasMinimum ? 4 * columns * (inputs / kGroup) : 0);
      plan.squares = plan.partial + partial;
      plan.total = plan.squares + 4 * kWarps * kRowTile;
      if (plan.total <= kMostSharedBytes || plan.batches_staged == 1) return plan;
      --plan.batches_staged;
    }
  }
};

// What the functions of a block share.
template <class Format, int kParts, int kFragments>
struct Block {
  static constexpr int kColumns = 8 * kFragments, kBatch = Format::kUnroll * kWarps;  // steps
  const Product& product;
  const Plan plan;
  const int warp, lane_index;
  const Lane lane;
  const int first_row, num_rows, num_steps;
  unsigned char* const shared;
  const Weights weights;

  __device__ Block(const Product& product, const Plan& plan)
      : product(product),
        plan(plan),
        warp(threadIdx.x / kWarp),
        lane_index(threadIdx.x % kWarp),
        lane{lane_index / 4, lane_index % 4},
        first_row(blockIdx.y * kRowTile),
        num_rows(min(kRowTile, product.num_rows - first_row)),
        num_steps((product.num_inputs + Format::kStep - 1) / Format::kStep),
        shared(SharedMemory()),
        weights{static_cast<const uint8_t*>(product.weights), product.multipliers,
                product.num_inputs} {}

  struct Batch {
    typename Format::Raw steps[Format::kUnroll];
  };

  // Starts loading the weights of this warp's steps of a batch.
  __device__ void Load(int tile, int part, int batch, Batch& loaded) const {
    const int64_t kernel_tile = tile + int64_t(part) * (product.num_outputs / kTile);
#pragma unroll
    for (int i = 0; i < Format::kUnroll; ++i) {
      const int step = batch * kBatch + i * kWarps + warp;
      if (step < num_steps) Format::Load(weights, kernel_tile, step, lane, loaded.steps[i]);
    }
  }

  // Leaves each warp's share of the rows' sums of squares in shared memory.
  __device__ void SumSquares() const {
    float* squares = reinterpret_cast<float*>(shared + plan.squares);
    for (int row = 0; row < num_rows; ++row) {
      const int64_t first = int64_t(first_row + row) * product.num_inputs;
      float sum = 0;
      for (int i = 4 * threadIdx.x; i < product.num_inputs; i += 4 * kThreads) {
        const float4 x = LoadFour(product.rows, first + i);
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, sum))));
      }
      sum = SumOfWarp(sum);
      if (lane_index == 0) squares[row * kWarps + warp] = sum;
    }
  }

  __device__ float NormOf(int row) const {
    if (product.norm.data == nullptr) return 1;
    const float* squares = reinterpret_cast<const float*>(shared + plan.squares) + row * kWarps;
    float sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += squares[i];
    return rsqrtf(sum / product.num_inputs + product.epsilon);
  }

  // Writes the rows of some batches to shared memory, as bfloat16 in the format's order, and the sums
  // of their groups of 32. Beyond the inputs there are zeros.
  __device__ void Stage(int first_batch) const {
    const int first_step = first_batch * kBatch;
    const int steps = min(num_steps - first_step, plan.batches_staged * kBatch);
    const int num_groups = steps * (Format::kStep / kGroup);
    float* sums = reinterpret_cast<float*>(shared + plan.sums);
    for (int row = 0; row < num_rows; ++row) {
      const float norm = NormOf(row);
      uint16_t* staged = reinterpret_cast<uint16_t*>(shared + row * plan.row_bytes);
#pragma unroll 4
      for (int group = warp; group < num_groups; group += kWarps) {
        const int place = group * kGroup + lane_index, input = first_step * Format::kStep + place;
        float x = 0;
        if (input < product.num_inputs) {
          x = LoadFloat(product.rows, int64_t(first_row + row) * product.num_inputs + input) * norm;
          if (product.norm.data != nullptr) x *= LoadFloat(product.norm, input);
        }
        if (product.takes_bytes) {
          const float largest = MaximumOfWarp(fabsf(x));
          x = largest > 0 ? rintf(x * (127 / largest)) * (largest / 127) : x;
        }
        const uint16_t rounded = ToBfloat16(x);
        staged[place / Format::kStep * Format::kStep + Format::Order(place % Format::kStep)] = rounded;
        if (Format::kHasMinimum) {
          const float sum = SumOfWarp(FloatOf(uint32_t(rounded) << 16));
          if (lane_index == 0) sums[group * kColumns + row] = sum;
        }
      }
    }
  }

  // Adds the products of a loaded step; `place` is its number among the staged ones.
  __device__ void MultiplyStep(const typename Format::Raw& raw, int step, int place,
                               float (&sums)[kFragments][4]) const {
#pragma unroll
    for (int piece = 0; piece < Format::kStep / kGroup; ++piece) {
      Pieces pairs;
      const Place at = {step, piece, lane};
      Format::Pairs(raw, at, pairs);
      const int byte = 2 * (place * Format::kStep + piece * kGroup + 8 * lane.t);
#pragma unroll
      for (int fragment = 0; fragment < kFragments; ++fragment) {
        const int row = fragment * 8 + lane.g;
        uint4 x = {0, 0, 0, 0};
        if (row < num_rows) {
          x = *reinterpret_cast<const uint4*>(shared + row * plan.row_bytes + byte);
        }
        const uint32_t first[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
        const uint32_t second[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
        if constexpr (!Format::kHasFactors) {
          MultiplyAdd(sums[fragment], first, {x.x, x.y});
          MultiplyAdd(sums[fragment], second, {x.z, x.w});
        } else {
          float products[4] = {0, 0, 0, 0};
          MultiplyAdd(products, first, {x.x, x.y});
          if (Format::kHalves) {
            Scale(Format::Factors(raw, at, 0), products, sums[fragment]);
            for (float& number : products) number = 0;
          }
          MultiplyAdd(products, second, {x.z, x.w});
          const Factor factors = Format::Factors(raw, at, 1);
          Scale(factors, products, sums[fragment]);
          if (Format::kHasMinimum) {
            const int group = place * (Format::kStep / kGroup) + piece;
            SubtractMinimums(factors, group, fragment, sums[fragment]);
          }
        }
      }
    }
  }

  __device__ static void Scale(const Factor& factors, const float (&products)[4],
                               float (&sums)[4]) {
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(factors.factor[i / 2], products[i], sums[i]);
  }

  __device__ void SubtractMinimums(const Factor& factors, int group, int fragment,
                                   float (&sums)[4]) const {
    const float* inputs = reinterpret_cast<const float*>(shared + plan.sums);
    const int row = fragment * 8 + 2 * lane.t;
    for (int i = 0; i < 4; ++i) {
      const float sum = row + i % 2 < num_rows ? inputs[group * kColumns + row + i % 2] : 0;
      sums[i] = fmaf(-factors.minimum[i / 2], sum, sums[i]);
    }
  }

  // Adds the warps' sums of a tile and writes the results.
  __device__ void Finish(int tile, const float (&sums)[kParts][kFragments][4]) const {
    float4* own = reinterpret_cast<float4*>(shared + plan.partial);
#pragma unroll
    for (int i = 0; i < kParts * kFragments; ++i) {
      const float(&four)[4] = sums[i / kFragments][i % kFragments];
      own[(warp * kParts * kFragments + i) * kWarp + lane_index] = {four[0], four[1], four[2],
                                                                    four[3]};
    }
    __syncthreads();
    const int row = threadIdx.x / kTile, output = threadIdx.x % kTile;
    if (row < num_rows) {
      // Where the lane that holds it has left it.
      const int place =
          row / 8 * 4 * kWarp + (output / 2 * 4 + row % 8 / 2) * 4 + output % 2 * 2 + row % 2;
      Write(first_row + row, tile * kTile + output, place);
    }
    __syncthreads();
  }

  __device__ void Write(int row, int output, int place) const {
    const float* partial = reinterpret_cast<const float*>(shared + plan.partial) + place;
    float parts[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float sum = 0;
      for (int i = 0; i < kWarps; ++i) {
        sum += partial[(i * kParts + part) * kFragments * 4 * kWarp];
      }
      const int kernel_output = output + part * product.num_outputs;
      if (product.units != nullptr) sum *= product.units[kernel_output];
      if (product.bias.data != nullptr) sum += LoadFloat(product.bias, kernel_output);
      parts[part] = sum;
    }
    float result = parts[0];
    if (kParts == 2) result = Activate(parts[0], product.activation) * parts[kParts - 1];
    const int64_t to = int64_t(row) * product.num_outputs + output;
    const float start = product.residual == nullptr ? 0 : product.residual[to];
    result = fmaf(product.scale, result, start);
    if (product.has_bfloat16_result) {
      static_cast<uint16_t*>(product.result)[to] = ToBfloat16(result);
    } else {
      static_cast<float*>(product.result)[to] = result;
    }
  }

  __device__ void Run() const {
    const int tiles = product.num_outputs / kTile;
    Batch next;
    Load(blockIdx.x, 0, 0, next);
    WaitForPrevious();
    LetNextStart();
    if (product.norm.data != nullptr) SumSquares();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sums[kParts][kFragments][4] = {};
      for (int batch = 0; batch < plan.batches; ++batch) {
        const int staged_batch = batch % plan.batches_staged;
        const bool is_first = tile == blockIdx.x;
        if (staged_batch == 0 && (is_first || plan.batches_staged < plan.batches)) {
          __syncthreads();
          Stage(batch);
          __syncthreads();
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const Batch loaded = next;
          if (part + 1 < kParts) {
            Load(tile, part + 1, batch, next);
          } else if (batch + 1 < plan.batches) {
            Load(tile, 0, batch + 1, next);
          } else if (tile + gridDim.x < tiles) {
            Load(tile + gridDim.x, 0, 0, next);
          }
#pragma unroll
          for (int i = 0; i < Format::kUnroll; ++i) {
            const int place = i * kWarps + warp, step = batch * kBatch + place;
            if (step < num_steps) {
              MultiplyStep(loaded.steps[i], step, staged_batch * kBatch + place, sums[part]);
            }
          }
        }
      }
      Finish(tile, sums);
    }
  }
};

template <class Format, int kParts, int kFragments>
__global__ void __launch_bounds__(kThreads, Format::kBlocks) Multiply(const Product product, const Plan plan) {
  Block<Format, kParts, kFragments>(product, plan).Run();
}

template <class Format, int kParts, int kFragments>
cudaError_t LaunchMultiply(cudaStream_t stream, const Product& product) {
  const Plan plan = Plan::Make<Format>(product.num_rows, product.num_inputs, kParts);
  if (plan.total > kMostSharedBytes) return cudaErrorInvalidValue;
  int device = 0, processors = 1;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const unsigned tiles = product.num_outputs / kTile;
  const unsigned row_tiles = (product.num_rows + kRowTile - 1) / kRowTile;
  const unsigned blocks = std::max(1u, unsigned(Format::kBlocks) * processors / row_tiles);
  const Shape shape = {{std::min(tiles, blocks), row_tiles}, kThreads, size_t(plan.total),
                       product.overlaps};
  return Launch(Multiply<Format, kParts, kFragments>, shape, stream, product, plan);
}

// Each format's is compiled by one source only.
template <class Format>
cudaError_t LaunchFormat(cudaStream_t stream, const Product& product) {
  const bool is_gated = product.activation != Activation::kNone, is_wide = product.num_rows > 8;
  if (is_gated) {
    return is_wide ? LaunchMultiply<Format, 2, 2>(stream, product)
                   : LaunchMultiply<Format, 2, 1>(stream, product);
  }
  return is_wide ? LaunchMultiply<Format, 1, 2>(stream, product)
                 : LaunchMultiply<Format, 1, 1>(stream, product);
}

}  // namespace jspec
