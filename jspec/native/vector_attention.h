// Attention by vectors: a few queries share one reading of keys and values.

#ifndef JSPEC_NATIVE_VECTOR_ATTENTION_H_
#define JSPEC_NATIVE_VECTOR_ATTENTION_H_

#include "spans.h"

namespace jspec {

struct VectorAttention {
  static constexpr int kQueries = 4;
  static constexpr int kSlots = kLanes / kQueries;   // whose scores are found at a time
  static constexpr int kMaxSteps = kMaxDims / kStep;  // of a head
  static constexpr int64_t kAhead = 64;               // slots, of those in use, asked for

  // Queries first to first + count of heads of shape.dims / kStep steps, a power of two.
  template <int kCount = kQueries, int kSteps = kMaxSteps, typename T>
  static void Attend(int64_t count, const Head<T>& head, const Shape& shape, int64_t first,
                     int64_t begin, Finding<kQueries>* finding) {
    if constexpr (kSteps > 1) {
      if (shape.dims / kStep < kSteps) {
        return Attend<kCount, kSteps / 2>(count, head, shape, first, begin, finding);
      }
    }
    if constexpr (kCount > 1) {
      if (count < kCount) {
        return Attend<kCount - 1, kSteps>(count, head, shape, first, begin, finding);
      }
    }
    AttendSpan<kCount, kSteps>(head, shape, first, begin, finding);
  }

 private:
  template <int kCount, int kSteps, typename T>
  static void AttendSpan(const Head<T>& head, const Shape& shape, int64_t first, int64_t begin,
                         Finding<kQueries>* finding) {
    const int64_t end = EndOfSpan(head, shape, first, kCount, begin);
    float scores[kQueries][kSpan];
    Score<kCount, kSteps>(head, shape, first, begin, end, scores);
    for (int q = 0; q < kCount; ++q) {
      const bool* visible = head.visible + (first + q) / shape.group() * shape.slots + begin;
      Weigh(scores[q], visible, end - begin, finding->highest + q, finding->sum + q,
            [&](int64_t s, const Pair& weights) { Store(scores[q] + s, weights); });
    }
    Pair mixed[kCount][kSteps] = {};
    for (int64_t s = begin; s < end; ++s) {
      for (int i = 0; i < kSteps; ++i) {
        const Pair value = Load(head.values + s * shape.dims + i * kStep);
        __builtin_prefetch(head.values + (s + kAhead) * shape.dims + i * kStep);
        for (int q = 0; q < kCount; ++q) {
          const Lanes weight = scores[q][s - begin] - Lanes{};  // 0 + would be an addition
          mixed[q][i].first = MultiplyAdd(mixed[q][i].first, weight, value.first);
          mixed[q][i].second = MultiplyAdd(mixed[q][i].second, weight, value.second);
        }
      }
    }
    for (int q = 0; q < kCount; ++q) {
      for (int i = 0; i < kSteps; ++i) StoreLike<T>(finding->mixed[q] + i * kStep, mixed[q][i]);
    }
  }

  template <int kCount, int kSteps, typename T>
  static void Score(const Head<T>& head, const Shape& shape, int64_t first, int64_t begin,
                    int64_t end, float (*scores)[kSpan]) {
    Pair queries[kCount][kSteps];
    for (int q = 0; q < kCount; ++q) {
      for (int i = 0; i < kSteps; ++i) {
        queries[q][i] = LoadLike<T>(head.queries + Offset(shape, first + q) + i * kStep);
      }
    }
    for (int64_t s = begin; s < end; s += kSlots) {
      Lanes sums[kQueries * kSlots];  // not set to 0: that would be a call of memset
      for (int slot = 0; slot < kSlots; ++slot) {
        const T* from = head.keys + std::min(s + slot, end - 1) * shape.dims;
        Pair key[kSteps];
        for (int i = 0; i < kSteps; ++i) {
          key[i] = Load(from + i * kStep);
          __builtin_prefetch(from + kAhead * shape.dims + i * kStep);
        }
        for (int q = 0; q < kQueries; ++q) {
          Lanes sum = {};
          for (int i = 0; i < kSteps && q < kCount; ++i) {
            sum = AddProducts(sum, queries[q][i], key[i]);
          }
          sums[q * kSlots + slot] = sum;
        }
      }
      const Lanes totals = Totals(sums);
      for (int q = 0; q < kCount; ++q) {
        std::memcpy(scores[q] + (s - begin), reinterpret_cast<const float*>(&totals) + q * kSlots,
                    kSlots * sizeof(float));
      }
    }
  }
};

}  // namespace jspec

#endif  // JSPEC_NATIVE_VECTOR_ATTENTION_H_
