// Copies of views of values, and of their pieces.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* CopyHandler();
XLA_FFI_Handler* SplitHandler();

}  // namespace xla_pp
