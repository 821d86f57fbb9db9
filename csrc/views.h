// Copies of views and of pieces of values.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* CopyHandler();
XLA_FFI_Handler* SplitHandler();

}  // namespace xla_pp
