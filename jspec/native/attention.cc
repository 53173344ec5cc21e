// Attention of a few queries over the slots of a cache that they may see, and no others: what lies
// behind the last visible slot is never read, so that time follows the text and not the buffer.
//
// Scores, softmax and sums are float32. A query's result does not depend on the queries beside it,
// nor on the size of the cache: it is the same, bit for bit, alone and in a block.

#include "lanes.h"

#include <algorithm>
#include <vector>

namespace {

using namespace jspec;

constexpr int kMaxQueries = 4;  // that share one reading of keys and values
constexpr int kMaxSteps = 8;    // of a head: 256 dimensions
constexpr float kMasked = -1e30f;
constexpr int64_t kSmallWork = 1 << 17;  // multiplications not worth waking a thread for

// exp(x) of x <= 0, to two units in the last place; 0 below -87.
inline Lanes Exp(Lanes x) {
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const auto is_tiny = x < -87.0f;
  x = is_tiny ? Lanes{} : x;
  const Lanes shifted = x * 1.44269504f + magic;
  const Lanes whole = shifted - magic;
  const Lanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Lanes sum = Lanes{} + 1.9875691500e-4f;  // Cephes' polynomial
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Words exponent = ((Words)shifted + 127u) << 23;
  return is_tiny ? Lanes{} : sum * (Lanes)exponent;
}

struct Shape {
  int64_t tokens, heads, kv_heads, slots, dims;
  int64_t group() const { return heads / kv_heads; }
};

// One row and one key/value head. Query q of the tokens * group ones is that of token q / group.
template <typename T>
struct Head {
  const float* queries;  // of the row's first token and the group's first head
  const T* keys;
  const T* values;
  const bool* visible;
  const int64_t* ends;  // behind the last slot that each token sees
  float* outputs;
};

// Returns the place behind the last slot that is visible; eight at a time, as most are not.
inline int64_t End(const bool* visible, int64_t slots) {
  for (uint64_t eight; slots >= 8; slots -= 8) {
    std::memcpy(&eight, visible + slots - 8, 8);
    if (eight != 0) break;
  }
  while (slots > 0 && !visible[slots - 1]) --slots;
  return slots;
}

inline int64_t Offset(const Shape& shape, int64_t query) {
  return (query / shape.group() * shape.heads + query % shape.group()) * shape.dims;
}

// Turns scores into weights that sum to 1, all 0 if no slot is visible. `count` is a multiple of
// kLanes, and what is not visible is kMasked.
inline void Softmax(float* scores, int64_t count) {
  Lanes most = Lanes{} + kMasked, total = {}, lanes;
  for (int64_t s = 0; s < count; s += kLanes) {
    std::memcpy(&lanes, scores + s, sizeof(lanes));
    most = lanes > most ? lanes : most;
  }
  float highest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = most[lane] > highest ? most[lane] : highest;
  if (highest == kMasked) highest = 0;
  for (int64_t s = 0; s < count; s += kLanes) {
    std::memcpy(&lanes, scores + s, sizeof(lanes));
    lanes = Exp(lanes - highest);
    total += lanes;
    std::memcpy(scores + s, &lanes, sizeof(lanes));
  }
  const float sum = Total(total);
  const float scale = sum > 0 ? 1 / sum : 0;
  for (int64_t s = 0; s < count; ++s) scores[s] *= scale;
}

template <int kQueries, int kSteps, typename T>
void AttendBlock(const Head<T>& head, const Shape& shape, int64_t first) {
  const bool* visible[kQueries];
  int64_t end = 0;
  for (int q = 0; q < kQueries; ++q) {
    const int64_t token = (first + q) / shape.group();
    visible[q] = head.visible + token * shape.slots;
    end = std::max(end, head.ends[token]);
  }
  const int64_t padded = (end + kLanes - 1) / kLanes * kLanes;
  static thread_local std::vector<float> scratch;
  scratch.assign(kQueries * padded, kMasked);
  {
    Pair queries[kQueries][kSteps];
    for (int q = 0; q < kQueries; ++q) {
      for (int i = 0; i < kSteps; ++i) {
        queries[q][i] = LoadLike<T>(head.queries + Offset(shape, first + q) + i * kStep);
      }
    }
    for (int64_t s = 0; s < end; ++s) {
      Lanes sums[kQueries] = {};
      for (int i = 0; i < kSteps; ++i) {
        const Pair key = Load(head.keys + s * shape.dims + i * kStep);
        for (int q = 0; q < kQueries; ++q) sums[q] = AddProducts(sums[q], queries[q][i], key);
      }
      for (int q = 0; q < kQueries; ++q) {
        if (visible[q][s]) scratch[q * padded + s] = Total(sums[q]);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) Softmax(scratch.data() + q * padded, padded);
  Pair mixed[kQueries][kSteps] = {};
  for (int64_t s = 0; s < end; ++s) {
    for (int i = 0; i < kSteps; ++i) {
      const Pair value = Load(head.values + s * shape.dims + i * kStep);
      for (int q = 0; q < kQueries; ++q) {
        const float weight = scratch[q * padded + s];
        mixed[q][i].first += weight * value.first;
        mixed[q][i].second += weight * value.second;
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < kSteps; ++i) {
      StoreLike<T>(head.outputs + Offset(shape, first + q) + i * kStep, mixed[q][i]);
    }
  }
}

// `count` queries, at most kQueries, of heads of `steps` steps: 1, 2, 4 or 8.
template <int kQueries = kMaxQueries, int kSteps = kMaxSteps, typename T>
void AttendQueries(int64_t count, int64_t steps, const Head<T>& head, const Shape& shape,
                   int64_t first) {
  if constexpr (kSteps > 1) {
    if (steps < kSteps) {
      return AttendQueries<kQueries, kSteps / 2>(count, steps, head, shape, first);
    }
  }
  if constexpr (kQueries > 1) {
    if (count < kQueries) {
      return AttendQueries<kQueries - 1, kSteps>(count, steps, head, shape, first);
    }
  }
  AttendBlock<kQueries, kSteps>(head, shape, first);
}

template <typename T>
void Attend(ffi::ThreadPool& pool, int64_t batch, const float* queries, const T* keys,
            const T* values, const bool* visible, float* outputs, const Shape& shape) {
  const int64_t all = shape.tokens * shape.group(), tokens = batch * shape.tokens;
  if (all == 0) return;
  std::vector<int64_t> ends(tokens);
  int64_t seen = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    ends[token] = End(visible + token * shape.slots, shape.slots);
    seen += ends[token];
  }
  auto shared_ends = std::make_shared<const std::vector<int64_t>>(std::move(ends));
  const int64_t blocks = (all + kMaxQueries - 1) / kMaxQueries;
  auto attend = [=](int64_t piece) {
    const int64_t row = piece / (shape.kv_heads * blocks);
    const int64_t kv_head = piece / blocks % shape.kv_heads;
    const int64_t first = piece % blocks * kMaxQueries;
    const int64_t begin = (row * shape.tokens * shape.heads + kv_head * shape.group()) * shape.dims;
    const int64_t stored = (row * shape.kv_heads + kv_head) * shape.slots * shape.dims;
    const Head<T> head{queries + begin, keys + stored, values + stored,
                       visible + row * shape.tokens * shape.slots,
                       shared_ends->data() + row * shape.tokens, outputs + begin};
    AttendQueries(all - first < kMaxQueries ? all - first : kMaxQueries, shape.dims / kStep, head,
                  shape, first);
  };
  const int64_t pieces = batch * shape.kv_heads * blocks;
  if (2 * seen * shape.heads * shape.dims < kSmallWork) {
    for (int64_t piece = 0; piece < pieces; ++piece) attend(piece);
  } else {
    ShareOut(pool, pieces, attend);
  }
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> queries, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::BufferR3<ffi::PRED> visible,
                     ffi::Result<ffi::BufferR4<ffi::F32>> outputs) {
  const auto of_query = queries.dimensions(), of_key = keys.dimensions();
  const Shape shape{of_query[1], of_query[2], of_key[1], of_key[2], of_query[3]};
  auto attend = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Attend(pool, of_query[0], queries.typed_data(), static_cast<const T*>(keys.untyped_data()),
           static_cast<const T*>(values.untyped_data()), visible.typed_data(),
           outputs->typed_data(), shape);
  };
  if (keys.element_type() == ffi::F32) {
    attend(static_cast<float*>(nullptr));
  } else {
    attend(static_cast<BFloat16*>(nullptr));
  }
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
