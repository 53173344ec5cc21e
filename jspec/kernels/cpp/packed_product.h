// Products of rows with kernels packed as in GGUF files. A few codes of two vectors of outputs are
// taken out at a time, into registers, and multiplied by all rows: each code is taken out once,
// each input is read once for both vectors, and no sum is taken across lanes. Of one or two rows of
// integers the sums of inputs that share a scale stay in registers, too; others are kept in memory.
//
// A row's sums are taken in one order, however many rows share a pass: its result does not depend
// on the rows beside it.

#pragma once

#include "packed_rows.h"

namespace {

using namespace jspec;

constexpr int kColumns = 2;  // vectors of outputs that are multiplied together
constexpr int kKept = kRegisters == 32 ? 8 : 4;  // vectors of a column's weights in registers
constexpr int kFours = kGroup / 4;               // vectors of codes in a group
constexpr int kStripColumns = kStrip / kLanes;
constexpr int64_t kRowsATile = 64;  // that use strips before the next are taken out

// Strips beside each other, or one, whose columns are vectors of outputs.
template <typename Format>
struct Strips {
  static constexpr int64_t kBlockBytes = kStrip * Format::kBytes;
  const uint8_t* first;
  int64_t bytes;  // of each

  Block At(int column, int64_t block) const {
    const uint8_t* strip = first + column / kStripColumns * bytes;
    return {strip + block * kBlockBytes, column % kStripColumns * kLanes};
  }

  // Asks memory for what comes kAhead bytes after these bytes of the strips of kCount columns.
  template <int kCount>
  void AskFor(int64_t begin, int64_t count) const {
    constexpr int kStrips = (kCount + kStripColumns - 1) / kStripColumns;
    int64_t ahead = begin + kAhead;
    if (ahead >= bytes) ahead += (kStrips - 1) * bytes;  // the next strips'
    for (int strip = 0; strip < kStrips; ++strip, ahead += bytes) {
      for (int64_t line = 0; line < count; line += kCacheLine) {
        __builtin_prefetch(first + ahead + line, 0, kIntoL2);
      }
    }
  }
};

// Where the products of some rows with kCount columns go, [rows kCount].
template <typename Sums>
struct Results {
  Lanes* totals;
  Sums* sums;  // those that are not complete yet
};

// Adds the products of all rows with weights of some inputs, which stay in registers: the loops
// over them are unrolled. `begins` and `ends` tell whether these are the first and the last inputs
// that share a scale.
template <int kCount, int kVectors, typename Rows>
[[gnu::always_inline]] inline void MultiplyAll(
    const typename Rows::Weights (&weights)[kCount][kVectors], const typename Rows::Group* groups,
    int64_t count, int first, bool begins, bool ends, const Scales (&scales)[kCount],
    const Results<typename Rows::Weights>& results) {
  constexpr int kInputs = 4 / Rows::kVectors;  // of a vector
  const int scale = first / Rows::kShared;
  for (int64_t r = 0; r < count; ++r) {
    typename Rows::Weights sums[kCount];
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) {
      sums[c] = begins ? groups[r].Begin(scale) : results.sums[r * kCount + c];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) {
        sums[c] = AddProducts(sums[c], weights[c][i], groups[r].numbers + first + i * kInputs);
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) {
      if (ends) {
        Lanes& total = results.totals[r * kCount + c];
        total = groups[r].AddTo(total, sums[c], scales[c].factor[scale], scales[c].minimum[scale],
                                scale);
      } else {
        results.sums[r * kCount + c] = sums[c];
      }
    }
  }
}

