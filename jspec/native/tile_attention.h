// Attention over keys and values of bfloat16 in tiles (AMX): 32 queries share one reading of both.
//
// As precise as by vectors: queries and weights are sums of three numbers of bfloat16, which is all of
// a float. The order of a sum depends neither on the queries beside it nor on the cache.

#ifndef JSPEC_NATIVE_TILE_ATTENTION_H_
#define JSPEC_NATIVE_TILE_ATTENTION_H_

#include "spans.h"
#include "tiles.h"

namespace jspec {

#ifdef JSPEC_HAS_TILES
// The upper halves of the words of two vectors, in order.
inline Lanes PackUpper(const Pair& pair) {
  static const __m512i odd = [] {
    alignas(64) uint16_t places[32];
    for (int i = 0; i < 32; ++i) places[i] = 2 * i + 1;
    return _mm512_load_si512(places);
  }();
  return (Lanes)_mm512_permutex2var_epi16((__m512i)pair.first, odd, (__m512i)pair.second);
}

// The first 8 bits of every number, as bfloat16 in order; `pair` keeps the rest.
inline Lanes TakeUpper(Pair* pair) {
  const Pair upper = {(Lanes)((Words)pair->first & 0xffff0000u),
                      (Lanes)((Words)pair->second & 0xffff0000u)};
  pair->first -= upper.first;
  pair->second -= upper.second;
  return PackUpper(upper);
}

struct TileAttention {
  static constexpr int kQueries = 2 * kTileSide;
  static constexpr int kParts = 3;                    // that a float is the sum of
  static constexpr int64_t kAhead = 64;               // slots, of those in use, asked for
  static constexpr int64_t kStride = kSpan + kLanes;  // of scores: rows begin in different sets
  static constexpr int64_t kPartsStride = kParts * kSpan / 2 + kLanes;  // of weights, two in a lane

  static void Attend(int64_t count, const Head<BFloat16>& head, const Shape& shape, int64_t first,
                     int64_t begin, Finding<kQueries>* finding) {
    const int64_t end = EndOfSpan(head, shape, first, count, begin);
    static thread_local Space<float> space;
    float* scores = space.Take(kQueries * (kStride + kPartsStride));
    float* weights = scores + kQueries * kStride;
    const TileRegisters registers(kTileSide);
    const bool is_one = count <= kTileSide;
    (is_one ? Score<false> : Score<true>)(count, head, shape, first, begin, end, scores);
    for (int64_t q = 0; q < count; ++q) {
      const bool* visible = head.visible + (first + q) / shape.group() * shape.slots + begin;
      float* to = weights + q * kPartsStride;
      Weigh(scores + q * kStride, visible, end - begin, finding->highest + q, finding->sum + q,
            [&](int64_t s, Pair rest) {
              for (int part = 0; part < kParts; ++part) {
                const Lanes upper = TakeUpper(&rest);
                std::memcpy(to + (s / 2 * kParts + part * kLanes), &upper, sizeof(upper));
              }
            });
    }
    for (int64_t dim = 0; dim < shape.dims; dim += kTileInputs) {
      (is_one ? Mix<false> : Mix<true>)(head, shape, begin, end, dim, weights, finding);
    }
  }

 private:
  static const TileInputs& Pack(int64_t count, const Head<BFloat16>& head, const Shape& shape,
                                int64_t first) {
    static thread_local TileInputs packed;
    packed.Prepare(count, shape.dims / kTileInputs * kParts, kTileSide);
    for (int64_t q = 0; q < count; ++q) {
      const float* from = head.queries + Offset(shape, first + q);
      for (int64_t step = 0; step < packed.steps; step += kParts, from += kTileInputs) {
        Pair rest = Load(from);
        for (int part = 0; part < kParts; ++part) {
          packed.pairs[packed.Place(q / kTileSide, step + part) + q % kTileSide] = TakeUpper(&rest);
        }
      }
    }
    for (int64_t block = 0; block * kTileSide < count; ++block) packed.TransposeBlock(block);
    return packed;
  }

