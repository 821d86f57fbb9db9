// Copies of views of values.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* CopyHandler();

}  // namespace xla_pp
