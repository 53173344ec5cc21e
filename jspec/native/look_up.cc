// Rows of a table as float32. XLA on CPU gathers bfloat16 in float32: it converts the whole table,
// or counts that as the work and wakes threads for a row.

#include <algorithm>

#include "lanes.h"

namespace {

using namespace jspec;

// An id below 0 counts from the end; one that is out of range is taken for the nearest.
int64_t Place(int64_t id, int64_t count) {
  return std::clamp<int64_t>(id < 0 ? id + count : id, 0, count - 1);
}

ffi::Error LookUp(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::BufferR1<ffi::S32> ids,
                  ffi::Result<ffi::BufferR2<ffi::F32>> rows) {
  const int64_t count = table.dimensions()[0], width = table.dimensions()[1];
  const int32_t* from_ids = ids.typed_data();
  float* to = rows->typed_data();
  auto look_up = [&](auto* from) {
    ForRows(pool, ids.dimensions()[0], width, [=](int64_t r) {
      const auto* row = from + Place(from_ids[r], count) * width;
      for (int64_t i = 0; i < width; ++i) to[r * width + i] = AsFloat(row[i]);
    });
  };
  if (table.element_type() == ffi::F32) {
    look_up(static_cast<const float*>(table.untyped_data()));
  } else {
    look_up(static_cast<const BFloat16*>(table.untyped_data()));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_look_up, LookUp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
