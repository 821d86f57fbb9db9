// GELU and its gradient.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* GeluHandler();

XLA_FFI_Handler* GeluGradHandler();

}  // namespace xla_pp
