// Products of rows with kernels packed as in GGUF files, laid out as in `kernels/packed.py`: the
// blocks of 16 outputs lie side by side, element by element. So a register holds one pair of inputs
// of all 16 outputs, a row's inputs are broadcast, and no sum is taken across lanes. Each pair of
// codes is decoded once for up to eight rows, by a shuffle that looks the codes up in a table.
//
// Codes are looked up as bfloat16, which holds them exactly; the scales are applied to the sums of
// 16 or 32 inputs, in float32. A row's result does not depend on the rows beside it.

#include "multiply.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define JSPEC_HAS_PACKED

namespace {

using namespace jspec;

constexpr int kStrip = 16;      // outputs side by side
constexpr int kMostGroups = 8;  // groups of 32 inputs in a block

using Block = const uint8_t*;

// Returns elements of `kBytes` bytes that begin at this byte of each output's block.
inline Block At(Block block, int byte) { return block + kStrip * byte; }

inline __m512 LoadHalves(Block block, int byte) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)At(block, byte)));
}

inline __m128i LoadBytes(Block block, int byte) {
  return _mm_loadu_si128((const __m128i*)At(block, byte));
}

inline __m512 Unsigned(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline __m512 Signed(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

// Returns a pair of bytes of each output as 32 words.
inline __m512i LoadPairs(Block block, int byte) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)At(block, byte)));
}

inline __m512i ShiftRight(__m512i words, int bits) {
  return _mm512_srl_epi16(words, _mm_cvtsi32_si128(bits));
}

inline __m512i ShiftLeft(__m512i words, int bits) {
  return _mm512_sll_epi16(words, _mm_cvtsi32_si128(bits));
}

// Takes the bits of `mask` from `high`, the others from `low`.
inline __m512i Select(__m512i mask, __m512i high, __m512i low) {
  return _mm512_ternarylogic_epi32(mask, high, low, 0xca);
}

// The bfloat16 numbers first, first + 1 ... for codes of up to six bits, repeated to fill the table.
template <int kBits, int kFirst>
struct Table {
  alignas(64) BFloat16 numbers[64];
  Table() {
    for (int i = 0; i < 64; ++i) numbers[i] = Rounded(i % (1 << kBits) + kFirst);
  }
  // Bits of a word above the code's are ignored.
  static __m512i Look(__m512i words) {
    static const Table table;
    const __m512i low = _mm512_load_si512(table.numbers);
    if constexpr (kBits <= 5) return _mm512_permutexvar_epi16(words, low);
    return _mm512_permutex2var_epi16(low, words, _mm512_load_si512(table.numbers + 32));
  }
};

// What a format is: bytes and groups of a block, whether 16 inputs share a scale or 32, whether a
// minimum is subtracted; Scales, which fills in both; and Codes, the bfloat16 numbers of one pair
// of a group's inputs, 0 to 15.
struct Scales {
  __m512 factor[2 * kMostGroups], minimum[2 * kMostGroups];
};

template <bool kHasMinimum>
struct Q4 {
  static constexpr int kBytes = kHasMinimum ? 20 : 18, kGroups = 1, kCodes = kBytes - 16;
  static constexpr bool kHalves = false, kMinimum = kHasMinimum;
  static void Read(Block block, Scales& scales) {
    scales.factor[0] = LoadHalves(block, 0);
    if (kMinimum) scales.minimum[0] = _mm512_sub_ps(_mm512_setzero_ps(), LoadHalves(block, 2));
  }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words = LoadPairs(block, kCodes + 2 * (pair % 8));
    return Table<4, kHasMinimum ? 0 : -8>::Look(pair < 8 ? words : _mm512_srli_epi16(words, 4));
  }
};

