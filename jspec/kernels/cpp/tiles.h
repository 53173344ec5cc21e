// Products of bfloat16 in tiles of 16 × 16 sums (AMX), where 16 rows cost little more than one. The
// order of a sum depends neither on the rows nor on the outputs beside it.

#pragma once

#include <vector>

#include "multiply.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define JSPEC_HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jspec {

#ifdef JSPEC_HAS_TILES
constexpr int kTileSide = 16;          // rows, or outputs, of a tile of sums
constexpr int kTileInputs = 32;        // inputs of a tile of weights: 64 bytes for each output
constexpr int kWidth = 2 * kTileSide;  // outputs, and rows, that are computed together
constexpr int kFewRows = 4;            // up to which moving number by number beats transposing
constexpr int kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

// Whether this process may use the tile registers: Linux must be asked for them first.
inline bool HasTiles() {
  static const bool has = syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
  return has;
}

// The eight tile registers of a thread, all with 16 rows. The rows of tiles 4 and 5, the weights,
// have 64 bytes; those of the others have a float for every column.
struct TileRegisters {
  explicit TileRegisters(int64_t columns) {
    struct alignas(64) {
      uint8_t palette = 1, rest[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    for (const int tile : {0, 1, 2, 3, 6, 7}) shapes.row_bytes[tile] = columns * sizeof(float);
    asm volatile("" ::: "memory");  // the compiler believes that only the first number is read
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
};

// Rows become columns by four perfect shuffles. The loops are unrolled so that lanes stay in
// registers.
inline void Transpose(Lanes* lanes) {
  Lanes turned[kLanes];
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; ++stage) {
    const Lanes* from = stage % 2 == 0 ? lanes : turned;
    Lanes* to = stage % 2 == 0 ? turned : lanes;
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      const Pair pair = Zip({from[i], from[i + kLanes / 2]});
      to[2 * i] = pair.first;
      to[2 * i + 1] = pair.second;
    }
  }
}

// The rows, rounded, in blocks of up to 16. Of every 32 inputs a block holds the first two of all
// its rows, then the next two of all its rows, and so on, as the instruction takes them. Few rows
// are packed without gaps, which other threads read soonest; otherwise a block has 16 columns, with
// zeros for missing rows.
struct TileInputs {
  int64_t count, steps, columns;
  Space<Lanes> space;
  Lanes* pairs;

  void Pack(ffi::ThreadPool& pool, const float* rows, const ProductShape& shape) {
    count = shape.rows;
    steps = (shape.inputs + kTileInputs - 1) / kTileInputs;
    columns = count <= kFewRows ? count : kTileSide;
    const int64_t blocks = (count + kTileSide - 1) / kTileSide;
    pairs = space.Take(blocks * steps * columns);
    const bool is_full = count % columns == 0 && shape.inputs % kTileInputs == 0;
    if (!is_full) std::fill_n(pairs, blocks * steps * columns, Lanes{});
    if (count <= kFewRows) {
      for (int64_t r = 0; r < count; ++r) PackRow(rows + r * shape.inputs, r, shape.inputs);
    } else {
      ShareOut(pool, blocks, [=](int64_t block) { PackBlock(rows, block, shape); });
    }
  }

  void PackRow(const float* row, int64_t r, int64_t num_inputs) {
    auto* to = reinterpret_cast<BFloat16*>(pairs) + 2 * r;
    for (int64_t i = 0; i < num_inputs; ++i) to[i / 2 * 2 * columns + i % 2] = Rounded(row[i]);
  }

  void PackBlock(const float* rows, int64_t block, const ProductShape& shape) {
    const int64_t first = block * kTileSide, end = std::min(first + kTileSide, count);
    for (int64_t r = first; r < end; ++r) {
      for (int64_t i = 0; i < shape.inputs; i += kTileInputs) {
        Lanes& to = pairs[Place(block, i / kTileInputs) + r - first];
        Convert(rows + r * shape.inputs + i, std::min<int64_t>(kTileInputs, shape.inputs - i),
                reinterpret_cast<BFloat16*>(&to));
      }
    }
    for (int64_t step = 0; step < steps; ++step) Transpose(&pairs[Place(block, step)]);
  }

  int64_t Place(int64_t block, int64_t step) const { return (block * steps + step) * columns; }
  const Lanes* Step(int64_t block, int64_t step) const { return &pairs[Place(block, step)]; }
  int64_t RowBytes() const { return columns * sizeof(float); }
};

// Stores a tile of sums. Its rows are outputs, so it is transposed on the way.
template <int kTile>
inline void StoreTile(float* outputs, int64_t stride, int64_t num_rows, int64_t num_outputs) {
  Lanes lanes[kLanes];
  if constexpr (kTile == 0) _tile_stored(0, lanes, 64);
  if constexpr (kTile == 1) _tile_stored(1, lanes, 64);
  if constexpr (kTile == 2) _tile_stored(2, lanes, 64);
  if constexpr (kTile == 3) _tile_stored(3, lanes, 64);
  const int64_t width = std::min<int64_t>(num_outputs, kTileSide);
  const int64_t height = std::min<int64_t>(num_rows, kTileSide);
  if (height <= kFewRows) {
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t o = 0; o < width; ++o) outputs[r * stride + o] = lanes[o][r];
    }
    return;
  }
  Transpose(lanes);
  if (width == kTileSide && height == kTileSide) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileSide; ++r) std::memcpy(outputs + r * stride, &lanes[r], sizeof(Lanes));
    return;
  }
  for (int64_t r = 0; r < height; ++r) {
    std::memcpy(outputs + r * stride, &lanes[r], width * sizeof(float));
  }
}

