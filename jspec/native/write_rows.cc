// Writes a block of each row into a layer of a cache [b k s h], in place, at the row's own slot.
// What falls behind the last slot is lost, never shifted onto a good one.

#include "lanes.h"

namespace {

using namespace jspec;

ffi::Error WriteRows(ffi::AnyBuffer layer, ffi::AnyBuffer block, ffi::BufferR1<ffi::S32> start,
                     ffi::Result<ffi::AnyBuffer> outputs) {
  const auto size = layer.dimensions();
  const int64_t batch = size[0], heads = size[1], slots = size[2];
  const int64_t tokens = block.dimensions()[2];
  const int64_t slot_bytes = size[3] * ffi::ByteWidth(layer.element_type());
  const auto* from = static_cast<const char*>(block.untyped_data());
  auto* to = static_cast<char*>(outputs->untyped_data());
  if (to != layer.untyped_data()) std::memcpy(to, layer.untyped_data(), layer.size_bytes());
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t first = start.typed_data()[row];
    const int64_t room = slots - first;
    const int64_t count = tokens < room ? tokens : room;
    if (first < 0 || count <= 0) continue;
    for (int64_t head = row * heads; head < (row + 1) * heads; ++head) {
      std::memcpy(to + (head * slots + first) * slot_bytes, from + head * tokens * slot_bytes,
                  count * slot_bytes);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_write_rows, WriteRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
