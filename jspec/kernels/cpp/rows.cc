// Rows of tables and caches, which are moved and not computed.

#include <algorithm>
#include <numeric>
#include <vector>

#include "lanes.h"

namespace {

using namespace jspec;

// As in NumPy, a negative id counts from the end. Ids past either end are those of the end, as in
// JAX. XLA would read the whole table, on several threads, and go on in another thread.
ffi::Error TableRows(ffi::AnyBuffer table, ffi::BufferR2<ffi::S32> ids,
                     ffi::Result<ffi::AnyBuffer> rows) {
  const int64_t count = table.dimensions()[0];
  const int64_t width = table.dimensions()[1] * ffi::ByteWidth(table.element_type());
  const auto* from = static_cast<const char*>(table.untyped_data());
  auto* to = static_cast<char*>(rows->untyped_data());
  for (size_t i = 0; i < ids.element_count(); ++i, to += width) {
    const int64_t id = ids.typed_data()[i];
    const int64_t row = std::clamp<int64_t>(id < 0 ? id + count : id, 0, count - 1);
    std::memcpy(to, from + row * width, width);
  }
  return ffi::Error::Success();
}

// The blocks of some outputs of a packed kernel, as a file has them: `kernels/packed.py` says how
// strips are laid out. The fields of a block are pairs: bytes of an element, number of elements.
ffi::Error PackedRows(ffi::BufferR2<ffi::U8> strips, ffi::BufferR1<ffi::S32> ids,
                      ffi::BufferR2<ffi::S32> fields, ffi::Result<ffi::BufferR2<ffi::U8>> rows) {
  constexpr int64_t kStrip = 16;
  const int64_t strip_bytes = strips.dimensions()[1];
  const int64_t count = strips.dimensions()[0] * kStrip, num_fields = fields.dimensions()[0];
  const int32_t* pairs = fields.typed_data();
  uint8_t* to = rows->typed_data();
  for (size_t i = 0; i < ids.element_count(); ++i) {
    const int64_t id = std::clamp<int64_t>(ids.typed_data()[i], 0, count - 1), output = id % kStrip;
    const uint8_t* from = strips.typed_data() + id / kStrip * strip_bytes;
    for (const uint8_t* end = from + strip_bytes; from < end;) {  // block by block
      for (int64_t f = 0; f < num_fields; ++f) {
        const int64_t size = pairs[2 * f];
        for (int32_t element = 0; element < pairs[2 * f + 1]; ++element) {
          std::memcpy(to, from + size * output, size);
          from += size * kStrip;
          to += size;
        }
      }
    }
  }
  return ffi::Error::Success();
}

// A block [b t k h], which is written into a layer of a cache [b k s h] in the layer's type and in
// place, each row from its own slot on; or into pages [p k s h], of which a table [b n] names each
// row's. What falls past the last slot is lost, never shifted onto a good one.
struct Shape {
  int64_t batch, tokens, heads, dims;
  int64_t page, pages;  // slots of a page, pages of a row
};

template <typename T>
void Write(const float* block, const int32_t* starts, const int32_t* table, const Shape& shape,
           T* layer) {
  for (int64_t row = 0; row < shape.batch; ++row) {
    const int64_t first = starts[row];
    if (first < 0) continue;
    const int64_t count = std::min(shape.tokens, shape.pages * shape.page - first);
    for (int64_t token = 0; token < count; ++token) {
      const int64_t slot = first + token, page = table[row * shape.pages + slot / shape.page];
      for (int64_t head = 0; head < shape.heads; ++head) {
        const int64_t from = (row * shape.tokens + token) * shape.heads + head;
        const int64_t to = (page * shape.heads + head) * shape.page + slot % shape.page;
        Convert(block + from * shape.dims, shape.dims, layer + to * shape.dims);
      }
    }
  }
}

ffi::Error WriteAll(const ffi::AnyBuffer& layer, const ffi::BufferR4<ffi::F32>& block,
                    const int32_t* starts, const int32_t* table, int64_t pages,
                    ffi::Result<ffi::AnyBuffer> outputs) {
  const auto of_block = block.dimensions();
  const Shape shape{of_block[0], of_block[1], of_block[2], of_block[3], layer.dimensions()[2],
                    pages};
  void* to = outputs->untyped_data();
  // XLA passes the same buffer as operand and result, unless the old layer is needed elsewhere.
  if (to != layer.untyped_data()) std::memcpy(to, layer.untyped_data(), layer.size_bytes());
  return WithNumbers(*outputs, [&](auto* numbers) {
    Write(block.typed_data(), starts, table, shape, numbers);
  });
}

ffi::Error WriteRows(ffi::AnyBuffer layer, ffi::BufferR4<ffi::F32> block,
                     ffi::BufferR1<ffi::S32> start, ffi::Result<ffi::AnyBuffer> outputs) {
  std::vector<int32_t> rows(block.dimensions()[0]);  // one page each
  std::iota(rows.begin(), rows.end(), 0);
  return WriteAll(layer, block, start.typed_data(), rows.data(), 1, outputs);
}

ffi::Error WritePages(ffi::AnyBuffer layer, ffi::BufferR4<ffi::F32> block,
                      ffi::BufferR1<ffi::S32> start, ffi::BufferR2<ffi::S32> table,
                      ffi::Result<ffi::AnyBuffer> outputs) {
  return WriteAll(layer, block, start.typed_data(), table.typed_data(), table.dimensions()[1],
                  outputs);
}

// Leaves memory as it is found.
ffi::Error Unwritten(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_table_rows, TableRows);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_packed_rows, PackedRows);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_write_rows, WriteRows);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_write_pages, WritePages);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_unwritten, Unwritten);