template <bool kHasMinimum>
struct Q5 {
  static constexpr int kBytes = kHasMinimum ? 24 : 22, kGroups = 1, kCodes = kBytes - 16;
  static constexpr bool kHalves = false, kMinimum = kHasMinimum;
  static void Read(Block block, Scales& scales) { Q4<kHasMinimum>::Read(block, scales); }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words = LoadPairs(block, kCodes + 2 * (pair % 8));
    // Bit i of each output's 32 belongs to input i: those of the pair go to bit 4 of each word.
    const __m512i bits = _mm512_loadu_si512(At(block, kCodes - 4));
    const __m512i first = _mm512_rolv_epi32(bits, _mm512_set1_epi32((4 - 2 * pair) & 31));
    const __m512i second = _mm512_rolv_epi32(bits, _mm512_set1_epi32((19 - 2 * pair) & 31));
    const __m512i low = pair < 8 ? words : _mm512_srli_epi16(words, 4);
    const __m512i with_first = Select(_mm512_set1_epi32(0x10), first, low);
    const __m512i codes = Select(_mm512_set1_epi32(0x100000), second, with_first);
    return Table<5, kHasMinimum ? 0 : -16>::Look(codes);
  }
};

struct Q8 {
  static constexpr int kBytes = 34, kGroups = 1;
  static constexpr bool kHalves = false, kMinimum = false;
  static void Read(Block block, Scales& scales) { scales.factor[0] = LoadHalves(block, 0); }
  static __m512i Codes(Block block, int, int pair) {
    const __m512i words =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)At(block, 2 + 2 * pair)));
    // Eight bits are exact in bfloat16, the upper half of a float: no rounding is needed.
    const __m512i even = (__m512i)_mm512_cvtepi32_ps(
        _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    return Select(_mm512_set1_epi32(0xffff), _mm512_srli_epi32(even, 16), odd);
  }
};

// Reads the eight 6-bit scales and minimums of Q4_K and Q5_K, packed in 12 bytes.
inline void ReadSixBits(Block block, Scales& scales) {
  const __m512 factor = LoadHalves(block, 0), minimum = LoadHalves(block, 2);
  const __m128i six = _mm_set1_epi8(0x3f), four = _mm_set1_epi8(0x0f), top = _mm_set1_epi8(0x30);
  for (int i = 0; i < 4; ++i) {
    const __m128i first = LoadBytes(block, 4 + i), second = LoadBytes(block, 8 + i);
    const __m128i both = LoadBytes(block, 12 + i);
    const auto late = [&](__m128i low, __m128i high) {
      return _mm_or_si128(_mm_and_si128(low, four), _mm_and_si128(_mm_srli_epi16(high, 2), top));
    };
    scales.factor[i] = _mm512_mul_ps(factor, Unsigned(_mm_and_si128(first, six)));
    scales.minimum[i] = _mm512_mul_ps(minimum, Unsigned(_mm_and_si128(second, six)));
    scales.factor[i + 4] = _mm512_mul_ps(factor, Unsigned(late(both, first)));
    scales.minimum[i + 4] =
        _mm512_mul_ps(minimum, Unsigned(late(_mm_srli_epi16(both, 4), second)));
  }
}

struct Q4K {
  static constexpr int kBytes = 144, kGroups = 8;
  static constexpr bool kHalves = false, kMinimum = true;
  static void Read(Block block, Scales& scales) { ReadSixBits(block, scales); }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 16 + group / 2 * 32 + 2 * pair);
    return Table<4, 0>::Look(ShiftRight(words, group % 2 * 4));
  }
};

struct Q5K {
  static constexpr int kBytes = 176, kGroups = 8;
  static constexpr bool kHalves = false, kMinimum = true;
  static void Read(Block block, Scales& scales) { ReadSixBits(block, scales); }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i low = ShiftRight(LoadPairs(block, 48 + group / 2 * 32 + 2 * pair), group % 2 * 4);
    // Bit `group` of the other byte is the fifth.
    const __m512i high = ShiftLeft(ShiftRight(LoadPairs(block, 16 + 2 * pair), group), 4);
    return Table<5, 0>::Look(Select(_mm512_set1_epi16(0x10), high, low));
  }
};

