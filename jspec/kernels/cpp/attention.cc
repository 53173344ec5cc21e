// Attention of queries over the slots of a cache that they may see. Slots after the last visible
// one are never read, so the time follows the length of the text and not the size of the buffer.
//
// Scores, softmax and sums are float32. The slots are cut into spans. Each span gives partial
// results relative to its own highest score, which are joined at the end (Milakov and Gimelshein,
// arXiv 1805.02867), so even one query over a long text keeps all threads busy. A query's result
// depends neither on the queries beside it nor on the size of the cache: it is the same, bit for
// bit, alone and in a block, as long as keys and values are finite.
//
// Slots may lie in pages, in any order: a table says which page holds a row's next ones. A cache
// without pages is one page a row. The order of the sums is that of the slots, not of the pages.

#include <algorithm>
#include <numeric>
#include <vector>

#include "lanes.h"

namespace {

using namespace jspec;

constexpr float kMasked = -1e30f;
constexpr int kMaxQueries = 4;  // queries that share one reading of keys and values
constexpr int kSlots = kLanes / kMaxQueries;  // slots whose scores are computed at a time
constexpr int kMaxSteps = 256 / kStep;        // steps of a head: at most 256 dimensions
constexpr int64_t kSpan = 512;          // slots of a span, which one thread reads
constexpr int64_t kMostKept = 1 << 22;  // floats of partial results whose memory a thread keeps
constexpr int64_t kSlotsAhead = 64;     // how far ahead memory is asked for slots
constexpr int64_t kSmallWork = 1 << 17;  // multiplications that are not worth waking a thread for
constexpr int64_t kFewBlocks = 64;       // blocks whose joining is not worth it either

struct Shape {
  int64_t tokens, heads, kv_heads, slots, dims;
  int64_t page;  // slots of a page, a multiple of kSlots or all of a row's
  int64_t group() const { return heads / kv_heads; }
};

// One row and one key/value head. Query q of the tokens * group ones is that of token q / group.
template <typename T>
struct Head {
  const float* queries;  // of the row's first token and the group's first head
  const T* keys;         // of this head in page 0
  const T* values;
  const int32_t* table;  // the row's pages
  const bool* visible;
  const int64_t* ends;  // one past the last slot that each token sees
  float* outputs;
};

inline float Highest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float highest = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = std::max(highest, lanes[lane]);
  return highest;
#endif
}

// The scores of kLanes slots, kMasked where a slot is not visible. It is written by hand, because
// compilers widen the bytes of the mask one by one.
inline Lanes Masked(const float* scores, const bool* visible) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(visible));
  const __mmask16 is_visible = _mm_test_epi8_mask(flags, flags);
  return (Lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(kMasked), is_visible, scores);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i flags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(visible));
  return (Words)_mm256_cvtepu8_epi32(flags) != 0 ? LoadLanes(scores) : Lanes{} + kMasked;
#else
  Lanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = visible[lane] ? scores[lane] : kMasked;
  return lanes;
#endif
}

// The same for only `count` slots; kMasked for the others.
inline Lanes Masked(const float* scores, const bool* visible, int64_t count) {
  if (count >= kLanes) return Masked(scores, visible);
  bool flags[kLanes] = {};
  std::copy_n(visible, count, flags);
  return Masked(scores, flags);
}

// Turns the scores of one query for `count` slots into weights relative to the highest, 0 where a
// slot is not visible and up to the next multiple of kLanes.
inline void Weigh(float* scores, const bool* visible, int64_t count, float* highest, float* sum) {
  Lanes most = Lanes{} + kMasked, total = {}, lanes;
  for (int64_t s = 0; s < count; s += kLanes) {
    lanes = Masked(scores + s, visible + s, count - s);
    most = lanes > most ? lanes : most;
    std::memcpy(scores + s, &lanes, sizeof(lanes));
  }
  *highest = Highest(most);
  const float base = *highest == kMasked ? 0 : *highest;
  for (int64_t s = 0; s < count; s += kLanes) {
    lanes = ExpOfNegative(LoadLanes(scores + s) - base);
    total += lanes;
    std::memcpy(scores + s, &lanes, sizeof(lanes));
  }
  *sum = Total(total);
}