// Asks memory for a part of the next 32 outputs' weights, as much as one step reads. The arithmetic
// of many rows leaves time for it.
inline void AskForStep(const BFloat16* after, int64_t step) {
  constexpr int kBytes = kWidth * kTileInputs * sizeof(BFloat16);
  const auto* from = reinterpret_cast<const char*>(after) + step * kBytes;
#pragma GCC unroll 32
  for (int line = 0; line < kBytes; line += kCacheLine) __builtin_prefetch(from + line, 0, 2);
}

// Loads the weights of 16 outputs, or of 32, into tiles 4 and 5. With two blocks of rows or more
// they are kept in cache, as more blocks may follow; for one block they are read once.
template <bool kStay>
inline void LoadWeights(const BFloat16* weights, const BFloat16* second, int64_t stride) {
  if constexpr (kStay) {
    _tile_loadd(4, weights, stride);
    if (second != nullptr) _tile_loadd(5, second, stride);
  } else {
    _tile_stream_loadd(4, weights, stride);
    if (second != nullptr) _tile_stream_loadd(5, second, stride);
  }
}

// Computes up to 32 outputs of one or two blocks of rows.
template <bool kTwoBlocks>
inline void MultiplyTiles(const TileInputs& inputs, int64_t block, const BFloat16* weights,
                          float* outputs, int64_t stride, int64_t num_outputs) {
  const int64_t width = inputs.steps * kTileInputs, bytes = width * sizeof(BFloat16);
  const bool has_second = num_outputs > kTileSide;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < inputs.steps; ++step) {
    const BFloat16* from = weights + step * kTileInputs;
    LoadWeights<kTwoBlocks>(from, has_second ? from + kTileSide * width : nullptr, bytes);
    _tile_loadd(6, inputs.Step(block, step), inputs.RowBytes());
    _tile_dpbf16ps(0, 4, 6);
    if (has_second) _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTwoBlocks) {
      if (block == 0) AskForStep(weights + kWidth * width, step);
      _tile_loadd(7, inputs.Step(block + 1, step), 64);
      _tile_dpbf16ps(2, 4, 7);
      if (has_second) _tile_dpbf16ps(3, 5, 7);
    }
  }
  const int64_t num_rows = inputs.count - block * kTileSide;
  StoreTile<0>(outputs, stride, num_rows, num_outputs);
  if (has_second) StoreTile<1>(outputs + kTileSide, stride, num_rows, num_outputs - kTileSide);
  if constexpr (kTwoBlocks) {
    outputs += kTileSide * stride;
    StoreTile<2>(outputs, stride, num_rows - kTileSide, num_outputs);
    if (has_second) {
      StoreTile<3>(outputs + kTileSide, stride, num_rows - kTileSide, num_outputs - kTileSide);
    }
  }
}

// Returns the weights of `count` outputs in whole steps: in place, or a copy padded with zeros.
inline const BFloat16* WholeTiles(const BFloat16* weights, int64_t count, int64_t num_inputs,
                                  int64_t width) {
  if (count % kTileSide == 0 && num_inputs == width) return weights;
  static thread_local Space<BFloat16> space;
  BFloat16* copy = space.Take(kWidth * width);
  std::fill_n(copy, kWidth * width, 0);
  for (int64_t o = 0; o < count; ++o) {
    std::copy_n(weights + o * num_inputs, num_inputs, copy + o * width);
  }
  return copy;
}

// Computes all outputs of all rows, on all threads.
inline void MultiplyInTiles(ffi::ThreadPool& pool, const float* rows, const BFloat16* kernel,
                            float* outputs, const ProductShape& shape) {
  static thread_local TileInputs packed;
  packed.Pack(pool, rows, shape);
  const TileInputs& inputs = packed;
  ForTiles<kTileSide>(pool, shape, shape.outputs, [=, &inputs](int64_t begin, int64_t end) {
    const TileRegisters registers(inputs.columns);
    for (int64_t o = begin; o < end; o += kWidth) {
      const int64_t count = std::min<int64_t>(kWidth, end - o);
      const BFloat16* weights = WholeTiles(kernel + o * shape.inputs, count, shape.inputs,
                                           inputs.steps * kTileInputs);
      for (int64_t r = 0; r < shape.rows; r += kWidth) {
        const bool is_one = shape.rows - r <= kTileSide;
        const auto multiply = is_one ? MultiplyTiles<false> : MultiplyTiles<true>;
        multiply(inputs, r / kTileSide, weights, outputs + r * shape.outputs + o, shape.outputs,
                 count);
      }
    }
  });
}
#endif

}  // namespace jspec