struct Q6K {
  static constexpr int kBytes = 210, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static void Read(Block block, Scales& scales) {
    const __m512 factor = LoadHalves(block, 208);
    for (int i = 0; i < 16; ++i) {
      scales.factor[i] = _mm512_mul_ps(factor, Signed(LoadBytes(block, 192 + i)));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const int half = group / 4, quarter = group % 4;
    const __m512i four = LoadPairs(block, 64 * half + quarter % 2 * 32 + 2 * pair);
    const __m512i two = LoadPairs(block, 128 + 32 * half + 2 * pair);
    const __m512i low = ShiftRight(four, quarter / 2 * 4);
    const __m512i high = ShiftLeft(ShiftRight(two, 2 * quarter), 4);
    return Table<6, -32>::Look(Select(_mm512_set1_epi16(0x30), high, low));
  }
};

struct Q2K {
  static constexpr int kBytes = 84, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = true;
  static void Read(Block block, Scales& scales) {
    const __m512 factor = LoadHalves(block, 80), minimum = LoadHalves(block, 82);
    const __m128i four = _mm_set1_epi8(0x0f);
    for (int i = 0; i < 16; ++i) {
      const __m128i both = LoadBytes(block, i);
      const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), four);
      scales.factor[i] = _mm512_mul_ps(factor, Unsigned(_mm_and_si128(both, four)));
      scales.minimum[i] = _mm512_mul_ps(minimum, Unsigned(high));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 16 + group / 4 * 32 + 2 * pair);
    return Table<2, 0>::Look(ShiftRight(words, group % 4 * 2));
  }
};

struct Q3K {
  static constexpr int kBytes = 110, kGroups = 8;
  static constexpr bool kHalves = true, kMinimum = false;
  static void Read(Block block, Scales& scales) {
    const __m512 factor = LoadHalves(block, 108), middle = _mm512_set1_ps(32);
    const __m128i four = _mm_set1_epi8(0x0f), top = _mm_set1_epi8(0x30);
    for (int i = 0; i < 16; ++i) {
      // Four bits of byte i % 8, the lower ones first; two of byte 8 + i % 4, a pair for each i / 4.
      const __m128i low = _mm_srli_epi16(LoadBytes(block, 96 + i % 8), i / 8 * 4);
      const __m128i high = _mm_srli_epi16(LoadBytes(block, 104 + i % 4), i / 4 * 2);
      const __m128i code = _mm_or_si128(_mm_and_si128(low, four),
                                        _mm_and_si128(_mm_slli_epi16(high, 4), top));
      scales.factor[i] = _mm512_mul_ps(factor, _mm512_sub_ps(Unsigned(code), middle));
    }
  }
  static __m512i Codes(Block block, int group, int pair) {
    const __m512i words = LoadPairs(block, 32 + group / 4 * 32 + 2 * pair);
    const __m512i low = ShiftRight(words, group % 4 * 2);
    const __m512i high = ShiftLeft(ShiftRight(LoadPairs(block, 2 * pair), group), 2);
    return Table<3, -4>::Look(Select(_mm512_set1_epi16(0x4), high, low));
  }
};

#ifdef __AVX512BF16__
// Rows of pairs of bfloat16 numbers, two of which are multiplied by one instruction.
struct Pairs {
  using Number = BFloat16;
  using Weights = __m512bh;
  static Weights From(__m512i codes) { return (__m512bh)codes; }
  static __m512 Add(__m512 sum, Weights weights, const Number* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi32(both));
  }
};
#endif

struct Floats {
  using Number = float;
  using Weights = Pair;
  static Weights From(__m512i codes) {
    const Words words = (Words)codes;
    return {(Lanes)(words << 16), (Lanes)(words & 0xffff0000u)};
  }
  static __m512 Add(__m512 sum, const Weights& weights, const Number* pair) {
    sum = _mm512_fmadd_ps((__m512)weights.first, _mm512_set1_ps(pair[0]), sum);
    return _mm512_fmadd_ps((__m512)weights.second, _mm512_set1_ps(pair[1]), sum);
  }
};

// The rows, and the sum of every 16 or 32 of a row's inputs, which a minimum is multiplied by.
template <typename Number>
struct Inputs {
  Rows<Number> rows;
  const float* sums;
  int64_t num_sums;
};