// Returns one past the last visible slot. Eight flags are read at a time, as most slots of a buffer
// are not visible.
inline int64_t End(const bool* visible, int64_t slots) {
  for (uint64_t eight; slots >= 8; slots -= 8) {
    std::memcpy(&eight, visible + slots - 8, 8);
    if (eight != 0) break;
  }
  while (slots > 0 && !visible[slots - 1]) --slots;
  return slots;
}

// Where a slot of a head lies after the head's first one in page 0, and how far after it memory is
// asked for ahead: at the same place of the next page, or in the same page if that is the last.
struct Place {
  int64_t at, ahead;
};

inline Place PlaceOf(const Shape& shape, const int32_t* table, int64_t slot) {
  const int64_t page = slot / shape.page, stride = shape.kv_heads * shape.page * shape.dims;
  const bool is_last = (page + 1) * shape.page >= shape.slots;
  return {table[page] * stride + slot % shape.page * shape.dims,
          is_last ? kSlotsAhead * shape.dims : (int64_t{table[page + 1]} - table[page]) * stride};
}

inline int64_t Offset(const Shape& shape, int64_t query) {
  return (query / shape.group() * shape.heads + query % shape.group()) * shape.dims;
}

// The partial result of some queries over one span of slots. For each query: its highest score, the
// sum of the weights exp(score - highest), and the sum of the values with these weights.
struct Finding {
  float *mixed, *highest, *sum;  // [kMaxQueries dims], [kMaxQueries], [kMaxQueries]
};

struct Findings {
  float* memory;
  int64_t dims;

  // Floats of each finding, padded so that every one begins at a cache line.
  static int64_t Numbers(int64_t dims) { return kMaxQueries * dims + 16; }
  Finding operator[](int64_t index) const {
    float* mixed = memory + index * Numbers(dims);
    float* highest = mixed + kMaxQueries * dims;
    return {mixed, highest, highest + kMaxQueries};
  }
};

