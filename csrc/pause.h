// An op that takes time, and no processor.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* PauseHandler();

}  // namespace xla_pp