  // Asks memory for so many numbers.
  static void AskFor(const BFloat16* from, int64_t count) {
    constexpr int64_t kLine = kCacheLine / sizeof(BFloat16);
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
  }

  template <bool kTwoBlocks>
  static void Score(int64_t count, const Head<BFloat16>& head, const Shape& shape, int64_t first,
                    int64_t begin, int64_t end, float* scores) {
    const TileInputs& queries = Pack(count, head, shape, first);
    for (int64_t s = begin; s < end; s += kWidth) {
      const int64_t slots = std::min<int64_t>(kWidth, end - s);
      if constexpr (!kTwoBlocks) {  // others compute for longer than memory takes
        AskFor(head.keys + (s + kAhead) * shape.dims, kWidth * shape.dims);
        AskFor(head.values + s * shape.dims, slots * shape.dims);
      }
      const BFloat16* keys =
          WholeTiles(head.keys + s * shape.dims, slots, shape.dims, shape.dims);
      MultiplyTiles<kTwoBlocks, kParts>(queries, 0, keys, scores + (s - begin), kStride, slots);
    }
  }

  // Dimensions dim to dim + 32 of the values, weighted, of one or two blocks of queries.
  template <bool kTwoBlocks>
  static void Mix(const Head<BFloat16>& head, const Shape& shape, int64_t begin, int64_t end,
                  int64_t dim, const float* weights, Finding<kQueries>* finding) {
    constexpr int64_t kBytes = kPartsStride * sizeof(float), kSecond = kTileSide * kPartsStride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = begin; s < end; s += kTileInputs, weights += kParts * kLanes) {
      Pair pairs[kTileSide];  // of slots: the first 16 dimensions of both, the next 16
      PairSlots(head.values + dim, shape.dims, s, end, pairs);
      _tile_loadd(6, &pairs[0].first, sizeof(Pair));
      _tile_loadd(7, &pairs[0].second, sizeof(Pair));
      for (int part = 0; part < kParts; ++part) {
        _tile_loadd(4, weights + part * kLanes, kBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwoBlocks) {
          _tile_loadd(5, weights + kSecond + part * kLanes, kBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    constexpr int64_t kMixedBytes = sizeof(finding->mixed[0]);
    _tile_stored(0, finding->mixed[0] + dim, kMixedBytes);
    _tile_stored(1, finding->mixed[0] + dim + kTileSide, kMixedBytes);
    if constexpr (kTwoBlocks) {
      _tile_stored(2, finding->mixed[kTileSide] + dim, kMixedBytes);
      _tile_stored(3, finding->mixed[kTileSide] + dim + kTileSide, kMixedBytes);
    }
  }

  // 32 dimensions of 32 slots, those of every two slots one by one in turn. What lies behind the
  // end is not read.
  static void PairSlots(const BFloat16* values, int64_t dims, int64_t s, int64_t end, Pair* pairs) {
    static const __m512i first = Places(0), second = Places(kTileSide);
    const int64_t last = end - 1;
    for (int p = 0; p < kTileSide; ++p, s += 2) {
      const __m512i even = _mm512_loadu_si512(values + std::min(s, last) * dims);
      const __m512i odd = _mm512_loadu_si512(values + std::min(s + 1, last) * dims);
      pairs[p].first = (Lanes)_mm512_permutex2var_epi16(even, first, odd);
      pairs[p].second = (Lanes)_mm512_permutex2var_epi16(even, second, odd);
    }
  }

  static __m512i Places(int from) {
    alignas(64) uint16_t places[32];
    for (int i = 0; i < 32; ++i) places[i] = from + i / 2 + i % 2 * 32;
    return _mm512_load_si512(places);
  }
};
#endif

}  // namespace jspec

#endif  // JSPEC_NATIVE_TILE_ATTENTION_H_
