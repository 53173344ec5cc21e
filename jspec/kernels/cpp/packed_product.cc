// Products of rows with kernels packed as in GGUF files. The weights of 32 outputs and 256 inputs
// are decoded at a time, into tiles that stay in the processor's first cache, and all rows are
// multiplied from there: each code is decoded once, and no sum is taken across lanes.
//
// The scales are applied to the sums of 16 or 32 inputs, in float32. A row's sums are taken in one
// order, however many rows share a pass: its result does not depend on the rows beside it.

#include "multiply.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define JSPEC_HAS_PACKED
#include "packed_tiles.h"

namespace {

using namespace jspec;

inline __m512 LoadSixteen(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 LoadSixteen(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (__m512)_mm512_slli_epi32(wide, 16);
}

// Returns the sums of every kShared numbers of each row.
template <int kShared, typename Number>
Rows<float> SumUp(ffi::ThreadPool& pool, Rows<Number> rows, int64_t count, Space<float>& space) {
  const int64_t num_sums = rows.stride / kShared;
  float* sums = space.Take(count * num_sums);
  ForRows(pool, count, rows.stride, [=](int64_t r) {
    for (int64_t i = 0; i < num_sums; ++i) {
      __m512 numbers = LoadSixteen(rows[r] + i * kShared);
      if (kShared > 16) numbers = _mm512_add_ps(numbers, LoadSixteen(rows[r] + i * kShared + 16));
      sums[r * num_sums + i] = _mm512_reduce_add_ps(numbers);
    }
  });
  return {sums, num_sums};
}

struct Kernel {
  Block strips;
  int64_t group_bytes;  // of a strip
  Decode decode;
};

template <typename Scaling, typename Multiplier, typename Number>
void Multiply(ffi::ThreadPool& pool, const Number* from, const Kernel& kernel, float* outputs,
              const ProductShape& shape) {
  static thread_local Space<float> space;
  Inputs<Number> all{{from, shape.inputs}, {nullptr, 0}};
  if (Scaling::kMinimum) all.sums = SumUp<Scaling::kShared>(pool, all.rows, shape.rows, space);
  const int64_t groups = shape.inputs / 32;
  constexpr int kOutputs = kStrips * kStrip;
  ForTiles<kOutputs>(pool, shape, kOutputs, [=](int64_t begin, int64_t end) {
    const int64_t strip_bytes = groups * kernel.group_bytes;
    const Block strip = kernel.strips + begin / kStrip * strip_bytes;
    // Where there is no second strip, the first one is multiplied twice.
    const int64_t second = begin + kStrip < end ? strip_bytes : 0;
    Tile tiles[kStrips];
    for (int64_t r = 0; r < shape.rows; r += kRowsATile) {
      const int64_t count = std::min<int64_t>(kRowsATile, shape.rows - r);
      const Inputs<Number> inputs{{all.rows[r], shape.inputs}, {all.sums[r], all.sums.stride}};
      float totals[kRowsATile][kStrips][kStrip] = {};
      for (int64_t g = 0; g < groups; g += kMostGroups) {
        const int own = std::min<int64_t>(kMostGroups, groups - g);
        const Block block = strip + g * kernel.group_bytes;
        kernel.decode(block, own, tiles[0]);
        kernel.decode(block + second, own, tiles[1]);
        MultiplyRowsByTiles<8, Scaling, Multiplier>(tiles, own, inputs, g, totals, count);
      }
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(totals[i][0], end - begin, outputs + (r + i) * shape.outputs + begin);
      }
    }
  });
}

template <typename Scaling>
void MultiplyAny(ffi::ThreadPool& pool, const ffi::AnyBuffer& rows, const Kernel& kernel,
                 float* outputs, const ProductShape& shape) {
  if (rows.element_type() == ffi::F32) {
    const auto* numbers = static_cast<const float*>(rows.untyped_data());
    return Multiply<Scaling, Floats>(pool, numbers, kernel, outputs, shape);
  }
  const auto* numbers = static_cast<const BFloat16*>(rows.untyped_data());
#ifdef __AVX512BF16__
  Multiply<Scaling, Pairs>(pool, numbers, kernel, outputs, shape);
#else
  static thread_local Space<float> space;
  float* floats = space.Take(shape.rows * shape.inputs);
  for (int64_t i = 0; i < shape.rows * shape.inputs; ++i) floats[i] = AsFloat(numbers[i]);
  Multiply<Scaling, Floats>(pool, (const float*)floats, kernel, outputs, shape);
#endif
}

template <typename Format>
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], outputs->dimensions()[1]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  const int64_t group_bytes = kStrip * Format::kBytes / Format::kGroups;
  const Kernel packed{kernel.typed_data(), group_bytes, DecodeBlocks<Format>};
  using Own = Scaling<Format::kHalves, Format::kMinimum>;
  MultiplyAny<Own>(pool, rows, packed, outputs->typed_data(), shape);
  return ffi::Error::Success();
}

}  // namespace

#define JSPEC_PACKED(name, Format)                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name##_product, Product<Format>, \
                                ffi::Ffi::Bind()                         \
                                    .Ctx<ffi::ThreadPool>()              \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::BufferR2<ffi::U8>>()       \
                                    .Ret<ffi::BufferR2<ffi::F32>>())

JSPEC_PACKED(q4_0, Q4<false>);
JSPEC_PACKED(q4_1, Q4<true>);
JSPEC_PACKED(q5_0, Q5<false>);
JSPEC_PACKED(q5_1, Q5<true>);
JSPEC_PACKED(q8_0, Q8);
JSPEC_PACKED(q2_k, Q2K);
JSPEC_PACKED(q3_k, Q3K);
JSPEC_PACKED(q4_k, Q4K);
JSPEC_PACKED(q5_k, Q5K);
JSPEC_PACKED(q6_k, Q6K);

#endif

extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}
