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

// A factor of a product, whose rows are `step` numbers apart; or its columns, if it is
// stored turned.
struct Factor {
  const float* data;
  int64_t step;
  bool is_turned;
};

// Computes result = scale * left · right + kept * result on this thread, of
// (rows, depth) · (depth, columns). The rows of the result are `step` numbers apart.
struct Product {
  Factor left;
  Factor right;
  int64_t rows;
  int64_t depth;
  int64_t columns;
  float scale = 1;
  float kept = 0;
};

void Multiply(const Product& product, float* result, int64_t step);

XLA_FFI_Handler* ProductHandler();

XLA_FFI_Handler* ProductSumHandler();

XLA_FFI_Handler* ProductBiasHandler();

}  // namespace xla_pp
