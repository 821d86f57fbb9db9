// Sums, softmax and layer norm of the rows of matrices.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

XLA_FFI_Handler* SumHandler();
XLA_FFI_Handler* SoftmaxHandler();
XLA_FFI_Handler* SoftmaxGradHandler();
XLA_FFI_Handler* NormHandler();
XLA_FFI_Handler* NormGradHandler();
XLA_FFI_Handler* NormFactorGradHandler();

}  // namespace xla_pp