// Computes the outputs of a strip for kRows rows.
template <int kRows, typename Format, typename Multiplier, typename Number>
void MultiplyRowsByStrip(Block strip, int64_t blocks, const Inputs<Number>& inputs,
                         float (*outputs)[kStrip]) {
  constexpr int kPairs = 16, kSize = kStrip * Format::kBytes;
  constexpr int kSumsPerGroup = Format::kHalves ? 2 : 1;
  __m512 total[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    const Block block = strip + b * kSize;
    Scales scales;
    Format::Read(block, scales);
    for (int g = 0; g < Format::kGroups; ++g) {
      const int64_t group = b * Format::kGroups + g;
      for (int line = 0; line < kSize / Format::kGroups; line += kCacheLine) {
        __builtin_prefetch(block + g * (kSize / Format::kGroups) + kAhead + line);
      }
      __m512 first[kRows], second[kRows];  // of the group's two halves
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) first[r] = second[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs / 2; ++pair) {
        const auto one = Multiplier::From(Format::Codes(block, g, pair));
        const auto other = Multiplier::From(Format::Codes(block, g, pair + kPairs / 2));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Number* from = inputs.rows[r] + 2 * (group * kPairs + pair);
          first[r] = Multiplier::Add(first[r], one, from);
          second[r] = Multiplier::Add(second[r], other, from + kPairs);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        if constexpr (Format::kHalves) {
          total[r] = _mm512_fmadd_ps(first[r], scales.factor[2 * g], total[r]);
          total[r] = _mm512_fmadd_ps(second[r], scales.factor[2 * g + 1], total[r]);
        } else {
          total[r] = _mm512_fmadd_ps(_mm512_add_ps(first[r], second[r]), scales.factor[g], total[r]);
        }
        for (int i = 0; Format::kMinimum && i < kSumsPerGroup; ++i) {
          const int64_t place = r * inputs.num_sums + group * kSumsPerGroup + i;
          const __m512 sum = _mm512_set1_ps(inputs.sums[place]);
          total[r] = _mm512_fnmadd_ps(scales.minimum[g * kSumsPerGroup + i], sum, total[r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(outputs[r], total[r]);
}

template <int kRows, typename Format, typename Multiplier, typename Number>
void MultiplyStrip(int64_t count, Block strip, int64_t blocks, const Inputs<Number>& inputs,
                   float (*outputs)[kStrip]) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      return MultiplyStrip<kRows - 1, Format, Multiplier>(count, strip, blocks, inputs, outputs);
    }
  }
  MultiplyRowsByStrip<kRows, Format, Multiplier>(strip, blocks, inputs, outputs);
}

template <typename Format, typename Multiplier, typename T>
void Multiply(ffi::ThreadPool& pool, const T* from, Block kernel, float* outputs,
              const ProductShape& shape) {
  using Number = typename Multiplier::Number;
  constexpr int kShared = Format::kHalves ? 16 : 32;  // inputs that share a scale
  static thread_local Space<Number> space;
  static thread_local Space<float> sum_space;
  const int64_t num_sums = Format::kMinimum ? shape.inputs / kShared : 0;
  Number* numbers = space.Take(shape.rows * shape.inputs);
  float* sums = sum_space.Take(shape.rows * num_sums + 1);
  for (int64_t i = 0; i < shape.rows * shape.inputs; ++i) {
    if constexpr (std::is_same_v<Number, T>) numbers[i] = from[i];
    else numbers[i] = AsFloat(from[i]);
  }
  for (int64_t i = 0; i < shape.rows * num_sums; ++i) {
    sums[i] = 0;
    for (int j = 0; j < kShared; ++j) sums[i] += AsFloat(numbers[i * kShared + j]);
  }
  const int64_t blocks = shape.inputs / (32 * Format::kGroups);
  const int64_t strip_bytes = blocks * kStrip * Format::kBytes;
  ForTiles<kStrip>(pool, shape, kStrip, [=](int64_t begin, int64_t end) {
    const Block strip = kernel + begin / kStrip * strip_bytes;
    for (int64_t r = 0; r < shape.rows; r += kMaxRows) {
      const int64_t count = std::min<int64_t>(kMaxRows, shape.rows - r);
      const Rows<Number> rows{numbers + r * shape.inputs, shape.inputs};
      const Inputs<Number> inputs{rows, sums + r * num_sums, num_sums};
      float found[kMaxRows][kStrip];
      MultiplyStrip<kMaxRows, Format, Multiplier>(count, strip, blocks, inputs, found);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(found[i], end - begin, outputs + (r + i) * shape.outputs + begin);
      }
    }
  });
}

template <typename Format>
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::BufferR2<ffi::U8> kernel,
                   ffi::Result<ffi::BufferR2<ffi::F32>> outputs) {
  const ProductShape shape{rows.dimensions()[0], rows.dimensions()[1], outputs->dimensions()[1]};
  if (shape.rows == 0 || shape.outputs == 0) return ffi::Error::Success();
  const Block from = kernel.typed_data();
  float* to = outputs->typed_data();
  if (rows.element_type() == ffi::F32) {
    const auto* numbers = static_cast<const float*>(rows.untyped_data());
    Multiply<Format, Floats>(pool, numbers, from, to, shape);
  } else {
    const auto* numbers = static_cast<const BFloat16*>(rows.untyped_data());
#ifdef __AVX512BF16__
    Multiply<Format, Pairs>(pool, numbers, from, to, shape);
#else
    Multiply<Format, Floats>(pool, numbers, from, to, shape);
#endif
  }
  return ffi::Error::Success();
}

}  // namespace

