// What attention by vectors and attention in tiles share: queries of one head, and what they find.

#ifndef JSPEC_NATIVE_SPANS_H_
#define JSPEC_NATIVE_SPANS_H_

#include <algorithm>

#include "softmax.h"

namespace jspec {

constexpr int64_t kSpan = 512;  // slots that a thread goes through at a time
constexpr int kMaxDims = 256;   // of a head

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

// Where query q begins, behind the group's first one.
inline int64_t Offset(const Shape& shape, int64_t query) {
  return (query / shape.group() * shape.heads + query % shape.group()) * shape.dims;
}

// Returns the place behind the last slot of the span from `begin` on that some queries see.
template <typename T>
inline int64_t EndOfSpan(const Head<T>& head, const Shape& shape, int64_t first, int64_t count,
                         int64_t begin) {
  int64_t end = begin;
  for (int64_t q = first; q < first + count; ++q) {
    end = std::max(end, std::min(head.ends[q / shape.group()], begin + kSpan));
  }
  return end;
}

// What some queries find in one span of slots: for each, the highest score, the sum of the weights
// relative to it, and the values so weighted.
template <int kQueries>
struct Finding {
  float highest[kQueries], sum[kQueries];
  alignas(64) float mixed[kQueries][kMaxDims];
};

}  // namespace jspec

#endif  // JSPEC_NATIVE_SPANS_H_