template <int kQueries, int kSteps, typename T>
void AttendSpan(const Head<T>& head, const Shape& shape, int64_t first, int64_t begin,
                const Finding& finding) {
  const bool* visible[kQueries];
  int64_t end = begin;
  for (int q = 0; q < kQueries; ++q) {
    const int64_t token = (first + q) / shape.group();
    visible[q] = head.visible + token * shape.slots;
    end = std::max(end, std::min(head.ends[token], begin + kSpan));
  }
  float scores[kMaxQueries][kSpan];
  {
    Pair queries[kQueries][kSteps];
    for (int q = 0; q < kQueries; ++q) {
      for (int i = 0; i < kSteps; ++i) {
        queries[q][i] = LoadLike<T>(head.queries + Offset(shape, first + q) + i * kStep);
      }
    }
    for (int64_t s = begin, stop; s < end; s = stop) {
      stop = std::min(end, s - s % shape.page + shape.page);
      const Place place = PlaceOf(shape, head.table, s);
      const T* keys = head.keys + place.at - s * shape.dims;
      for (; s < stop; s += kSlots) {
        Lanes sums[kMaxQueries * kSlots];  // uninitialised: clearing it would be a call of memset
        for (int slot = 0; slot < kSlots; ++slot) {
          const T* from = keys + std::min(s + slot, end - 1) * shape.dims;
          Pair key[kSteps];
          for (int i = 0; i < kSteps; ++i) {
            key[i] = Load(from + i * kStep);
            __builtin_prefetch(from + place.ahead + i * kStep);
          }
          for (int q = 0; q < kMaxQueries; ++q) {
            Lanes sum = {};
            for (int i = 0; i < kSteps && q < kQueries; ++i) {
              sum = AddProducts(sum, queries[q][i], key[i]);
            }
            sums[q * kSlots + slot] = sum;
          }
        }
        const Lanes totals = Totals(sums);
        for (int q = 0; q < kQueries; ++q) {
          std::memcpy(scores[q] + (s - begin),
                      reinterpret_cast<const float*>(&totals) + q * kSlots,
                      kSlots * sizeof(float));
        }
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    Weigh(scores[q], visible[q] + begin, end - begin, finding.highest + q, finding.sum + q);
  }
  Pair mixed[kQueries][kSteps] = {};
  for (int64_t s = begin, stop; s < end; s = stop) {
    stop = std::min(end, s - s % shape.page + shape.page);
    const Place place = PlaceOf(shape, head.table, s);
    const T* from = head.values + place.at;
    for (; s < stop; ++s, from += shape.dims) {
      for (int i = 0; i < kSteps; ++i) {
        const Pair value = Load(from + i * kStep);
        __builtin_prefetch(from + place.ahead + i * kStep);
        for (int q = 0; q < kQueries; ++q) {
          // Broadcasts the weight. "0 + weight" would be a real addition, because of -0.
          const Lanes weight = scores[q][s - begin] - Lanes{};
          mixed[q][i].first = MultiplyAdd(mixed[q][i].first, weight, value.first);
          mixed[q][i].second = MultiplyAdd(mixed[q][i].second, weight, value.second);
        }
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    std::memcpy(finding.mixed + q * shape.dims, mixed[q], sizeof(mixed[q]));
  }
}

// Writes query q's attention: its findings of all spans, from the one at `first` on, joined in
// order.
template <typename T>
void Join(const Findings& findings, int64_t first, int64_t spans, int q, float* outputs) {
  float highest = kMasked, sum = 0;
  for (int64_t span = first; span < first + spans; ++span) {
    highest = std::max(highest, findings[span].highest[q]);
  }
  for (int64_t span = first; span < first + spans; ++span) {
    float& factor = findings[span].highest[q];
    // Rescales the span to the highest score of all; exactly 1 where it is the span's own.
    factor = factor == highest ? 1 : ExpOfNegative(Lanes{} + (factor - highest))[0];
    sum += factor * findings[span].sum[q];
  }
  const float scale = sum > 0 ? 1 / sum : 0;  // a query that sees nothing gives zeros
  for (int64_t i = 0; i < findings.dims; i += kStep) {
    Pair joined = {};
    for (int64_t span = first; span < first + spans; ++span) {
      const Pair mixed = Load(findings[span].mixed + q * findings.dims + i);
      joined.first += findings[span].highest[q] * mixed.first;
      joined.second += findings[span].highest[q] * mixed.second;
    }
    StoreLike<T>(outputs + i, {joined.first * scale, joined.second * scale});
  }
}

// Picks the instance of AttendSpan for `count` queries, at most kQueries, and heads of `steps`
// steps, a power of two. Sizes known at compile time keep the sums in registers.
template <int kQueries = kMaxQueries, int kSteps = kMaxSteps, typename T>
void AttendQueries(int64_t count, int64_t steps, const Head<T>& head, const Shape& shape,
                   int64_t first, int64_t begin, const Finding& finding) {
  if constexpr (kSteps > 1) {
    if (steps < kSteps) {
      return AttendQueries<kQueries, kSteps / 2>(count, steps, head, shape, first, begin, finding);
    }
  }
  if constexpr (kQueries > 1) {
    if (count < kQueries) {
      return AttendQueries<kQueries - 1, kSteps>(count, steps, head, shape, first, begin, finding);
    }
  }
  AttendSpan<kQueries, kSteps>(head, shape, first, begin, finding);
}

template <typename T>
void Attend(ffi::ThreadPool& pool, int64_t batch, const float* queries, T* keys, T* values,
            const bool* visible, const int32_t* table, float* outputs, const Shape& shape) {
  const int64_t all = shape.tokens * shape.group(), tokens = batch * shape.tokens;
  if (all == 0) return;
  std::vector<int64_t> ends(tokens);
  int64_t seen = 0, farthest = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    ends[token] = End(visible + token * shape.slots, shape.slots);
    seen += ends[token];
    farthest = std::max(farthest, ends[token]);
  }
  const int64_t blocks = (all + kMaxQueries - 1) / kMaxQueries;
  const int64_t spans = std::max<int64_t>(1, (farthest + kSpan - 1) / kSpan);
  const int64_t num_blocks = batch * shape.kv_heads * blocks;  // of all rows and heads
  const int64_t numbers = num_blocks * spans * Findings::Numbers(shape.dims);
  static thread_local Space<float> kept;  // allocating anew for every call takes time
  Space<float> own;
  const Findings findings{(numbers <= kMostKept ? kept : own).Take(numbers), shape.dims};
  auto head_of = [&](int64_t block) {
    const int64_t row = block / (shape.kv_heads * blocks), kv_head = block / blocks % shape.kv_heads;
    const int64_t begin = (row * shape.tokens * shape.heads + kv_head * shape.group()) * shape.dims;
    const int64_t stored = kv_head * shape.page * shape.dims;
    return Head<T>{queries + begin, keys + stored, values + stored,
                   table + row * shape.slots / shape.page,
                   visible + row * shape.tokens * shape.slots, ends.data() + row * shape.tokens,
                   outputs + begin};
  };
  auto attend = [&](int64_t piece) {
    const int64_t block = piece / spans, first = block % blocks * kMaxQueries;
    const int64_t count = std::min<int64_t>(all - first, kMaxQueries);
    AttendQueries(count, shape.dims / kStep, head_of(block), shape, first, piece % spans * kSpan,
                  findings[piece]);
  };
  auto join = [&](int64_t block) {
    const int64_t first = block % blocks * kMaxQueries;
    for (int64_t q = 0; q < kMaxQueries && first + q < all; ++q) {
      Join<T>(findings, block * spans, spans, q,
              head_of(block).outputs + Offset(shape, first + q));
    }
  };
  const bool is_small = 2 * seen * shape.heads * shape.dims < kSmallWork;
  ShareOut(pool, num_blocks * spans, attend, is_small);
  ShareOut(pool, num_blocks, join, num_blocks < kFewBlocks);
}

ffi::Error AttendAll(ffi::ThreadPool& pool, const ffi::BufferR4<ffi::F32>& queries,
                     ffi::AnyBuffer keys, const ffi::AnyBuffer& values,
                     const ffi::BufferR3<ffi::PRED>& visible, const int32_t* table,
                     ffi::Result<ffi::BufferR4<ffi::F32>> outputs) {
  const auto of_query = queries.dimensions(), of_key = keys.dimensions();
  const Shape shape{of_query[1], of_query[2], of_key[1], visible.dimensions()[2], of_query[3],
                    of_key[2]};
  return WithNumbers(keys, [&](auto* from) {
    Attend(pool, of_query[0], queries.typed_data(), from,
           static_cast<decltype(from)>(values.untyped_data()), visible.typed_data(), table,
           outputs->typed_data(), shape);
  });
}

ffi::Error Attention(Threads pool, ffi::BufferR4<ffi::F32> queries, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::BufferR3<ffi::PRED> visible,
                     ffi::Result<ffi::BufferR4<ffi::F32>> outputs) {
  std::vector<int32_t> rows(queries.dimensions()[0]);  // one page each
  std::iota(rows.begin(), rows.end(), 0);
  return AttendAll(pool, queries, keys, values, visible, rows.data(), outputs);
}

ffi::Error AttendPages(Threads pool, ffi::BufferR4<ffi::F32> queries, ffi::AnyBuffer keys,
                       ffi::AnyBuffer values, ffi::BufferR3<ffi::PRED> visible,
                       ffi::BufferR2<ffi::S32> table,
                       ffi::Result<ffi::BufferR4<ffi::F32>> outputs) {
  return AttendAll(pool, queries, keys, values, visible, table.typed_data(), outputs);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_attention, Attention);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_attend_pages, AttendPages);