#define JSPEC_PACKED(name, Format)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_##name##_product, Product<Format>,      \
                                ffi::Ffi::Bind()                              \
                                    .Ctx<ffi::ThreadPool>()                   \
                                    .Arg<ffi::AnyBuffer>()                    \
                                    .Arg<ffi::BufferR2<ffi::U8>>()            \
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

namespace {

constexpr int64_t kSide = 16;  // outputs of a strip

// Lays elements of one field of 16 outputs side by side. Outputs past the last are zeros.
template <typename Element>
void Interleave(const uint8_t* from, int64_t stride, int64_t outputs, int64_t count, uint8_t* to) {
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t e = 0; e < count; ++e) {
      std::memcpy(to + (e * kSide + o) * sizeof(Element), from + o * stride + e * sizeof(Element),
                  sizeof(Element));
    }
  }
}

xla::ffi::Error Pack(xla::ffi::ThreadPool pool, xla::ffi::BufferR2<xla::ffi::U8> rows,
                     xla::ffi::BufferR2<xla::ffi::S32> fields,
                     xla::ffi::Result<xla::ffi::BufferR2<xla::ffi::U8>> strips) {
  const int64_t num_rows = rows.dimensions()[0], row_bytes = rows.dimensions()[1];
  const int64_t num_fields = fields.dimensions()[0];
  const int32_t* field = fields.typed_data();
  int64_t block_bytes = 0;
  for (int64_t f = 0; f < num_fields; ++f) block_bytes += field[2 * f] * field[2 * f + 1];
  const uint8_t* from = rows.typed_data();
  uint8_t* to = strips->typed_data();
  jspec::ShareOut(pool, strips->dimensions()[0], [=](int64_t strip) {
    const int64_t outputs = std::min(kSide, num_rows - strip * kSide);
    uint8_t* out = to + strip * kSide * row_bytes;
    if (outputs < kSide) std::memset(out, 0, kSide * row_bytes);
    for (int64_t byte = 0; byte < row_bytes; byte += block_bytes) {
      const uint8_t* in = from + strip * kSide * row_bytes + byte;
      for (int64_t f = 0; f < num_fields; ++f) {
        const int64_t size = field[2 * f], count = field[2 * f + 1];
        const auto interleave = size == 1   ? Interleave<uint8_t>
                                : size == 2 ? Interleave<uint16_t>
                                            : Interleave<uint32_t>;
        interleave(in, row_bytes, outputs, count, out);
        in += size * count;
        out += kSide * size * count;
      }
    }
  });
  return xla::ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_pack, Pack,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::U8>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::U8>>());

extern "C" bool jspec_has_packed() {
#ifdef JSPEC_HAS_PACKED
  return true;
#else
  return false;
#endif
}
