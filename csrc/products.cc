// The op of XLA programs that multiplies matrices, as a handler of XLA's FFI.
//
// Two matrices of floats → their product, all flat and in the order of rows; or a batch
// of each, one after the other. The attributes give the number of products, their sides
// and which factors are stored transposed.

#include "products.h"

#include <algorithm>
#include <cstdint>

#include "parts.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

Blas the_blas;

// Returns a factor from a row on, and a column.
Factor From(Factor factor, int64_t row, int64_t column) {
  const int64_t down = factor.is_turned ? 1 : factor.step;
  const int64_t along = factor.is_turned ? factor.step : 1;
  factor.data += row * down + column * along;
  return factor;
}

// Cuts the batch, or the longer side of the result.
ffi::Future Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> left,
                ffi::Buffer<ffi::F32> right, ffi::ResultBuffer<ffi::F32> result,
                int64_t batch, int64_t rows, int64_t depth, int64_t columns,
                int64_t is_left_turned, int64_t is_right_turned) {
  const Factor first{left.typed_data(), is_left_turned ? rows : depth,
                     is_left_turned != 0};
  const Factor second{right.typed_data(), is_right_turned ? depth : columns,
                      is_right_turned != 0};
  float* out = result->typed_data();
  const int64_t length = batch > 1 ? batch : std::max(rows, columns);
  return RunParts(pool, length, batch * rows * depth * columns, [=](Range part) {
    if (batch > 1) {
      for (int64_t i = part.begin; i < part.begin + part.size; ++i) {
        Factor left_one = first, right_one = second;
        left_one.data += i * rows * depth;
        right_one.data += i * depth * columns;
        Multiply({left_one, right_one, rows, depth, columns}, out + i * rows * columns,
                 columns);
      }
    } else if (rows >= columns) {
      Multiply({From(first, part.begin, 0), second, part.size, depth, columns},
               out + part.begin * columns, columns);
    } else {
      Multiply({first, From(second, 0, part.begin), rows, depth, part.size},
               out + part.begin, columns);
    }
  });
}

XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<int64_t>("batch")
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("depth")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("is_left_turned")
                           .Attr<int64_t>("is_right_turned"));

}  // namespace

void UseBlas(Blas blas) { the_blas = blas; }

// BLAS reads a matrix in the order of rows as the turned one in the order of columns,
// so it is called for the turned product, with the factors exchanged.
void Multiply(const Product& product, float* result, int64_t step) {
  const auto& [left, right, rows, depth, columns, scale, kept] = product;
  const int m = static_cast<int>(columns);
  const int n = static_cast<int>(rows);
  const int k = static_cast<int>(depth);
  const int left_step = static_cast<int>(left.step);
  const int right_step = static_cast<int>(right.step);
  const int result_step = static_cast<int>(step);
  const int num_threads = the_blas.set_threads ? the_blas.set_threads(1) : 0;
  the_blas.multiply(right.is_turned ? "T" : "N", left.is_turned ? "T" : "N", &m, &n, &k,
                    &scale, right.data, &right_step, left.data, &left_step, &kept,
                    result, &result_step);
  if (the_blas.set_threads) the_blas.set_threads(num_threads);
}

XLA_FFI_Handler* ProductHandler() { return kRun; }

}  // namespace xla_pp
