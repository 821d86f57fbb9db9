// Attention and its gradients.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* AttentionHandler();
XLA_FFI_Handler* AttentionGradHandler();

}  // namespace xla_pp
