// Rows of a table by their ids. XLA takes this for a reading of the whole table, and shares it out
// over its threads; the program then goes on in another thread.

#include <algorithm>

#include "lanes.h"

namespace {

using namespace jspec;

// As in NumPy, a negative id counts from the end. Ids past either end are those of the end, as in
// JAX.
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_table_rows, TableRows);
