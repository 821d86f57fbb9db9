// The ops of XLA programs that multiply matrices, as handlers of XLA's FFI.
//
// Product: two matrices of floats → their product, all flat and in the order of rows;
// or a batch of each, one after the other. Sum: likewise, and a sum → the sum and the
// product together, in the sum's memory. Biased: two matrices, and a number for each
// column of the result, which is added to it; and so is a value like the result, if
// there is one behind them.
//
// The attributes give the number of products, their sides and which factors are stored
// transposed.

#include "products.h"

#include <algorithm>
#include <cstdint>

#include "abi.h"
#include "parts.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;

Blas the_blas;

// Returns a factor from a row on, and a column.
Factor From(Factor factor, int64_t row, int64_t column) {
  const int64_t down = factor.is_turned ? 1 : factor.step;
  const int64_t along = factor.is_turned ? factor.step : 1;
  factor.data += row * down + column * along;
  return factor;
}

ProductFields FieldsOf(ffi::Dictionary attributes) {
  ProductFields fields;
  XPP_PRODUCT_FIELDS(XPP_READ_FIELD)
  return fields;
}

// What a product is added to: numbers for the columns of a matrix, and a matrix like
// the result. Those that are missing are null.
struct Start {
  const float* bias = nullptr;
  const float* added = nullptr;
};

// Writes the start into rows that are `step` numbers apart.
XPP_VECTORS void Fill(const Start& start, int64_t rows, int64_t columns, int64_t step,
                      float* result) {
  const auto [bias, added] = start;
  for (int64_t row = 0; row < rows; ++row) {
    float* out = result + row * step;
    if (added) {
      const float* from = added + row * step;
      for (int64_t i = 0; i < columns; ++i) out[i] = from[i] + bias[i];
    } else {
      for (int64_t i = 0; i < columns; ++i) out[i] = bias[i];
    }
  }
}

// Adds the product to `kept` times the result, or to a start that has a bias. Cuts the
// batch, or the longer side of the result.
ffi::Future Compute(ffi::ThreadPool pool, const ProductFields& fields, Floats left,
                    Floats right, float* result, float kept, Start start = {}) {
  const auto [batch, rows, depth, columns, is_left_turned, is_right_turned] = fields;
  const Factor first{left.typed_data(), is_left_turned ? rows : depth,
                     is_left_turned != 0};
  const Factor second{right.typed_data(), is_right_turned ? depth : columns,
                      is_right_turned != 0};
  const Product whole{first, second, rows, depth, columns, 1, kept};
  const int64_t length = batch > 1 ? batch : std::max(rows, columns);
  return RunParts(pool, length, batch * rows * depth * columns, [=](Range part) {
    Product product = whole;
    float* out = result;
    Start own = start;
    if (batch > 1) {
      for (int64_t i = part.begin; i < part.begin + part.size; ++i) {
        product.left.data = first.data + i * rows * depth;
        product.right.data = second.data + i * depth * columns;
        Multiply(product, result + i * rows * columns, columns);
      }
      return;
    }
    if (rows >= columns) {
      product.left = From(first, part.begin, 0);
      product.rows = part.size;
      out += part.begin * columns;
      if (own.added) own.added += part.begin * columns;
    } else {
      product.right = From(second, 0, part.begin);
      product.columns = part.size;
      out += part.begin;
      if (own.bias) own.bias += part.begin;
      if (own.added) own.added += part.begin;
    }
    if (own.bias) Fill(own, product.rows, product.columns, columns, out);
    Multiply(product, out, columns);
  });
}

ffi::Future Run(ffi::ThreadPool pool, Floats left, Floats right,
                ffi::ResultBuffer<ffi::F32> result, ffi::Dictionary attributes) {
  return Compute(pool, FieldsOf(attributes), left, right, result->typed_data(), 0);
}

ffi::Future RunSum(ffi::ThreadPool pool, Floats left, Floats right, Floats sum,
                   ffi::ResultBuffer<ffi::F32> result, ffi::Dictionary attributes) {
  float* out = result->typed_data();
  // As the program says, they are one.
  if (out != sum.typed_data()) {
    std::copy_n(sum.typed_data(), sum.element_count(), out);
  }
  return Compute(pool, FieldsOf(attributes), left, right, out, 1);
}

ffi::Future RunBias(ffi::ThreadPool pool, Floats left, Floats right, Floats bias,
                    ffi::RemainingArgs others, ffi::ResultBuffer<ffi::F32> result,
                    ffi::Dictionary attributes) {
  const float* added = others.size() ? others.get<Floats>(0)->typed_data() : nullptr;
  return Compute(pool, FieldsOf(attributes), left, right, result->typed_data(), 1,
                 {bias.typed_data(), added});
}

// Two factors; a sum or a bias may be behind them.
auto Factors() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>();
}

XLA_FFI_DEFINE_HANDLER(kRun, Run, Factors().Ret<Floats>().Attrs());

XLA_FFI_DEFINE_HANDLER(kRunSum, RunSum, Factors().Arg<Floats>().Ret<Floats>().Attrs());

XLA_FFI_DEFINE_HANDLER(kRunBias, RunBias,
                       Factors().Arg<Floats>().RemainingArgs().Ret<Floats>().Attrs());

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

XLA_FFI_Handler* ProductSumHandler() { return kRunSum; }

XLA_FFI_Handler* ProductBiasHandler() { return kRunBias; }

}  // namespace xla_pp