// The products of any number of rows: weights of some inputs are taken out for all of them.
template <int kCount, typename Format, typename Rows>
void MultiplyMany(const Strips<Format>& strips, const Rows& rows, int64_t row, int64_t count,
                  Lanes* totals) {
  using Weights = typename Rows::Weights;
  constexpr int kVectors = Rows::kVectors, kScales = Rows::kScales * Format::kGroups;
  constexpr int kTaken = std::min(kKept / kVectors, Rows::kShared / 4);  // fours at a time
  constexpr int64_t kGroupBytes = Strips<Format>::kBlockBytes / Format::kGroups;
  Weights sums[kRowsATile * kCount];
  for (int64_t b = 0; b < strips.bytes / Strips<Format>::kBlockBytes; ++b) {
    Lanes factor[kCount][kScales], minimum[kCount][kScales];
    for (int c = 0; c < kCount; ++c) Format::Read(strips.At(c, b), {factor[c], minimum[c]});
#pragma GCC unroll 8
    for (int g = 0; g < Format::kGroups; ++g) {
      const int64_t group = b * Format::kGroups + g;
      strips.template AskFor<kCount>(group * kGroupBytes, kGroupBytes);
      Scales scales[kCount];
      for (int c = 0; c < kCount; ++c) {
        scales[c] = {factor[c] + g * Rows::kScales, minimum[c] + g * Rows::kScales};
      }
#pragma GCC unroll 8
      for (int first = 0; first < kFours; first += kTaken) {
        Weights weights[kCount][kTaken * kVectors];
#pragma GCC unroll 2
        for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 8
          for (int four = 0; four < kTaken; ++four) {
            const Words codes = Format::Codes(strips.At(c, b), g, first + four);
            Rows::Spread(codes, Format::kOffset, weights[c] + four * kVectors);
          }
        }
        MultiplyAll<kCount, kTaken * kVectors, Rows>(
            weights, &rows.groups.At(row, group), count, 4 * first,
            4 * first % Rows::kShared == 0, 4 * (first + kTaken) % Rows::kShared == 0, scales,
            {totals, sums});
      }
    }
  }
}

// Adds the products of one group's inputs that share a scale. The codes of four inputs at a time
// meet sums that stay in registers.
template <int kCount, int kRows, typename Format, typename Rows>
[[gnu::always_inline]] inline void MultiplyPart(const Block (&blocks)[kCount], int group, int part,
                                                const typename Rows::Group* rows,
                                                const Scales (&scales)[kCount], Lanes* totals) {
  constexpr int kVectors = Rows::kVectors, kInputs = 4 / kVectors;  // inputs of a vector
  typename Rows::Weights sums[kRows][kCount];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) sums[r][c] = rows[r].Begin(part);
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows::kShared; i += 4) {
    const int first = part * Rows::kShared + i;
    typename Rows::Weights weights[kCount][kVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) {
      Rows::Spread(Format::Codes(blocks[c], group, first / 4), Format::kOffset, weights[c]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const auto* numbers = rows[r].numbers + first + v * kInputs;
#pragma GCC unroll 2
        for (int c = 0; c < kCount; ++c) {
          sums[r][c] = AddProducts(sums[r][c], weights[c][v], numbers);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) {
      Lanes& total = totals[r * kCount + c];
      const Lanes factor = scales[c].factor[part], minimum = scales[c].minimum[part];
      total = rows[r].AddTo(total, sums[r][c], factor, minimum, part);
    }
  }
}

// The products of kRows rows, one or two.
template <int kCount, int kRows, typename Format, typename Rows>
void MultiplyFew(const Strips<Format>& strips, const Rows& rows, int64_t row, Lanes* totals) {
  constexpr int kScales = Rows::kScales * Format::kGroups;
  constexpr int kTurn = std::min(Format::kGroups, 4);  // groups whose code is written out
  static_assert(Format::kGroups % kTurn == 0);
  constexpr int64_t kGroupBytes = Strips<Format>::kBlockBytes / Format::kGroups;
  for (int64_t b = 0; b < strips.bytes / Strips<Format>::kBlockBytes; ++b) {
    Lanes factor[kCount][kScales], minimum[kCount][kScales];
    Block blocks[kCount];
    for (int c = 0; c < kCount; ++c) {
      blocks[c] = strips.At(c, b);
      Format::Read(blocks[c], {factor[c], minimum[c]});
    }
    for (int turn = 0; turn < Format::kGroups; turn += kTurn) {
#pragma GCC unroll 4
      for (int g = turn; g < turn + kTurn; ++g) {
        const int64_t group = b * Format::kGroups + g;
        strips.template AskFor<kCount>(group * kGroupBytes, kGroupBytes);
        // The compiler would ask for what all groups of a turn need at once: more than the
        // processor can wait for.
        asm volatile("" ::: "memory");
        Scales scales[kCount];
        for (int c = 0; c < kCount; ++c) {
          scales[c] = {factor[c] + g * Rows::kScales, minimum[c] + g * Rows::kScales};
        }
#pragma GCC unroll 2
        for (int part = 0; part < Rows::kScales; ++part) {
          MultiplyPart<kCount, kRows, Format, Rows>(blocks, g, part, &rows.groups.At(row, group),
                                                    scales, totals);
        }
      }
    }
  }
}

// Adds the products of `count` rows with kCount columns of outputs to the totals.
template <int kCount, typename Format, typename Rows>
void MultiplyColumns(const Strips<Format>& strips, const Rows& rows, int64_t row, int64_t count,
                     Lanes* totals) {
  if constexpr (Rows::kVectors < 4) {  // not of floats: four vectors of weights a column
    if (count == 1) return MultiplyFew<kCount, 1, Format>(strips, rows, row, totals);
    if (count == 2) return MultiplyFew<kCount, 2, Format>(strips, rows, row, totals);
  }
  MultiplyMany<kCount, Format>(strips, rows, row, count, totals);
}

// Returns the rows, prepared in the space given, for codes that are too large by `offset`.
template <typename Rows>
Rows Prepare(ffi::ThreadPool& pool, const typename Rows::Number* from, const ProductShape& shape,
             int offset, Space<typename Rows::Group>& space) {
  const int64_t groups = shape.inputs / kGroup;
  Rows rows;
  rows.groups = {space.Take(shape.rows * groups), shape.rows};
  ForRows(pool, shape.rows, shape.inputs, [=](int64_t r) {
    for (int64_t g = 0; g < groups; ++g) {
      Rows::Prepare(from + r * shape.inputs + g * kGroup, offset, rows.groups.At(r, g));
    }
  });
  return rows;
}

template <typename Format, typename Rows>
void Multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& from, const uint8_t* strips,
              float* outputs, const ProductShape& shape) {
  static thread_local Space<typename Rows::Group> space;
  const auto* numbers = static_cast<const typename Rows::Number*>(from.untyped_data());
  const Rows rows = Prepare<Rows>(pool, numbers, shape, Format::kOffset, space);
  constexpr int64_t kOutputs = std::max(kStrip, kColumns * kLanes);
  const int64_t bytes = shape.inputs / kGroup / Format::kGroups * Strips<Format>::kBlockBytes;
  ForTiles<kOutputs>(pool, shape, kOutputs, [=](int64_t begin, int64_t end) {
    // The last strip may be alone.
    const bool is_alone = kOutputs > kStrip && end - begin <= kStrip;
    const auto multiply =
        is_alone ? MultiplyColumns<1, Format, Rows> : MultiplyColumns<kColumns, Format, Rows>;
    const int64_t width = is_alone ? kStrip : kOutputs;
    for (int64_t r = 0; r < shape.rows; r += kRowsATile) {
      const int64_t count = std::min(kRowsATile, shape.rows - r);
      Lanes totals[kRowsATile * kColumns];
      std::fill_n(totals, count * width / kLanes, Lanes{});
      multiply({strips + begin / kStrip * bytes, bytes}, rows, r, count, totals);
      const auto* from = reinterpret_cast<const float*>(totals);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(from + i * width, end - begin, outputs + (r + i) * shape.outputs + begin);
      }
    }
  });
}

