// Calls of other ops on values that lie in larger ones.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* PlacedHandler();

}  // namespace xla_pp
