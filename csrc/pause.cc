// An op that returns its operand after a time, as if another processor computed it.

#include "pause.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

ffi::Error Pause(ffi::Buffer<ffi::F32> value, ffi::ResultBuffer<ffi::F32> result,
                 int64_t time_ns) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(time_ns));
  std::memcpy(result->typed_data(), value.typed_data(), value.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPause, Pause,
                       ffi::Ffi::Bind()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<int64_t>("time_ns"));

}  // namespace

XLA_FFI_Handler* PauseHandler() { return kPause; }

}  // namespace xla_pp
