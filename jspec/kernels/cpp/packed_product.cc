// Products of rows with kernels packed as in GGUF files. A few codes of 32 outputs are taken out at a
// time, into registers, and multiplied by all rows: each code is taken out once, each input is read
// once for two vectors of outputs, and no sum is taken across lanes.
//
// A row's sums are taken in one order, however many rows share a pass: its result does not depend
// on the rows beside it.

#include "multiply.h"

#if defined(__AVX512BW__) || defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define JSPEC_HAS_PACKED
#include "packed_rows.h"

namespace {

using namespace jspec;

constexpr int kColumns = 2;                         // vectors of outputs that are multiplied together
constexpr int kKept = kRegisters == 32 ? 8 : 4;     // vectors of weights of a column in registers
constexpr int kFours = kGroup / 4;                  // vectors of codes in a group
constexpr int kStripColumns = kStrip / kLanes;
constexpr int64_t kRowsATile = 64;                  // that use a strip before the next is taken out

// Strips beside each other, or columns of one.
template <typename Format>
struct Strips {
  static constexpr int64_t kBlockBytes = kStrip * Format::kBytes;
  const uint8_t* first;
  int64_t bytes;  // of each

  Block At(int column, int64_t block) const {
    const uint8_t* strip = first + column / kStripColumns * bytes;
    return {strip + block * kBlockBytes, column % kStripColumns * kLanes};
  }

  // Asks memory for what comes kAhead bytes after these bytes of all strips.
  template <int kCount>
  void AskFor(int64_t begin, int64_t count) const {
    int64_t ahead = begin + kAhead;
    if (ahead >= bytes) ahead += (kCount - 1) * bytes;  // the next strips'
    for (int strip = 0; strip < kCount; ++strip, ahead += bytes) {
      for (int64_t line = 0; line < count; line += kCacheLine) {
        __builtin_prefetch(first + ahead + line, 0, kIntoL2);
      }
    }
  }
};

// Adds the products of `count` rows with columns of outputs to the totals, [count kCount].
template <int kCount, typename Format, typename Rows>
void MultiplyColumns(const Strips<Format>& strips, const Rows& rows, int64_t row, int64_t count,
                     Lanes* totals) {
  using Weights = typename Rows::Weights;
  using Group = typename decltype(rows.groups)::Type;
  constexpr int kVectors = Rows::kVectors, kScales = Rows::kScales;
  constexpr int kTaken = std::min(kKept / kVectors, Rows::kShared / 4);  // fours at a time
  constexpr int kWords = 4 / kVectors;  // inputs of a word
  constexpr int64_t kGroupBytes = Strips<Format>::kBlockBytes / Format::kGroups;
  constexpr int kNumStrips = (kCount + kStripColumns - 1) / kStripColumns;
  Weights sums[kRowsATile * kCount];
  const int64_t blocks = strips.bytes / Strips<Format>::kBlockBytes;
  for (int64_t b = 0; b < blocks; ++b) {
    Lanes factor[kCount][kScales * Format::kGroups], minimum[kCount][kScales * Format::kGroups];
    for (int c = 0; c < kCount; ++c) Format::Read(strips.At(c, b), {factor[c], minimum[c]});
#pragma GCC unroll 8
    for (int g = 0; g < Format::kGroups; ++g) {
      strips.template AskFor<kNumStrips>((b * Format::kGroups + g) * kGroupBytes, kGroupBytes);
      const Group* groups = &rows.groups.At(row, b * Format::kGroups + g);
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
        const int s = 4 * first / Rows::kShared, scale = g * kScales + s;
        const bool begins = 4 * first % Rows::kShared == 0;
        const bool ends = 4 * (first + kTaken) % Rows::kShared == 0;
        for (int64_t r = 0; r < count; ++r) {
          const Group& group = groups[r];
          Weights its[kCount];
#pragma GCC unroll 2
          for (int c = 0; c < kCount; ++c) its[c] = begins ? group.Begin(s) : sums[r * kCount + c];
#pragma GCC unroll 8
          for (int i = 0; i < kTaken * kVectors; ++i) {
            const auto* numbers = group.numbers + 4 * first + i * kWords;
#pragma GCC unroll 2
            for (int c = 0; c < kCount; ++c) its[c] = AddProducts(its[c], weights[c][i], numbers);
          }
#pragma GCC unroll 2
          for (int c = 0; c < kCount; ++c) {
            if (ends) {
              Lanes& total = totals[r * kCount + c];
              total = group.AddTo(total, its[c], factor[c][scale], minimum[c][scale], s);
            } else {
              sums[r * kCount + c] = its[c];
            }
          }
        }
      }
    }
  }
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
    const Strips<Format> own{strips + begin / kStrip * bytes, bytes};
    const bool is_one = end - begin <= kStrip && kOutputs > kStrip;
    const auto multiply =
        is_one ? MultiplyColumns<1, Format, Rows> : MultiplyColumns<kColumns, Format, Rows>;
    for (int64_t r = 0; r < shape.rows; r += kRowsATile) {
      const int64_t count = std::min(kRowsATile, shape.rows - r);
      Lanes totals[kRowsATile * kColumns] = {};
      multiply(own, rows, r, count, totals);
      const int64_t width = is_one ? kLanes : kOutputs;
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(outputs + (r + i) * shape.outputs + begin,
                    reinterpret_cast<const float*>(totals) + i * width, (end - begin) * sizeof(float));
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

#define JSPEC_PRODUCT(name, ...)                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name, (__VA_ARGS__),     \
                                ffi::Ffi::Bind()                 \
                                    .Ctx<ffi::ThreadPool>()      \
                                    .Arg<ffi::AnyBuffer>()       \
                                    .Arg<ffi::BufferR2<ffi::U8>>() \
                                    .Ret<ffi::BufferR2<ffi::F32>>())
#define JSPEC_PACKED(name, ...)                                        \
  JSPEC_PRODUCT(name##_product, Product<__VA_ARGS__, false>);          \
  JSPEC_PRODUCT(name##_byte_product, Product<__VA_ARGS__, true>)

JSPEC_PACKED(q4_0, Nibbles<false, false>);
JSPEC_PACKED(q4_1, Nibbles<false, true>);
JSPEC_PACKED(q5_0, Nibbles<true, false>);
JSPEC_PACKED(q5_1, Nibbles<true, true>);
JSPEC_PACKED(q8_0, Q8);
JSPEC_PACKED(q2_k, Q2K);
JSPEC_PACKED(q3_k, Q3K);
JSPEC_PACKED(q4_k, SixBitScales<false>);
JSPEC_PACKED(q5_k, SixBitScales<true>);
JSPEC_PACKED(q6_k, Q6K);

#endif

extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}
