// Products of matrices with a BLAS library of the process.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace xla_pp {

struct Blas {
  // sgemm, as Fortran calls it.
  void (*multiply)(const char*, const char*, const int*, const int*, const int*,
                   const float*, const float*, const int*, const float*, const int*,
                   const float*, float*, const int*) = nullptr;
  // Sets how many threads the calls of this thread use; returns the number before. None
  // if the library has one thread for each call.
  int (*set_threads)(int) = nullptr;
};

// Sets the functions; called before the first product.
void UseBlas(Blas blas);

XLA_FFI_Handler* ProductHandler();

}  // namespace xla_pp
