// Lays blocks of GGUF files out in strips of 16 outputs; see `kernels/packed.py`.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kStrip = 16;  // outputs side by side

// Lays `count` elements of one field of 16 outputs side by side.
template <typename Element>
void Interleave(const uint8_t* const* rows, int64_t begin, int64_t count, uint8_t* to) {
  for (int64_t e = 0; e < count; ++e) {
    for (int64_t o = 0; o < kStrip; ++o) {
      const uint8_t* from = rows[o] + begin + e * sizeof(Element);
      std::memcpy(to + (e * kStrip + o) * sizeof(Element), from, sizeof(Element));
    }
  }
}

}  // namespace

// Packs strips of outputs, whose blocks begin at `rows`, 16 pointers a strip. `fields` are the size
// and the number of elements of each part of a block.
extern "C" void jspec_pack(const uint8_t* const* rows, int64_t num_strips, int64_t row_bytes,
                           const int32_t* fields, int64_t num_fields, uint8_t* strips) {
  uint8_t* to = strips;
  for (int64_t strip = 0; strip < num_strips; ++strip, rows += kStrip) {
    for (int64_t byte = 0; byte < row_bytes;) {
      for (int64_t f = 0; f < num_fields; ++f) {
        const int64_t size = fields[2 * f], count = fields[2 * f + 1];
        const auto interleave = size == 1   ? Interleave<uint8_t>
                                : size == 2 ? Interleave<uint16_t>
                                            : Interleave<uint32_t>;
        interleave(rows, byte, count, to);
        byte += size * count;
        to += kStrip * size * count;
      }
    }
  }
}
