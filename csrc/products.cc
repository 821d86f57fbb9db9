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

// (rows, depth) · (depth, columns)
struct Product {
  const float* left;
  const float* right;
  float* result;
  int64_t rows;
  int64_t depth;
  int64_t columns;
  bool is_left_turned;
  bool is_right_turned;
};

// Computes the part of a product that is in these rows and columns, on this thread.
//
// BLAS reads a matrix in the order of rows as the transposed one in the order of
// columns, so it is called for the transposed product, with the factors exchanged.
void Multiply(const Product& product, Range rows, Range columns) {
  const auto& [left, right, result, height, depth, width, is_left_turned,
               is_right_turned] = product;
  const int m = static_cast<int>(columns.size);
  const int n = static_cast<int>(rows.size);
  const int k = static_cast<int>(depth);
  const int left_step = static_cast<int>(is_left_turned ? height : depth);
  const int right_step = static_cast<int>(is_right_turned ? depth : width);
  const int result_step = static_cast<int>(width);
  const float one = 1, zero = 0;
  const int num_threads = the_blas.set_threads ? the_blas.set_threads(1) : 0;
  the_blas.multiply(is_right_turned ? "T" : "N", is_left_turned ? "T" : "N", &m, &n, &k,
                    &one, right + columns.begin * (is_right_turned ? depth : 1),
                    &right_step, left + rows.begin * (is_left_turned ? 1 : depth),
                    &left_step, &zero, result + rows.begin * width + columns.begin,
                    &result_step);
  if (the_blas.set_threads) the_blas.set_threads(num_threads);
}

// Returns the product at a place of a batch.
Product At(const Product& first, int64_t place) {
  Product product = first;
  product.left += place * first.rows * first.depth;
  product.right += place * first.depth * first.columns;
  product.result += place * first.rows * first.columns;
  return product;
}

// Cuts the batch, or the longer side of the result.
ffi::Future Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> left,
                ffi::Buffer<ffi::F32> right, ffi::ResultBuffer<ffi::F32> result,
                int64_t batch, int64_t rows, int64_t depth, int64_t columns,
                int64_t is_left_turned, int64_t is_right_turned) {
  const Product product{
      left.typed_data(), right.typed_data(),  result->typed_data(), rows, depth,
      columns,           is_left_turned != 0, is_right_turned != 0};
  const int64_t length = batch > 1 ? batch : std::max(rows, columns);
  return RunParts(pool, length, batch * rows * depth * columns, [=](Range part) {
    const bool is_tall = rows >= columns;
    if (batch == 1) {
      Multiply(product, is_tall ? part : Range{0, rows},
               is_tall ? Range{0, columns} : part);
    }
    for (int64_t i = 0; batch > 1 && i < part.size; ++i) {
      Multiply(At(product, part.begin + i), {0, rows}, {0, columns});
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

XLA_FFI_Handler* ProductHandler() { return kRun; }

}  // namespace xla_pp
