// Attention of queries over the slots of a cache that they may see, and no others: what lies
// behind the last visible slot is never read, so that time follows the text and not the buffer.
//
// Scores, softmax and sums are float32. Threads go through spans of slots, whose findings are joined
// (Milakov and Gimelshein, arXiv 1805.02867): one query over a long text keeps all of them busy. A
// query's result does not depend on the queries beside it, nor on the size of the cache: it is the
// same, bit for bit, alone and in a block, as long as keys and values are finite.

#include <algorithm>
#include <memory>
#include <vector>

#include "tile_attention.h"
#include "vector_attention.h"

namespace {

using namespace jspec;

constexpr int64_t kMostKept = 1 << 14;   // queries, of 1 KB, whose findings' memory a thread keeps
constexpr int64_t kSmallWork = 1 << 17;  // multiplications not worth waking a thread for
constexpr int64_t kFewQueries = 256;     // nor joining the findings of so many

// Returns the place behind the last slot that is visible; eight at a time, as most are not.
inline int64_t End(const bool* visible, int64_t slots) {
  for (uint64_t eight; slots >= 8; slots -= 8) {
    std::memcpy(&eight, visible + slots - 8, 8);
    if (eight != 0) break;
  }
  while (slots > 0 && !visible[slots - 1]) --slots;
  return slots;
}

// Writes query q's attention: its findings joined, from the first span to the last.
template <int kQueries>
void Join(Finding<kQueries>* findings, int64_t spans, int q, int64_t dims, float* outputs) {
  float highest = kMasked, sum = 0;
  for (int64_t span = 0; span < spans; ++span) {
    highest = std::max(highest, findings[span].highest[q]);
  }
  for (int64_t span = 0; span < spans; ++span) {
    float& factor = findings[span].highest[q];
    factor = factor == highest ? 1 : Exp(Lanes{} + (factor - highest))[0];
    sum += factor * findings[span].sum[q];
  }
  const float scale = sum > 0 ? 1 / sum : 0;
  for (int64_t i = 0; i < dims; i += kLanes) {
    Lanes joined = {};
    for (int64_t span = 0; span < spans; ++span) {
      joined += findings[span].highest[q] * LoadLanes(findings[span].mixed[q] + i);
    }
    joined *= scale;
    std::memcpy(outputs + i, &joined, sizeof(joined));
  }
}

// Runs work(0) ... work(count - 1), on this thread alone if that is soon done.
template <typename Work>
void Share(ffi::ThreadPool& pool, int64_t count, bool is_small, const Work& work) {
  if (!is_small) return ShareOut(pool, count, work);
  for (int64_t piece = 0; piece < count; ++piece) work(piece);
}

// All queries of all rows and heads, by vectors or in tiles.
template <typename Way, typename T>
void Attend(ffi::ThreadPool& pool, int64_t batch, const float* queries, const T* keys,
            const T* values, const bool* visible, float* outputs, const Shape& shape) {
  using Found = Finding<Way::kQueries>;
  const int64_t all = shape.tokens * shape.group(), tokens = batch * shape.tokens;
  if (all == 0) return;
  std::vector<int64_t> ends(tokens);
  int64_t seen = 0, farthest = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    ends[token] = End(visible + token * shape.slots, shape.slots);
    seen += ends[token];
    farthest = std::max(farthest, ends[token]);
  }
  auto shared_ends = std::make_shared<const std::vector<int64_t>>(std::move(ends));
  const int64_t blocks = (all + Way::kQueries - 1) / Way::kQueries;
  const int64_t spans = std::max<int64_t>(1, (farthest + kSpan - 1) / kSpan);
  const int64_t num_blocks = batch * shape.kv_heads * blocks;  // of all rows and heads
  const int64_t num_pieces = num_blocks * spans;
  static thread_local std::vector<Found> kept;  // memory of its own for every call takes time
  std::vector<Found> own;
  std::vector<Found>& memory = num_pieces * Way::kQueries <= kMostKept ? kept : own;
  if (memory.size() < static_cast<size_t>(num_pieces)) memory.resize(num_pieces);
  Found* findings = memory.data();
  auto head_of = [=](int64_t block) {
    const int64_t row = block / (shape.kv_heads * blocks), kv_head = block / blocks % shape.kv_heads;
    const int64_t begin = (row * shape.tokens * shape.heads + kv_head * shape.group()) * shape.dims;
    const int64_t stored = (row * shape.kv_heads + kv_head) * shape.slots * shape.dims;
    return Head<T>{queries + begin, keys + stored, values + stored,
                   visible + row * shape.tokens * shape.slots,
                   shared_ends->data() + row * shape.tokens, outputs + begin};
  };
  auto attend = [=](int64_t piece) {
    const int64_t block = piece / spans, first = block % blocks * Way::kQueries;
    const int64_t count = std::min<int64_t>(all - first, Way::kQueries);
    Way::Attend(count, head_of(block), shape, first, piece % spans * kSpan, findings + piece);
  };
  auto join = [=](int64_t block) {
    const int64_t first = block % blocks * Way::kQueries;
    for (int64_t q = 0; q < Way::kQueries && first + q < all; ++q) {
      Join(findings + block * spans, spans, q, shape.dims,
           head_of(block).outputs + Offset(shape, first + q));
    }
  };
  const bool is_small = 2 * seen * shape.heads * shape.dims < kSmallWork;
  Share(pool, num_pieces, is_small, attend);
  Share(pool, num_blocks, num_blocks * Way::kQueries < kFewQueries, join);
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> queries, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::BufferR3<ffi::PRED> visible,
                     ffi::Result<ffi::BufferR4<ffi::F32>> outputs) {
  const auto of_query = queries.dimensions(), of_key = keys.dimensions();
  const Shape shape{of_query[1], of_query[2], of_key[1], of_key[2], of_query[3]};
  auto attend = [&](auto way, auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Attend<decltype(way)>(pool, of_query[0], queries.typed_data(),
                          static_cast<const T*>(keys.untyped_data()),
                          static_cast<const T*>(values.untyped_data()), visible.typed_data(),
                          outputs->typed_data(), shape);
  };
  if (keys.element_type() == ffi::F32) {
    attend(VectorAttention(), static_cast<float*>(nullptr));
    return ffi::Error::Success();
  }
#ifdef JSPEC_HAS_TILES
  if (HasTiles()) {
    attend(TileAttention(), static_cast<BFloat16*>(nullptr));
    return ffi::Error::Success();
  }
#endif
  attend(VectorAttention(), static_cast<BFloat16*>(nullptr));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::PRED>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>());
