// Sums and softmax of the rows of matrices.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* SumHandler();
XLA_FFI_Handler* SoftmaxHandler();
XLA_FFI_Handler* SoftmaxGradHandler();

}  // namespace xla_pp