// If `kInBytes`, the rows are float32 numbers, to be rounded to bytes.
template <typename Format, bool kInBytes>
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], outputs->dimensions()[1]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  using Scaling = ScalingOf<Format>;
  using OfFloats = std::conditional_t<kInBytes, ByteRows<Scaling>, FloatRows<Scaling>>;
  const auto multiply = rows.element_type() == ffi::F32 ? Multiply<Format, OfFloats>
                                                        : Multiply<Format, BFloat16Rows<Scaling>>;
  multiply(pool, rows, kernel.typed_data(), outputs->typed_data(), shape);
  return ffi::Error::Success();
}

}  // namespace

#define JSPEC_PRODUCT(name, ...)                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name, (__VA_ARGS__),       \
                                ffi::Ffi::Bind()                   \
                                    .Ctx<ffi::ThreadPool>()        \
                                    .Arg<ffi::AnyBuffer>()         \
                                    .Arg<ffi::BufferR2<ffi::U8>>() \
                                    .Ret<ffi::BufferR2<ffi::F32>>())
// Both products with kernels of a format.
#define JSPEC_PACKED(kind)                                         \
  JSPEC_PRODUCT(kind##_product, Product<JSPEC_##kind, false>);     \
  JSPEC_PRODUCT(kind##_byte_product, Product<JSPEC_##kind, true>)

#define JSPEC_q4_0 Nibbles<false, false>
#define JSPEC_q4_1 Nibbles<false, true>
#define JSPEC_q5_0 Nibbles<true, false>
#define JSPEC_q5_1 Nibbles<true, true>
#define JSPEC_q8_0 Q8
#define JSPEC_q2_k Q2K
#define JSPEC_q3_k Q3K
#define JSPEC_q4_k SixBitScales<false>
#define JSPEC_q5_k SixBitScales<true>
#define JSPEC_q6_k Q6K
