// Ops of XLA programs that work along the rows of a matrix, as handlers of XLA's FFI:
// for sums of rows and of columns XLA:CPU compiles two or three loops, for a softmax
// or a layer norm nine.
//
// Matrices of floats are flat, in the order of rows.

#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "parts.h"
#include "terms.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

// Columns that are added up together: their sums stay in the nearest cache.
constexpr int64_t kWidth = 1024;

XPP_VECTORS void SumRows(const float* values, int64_t columns, Range rows,
                         float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* from = values + row * columns;
    result[row] = SumOf(columns, [from](int64_t i) { return from[i]; });
  }
}

// The sums of term_of(row)(column) over all rows, for the columns of a range.
template <typename TermOf>
XPP_INLINE void SumOfColumns(int64_t rows, Range range, TermOf term_of, float* result) {
  const int64_t last = range.begin + range.size;
  for (int64_t begin = range.begin; begin < last; begin += kWidth) {
    const int64_t width = std::min(kWidth, last - begin);
    float* out = result + begin;
    float sums[kWidth], lost[kWidth];
    std::fill(out, out + width, 0.0f);
    std::fill(lost, lost + width, 0.0f);
    for (int64_t first = 0; first < rows; first += kBlock) {
      std::fill(sums, sums + width, 0.0f);
      for (int64_t row = first; row < std::min(rows, first + kBlock); ++row) {
        const auto term = term_of(row);
        for (int64_t i = 0; i < width; ++i) sums[i] += term(begin + i);
      }
      for (int64_t i = 0; i < width; ++i) Add(sums[i], out[i], lost[i]);
    }
  }
}

XPP_VECTORS void SumColumns(const float* values, int64_t rows, int64_t columns,
                            Range range, float* result) {
  const auto term_of = [=](int64_t row) {
    const float* from = values + row * columns;
    return [from](int64_t i) { return from[i]; };
  };
  SumOfColumns(rows, range, term_of, result);
}

XPP_VECTORS void SoftmaxRows(const float* values, int64_t columns, bool is_safe,
                             Range rows, float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* from = values + row * columns;
    float* out = result + row * columns;
    const float most = MaxOf(from, columns);
    // A row with NaN may have that maximum, too.
    if (is_safe && most == -Infinity() &&
        std::all_of(from, from + columns, [most](float x) { return x == most; })) {
      std::fill(out, out + columns, 0.0f);
      continue;
    }
    for (int64_t i = 0; i < columns; ++i) out[i] = Exp(from[i] - most);
    const float factor = 1 / SumOf(columns, [out](int64_t i) { return out[i]; });
    for (int64_t i = 0; i < columns; ++i) out[i] *= factor;
  }
}

XPP_VECTORS void LogSoftmaxRows(const float* values, int64_t columns, Range rows,
                                float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* from = values + row * columns;
    float* out = result + row * columns;
    const float most = MaxOf(from, columns);
    const auto power = [from, most](int64_t i) { return Exp(from[i] - most); };
    const float log = std::log(SumOf(columns, power));
    for (int64_t i = 0; i < columns; ++i) out[i] = (from[i] - most) - log;
  }
}

// The result may take the memory of the gradients.
XPP_VECTORS void LogSoftmaxGradRows(const float* grads, const float* outputs,
                                    int64_t columns, Range rows, float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* grad = grads + row * columns;
    const float* output = outputs + row * columns;
    float* out = result + row * columns;
    const float sum = SumOf(columns, [grad](int64_t i) { return grad[i]; });
    for (int64_t i = 0; i < columns; ++i) out[i] = grad[i] - Exp(output[i]) * sum;
  }
}

XPP_VECTORS void SoftmaxGradRows(const float* grads, const float* outputs,
                                 int64_t columns, Range rows, float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* grad = grads + row * columns;
    const float* output = outputs + row * columns;
    float* out = result + row * columns;
    const float along =
        SumOf(columns, [grad, output](int64_t i) { return grad[i] * output[i]; });
    for (int64_t i = 0; i < columns; ++i) out[i] = output[i] * (grad[i] - along);
  }
}

// A layer norm, (x - mean) * scale * factor + shift. Without a factor or a shift these
// are null.
struct Norm {
  const float* x;
  const float* factor;
  const float* shift;
  int64_t columns;
  float epsilon;
};

template <bool has_factor, bool has_shift>
XPP_INLINE void NormRow(const Norm& norm, const float* x, float* y, float& mean,
                        float& scale) {
  const float* factor = norm.factor;
  const float* shift = norm.shift;
  const float count = static_cast<float>(norm.columns);
  const float centre = SumOf(norm.columns, [x](int64_t i) { return x[i]; }) / count;
  const auto square = [x, centre](int64_t i) {
    return (x[i] - centre) * (x[i] - centre);
  };
  const float by = 1 / std::sqrt(SumOf(norm.columns, square) / count + norm.epsilon);
  for (int64_t i = 0; i < norm.columns; ++i) {
    float value = (x[i] - centre) * by;
    if (has_factor) value *= factor[i];
    if (has_shift) value += shift[i];
    y[i] = value;
  }
  mean = centre;
  scale = by;
}

XPP_VECTORS void NormRows(const Norm& norm, Range rows, float* y, float* means,
                          float* scales) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    const float* x = norm.x + row * norm.columns;
    float* out = y + row * norm.columns;
    if (norm.factor && norm.shift) {
      NormRow<true, true>(norm, x, out, means[row], scales[row]);
    } else if (norm.factor) {
      NormRow<true, false>(norm, x, out, means[row], scales[row]);
    } else if (norm.shift) {
      NormRow<false, true>(norm, x, out, means[row], scales[row]);
    } else {
      NormRow<false, false>(norm, x, out, means[row], scales[row]);
    }
  }
}

// What the gradients of a layer norm are made of, and what is added to that of its
// input. Without a factor or such a value these are null.
struct NormGrad {
  const float* grad;
  const float* x;
  const float* means;
  const float* scales;
  const float* factor;
  const float* added;
  int64_t columns;
};

template <bool has_factor, bool has_added>
XPP_INLINE void NormGradRow(const NormGrad& of, int64_t row, float* out) {
  const float* grad = of.grad + row * of.columns;
  const float* x = of.x + row * of.columns;
  const float* factor = of.factor;
  const float* added = of.added + (has_added ? row * of.columns : 0);
  const float mean = of.means[row], scale = of.scales[row];
  const float count = static_cast<float>(of.columns);
  const auto scaled = [grad, factor](int64_t i) {
    return has_factor ? grad[i] * factor[i] : grad[i];
  };
  const auto normal = [x, mean, scale](int64_t i) { return (x[i] - mean) * scale; };
  const float middle = SumOf(of.columns, scaled) / count;
  const float along =
      SumOf(of.columns, [=](int64_t i) { return scaled(i) * normal(i); }) / count;
  for (int64_t i = 0; i < of.columns; ++i) {
    const float value = (scaled(i) - middle - normal(i) * along) * scale;
    out[i] = has_added ? added[i] + value : value;
  }
}

XPP_VECTORS void NormGradRows(const NormGrad& of, Range rows, float* result) {
  for (int64_t row = rows.begin; row < rows.begin + rows.size; ++row) {
    float* out = result + row * of.columns;
    if (of.factor && of.added) {
      NormGradRow<true, true>(of, row, out);
    } else if (of.factor) {
      NormGradRow<true, false>(of, row, out);
    } else if (of.added) {
      NormGradRow<false, true>(of, row, out);
    } else {
      NormGradRow<false, false>(of, row, out);
    }
  }
}

XPP_VECTORS void NormFactorGradColumns(const NormGrad& of, int64_t rows, Range range,
                                       float* result) {
  const auto term_of = [&of](int64_t row) {
    const float* grad = of.grad + row * of.columns;
    const float* x = of.x + row * of.columns;
    const float mean = of.means[row], scale = of.scales[row];
    return [=](int64_t i) { return grad[i] * ((x[i] - mean) * scale); };
  };
  SumOfColumns(rows, range, term_of, result);
}

using Values = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

ffi::Future Sum(ffi::ThreadPool pool, Values values, Result result, int64_t rows,
                int64_t columns, int64_t is_of_columns) {
  const float* from = values.typed_data();
  float* out = result->typed_data();
  const int64_t length = is_of_columns ? columns : rows;
  return RunParts(pool, length, rows * columns, [=](Range range) {
    if (is_of_columns) {
      SumColumns(from, rows, columns, range, out);
    } else {
      SumRows(from, columns, range, out);
    }
  });
}

ffi::Future Softmax(ffi::ThreadPool pool, Values values, Result result, int64_t rows,
                    int64_t columns, int64_t is_safe, int64_t is_log) {
  const float* from = values.typed_data();
  float* out = result->typed_data();
  return RunParts(pool, rows, 8 * rows * columns, [=](Range range) {
    if (is_log) {
      LogSoftmaxRows(from, columns, range, out);
    } else {
      SoftmaxRows(from, columns, is_safe != 0, range, out);
    }
  });
}

ffi::Future SoftmaxGrad(ffi::ThreadPool pool, Values outputs, Values grads,
                        Result result, int64_t rows, int64_t columns, int64_t is_log) {
  const float* grad = grads.typed_data();
  const float* output = outputs.typed_data();
  float* out = result->typed_data();
  const int64_t each = is_log ? 8 : 2;
  return RunParts(pool, rows, each * rows * columns, [=](Range range) {
    if (is_log) {
      LogSoftmaxGradRows(grad, output, columns, range, out);
    } else {
      SoftmaxGradRows(grad, output, columns, range, out);
    }
  });
}

ffi::Future NormOf(ffi::ThreadPool pool, Values x, ffi::RemainingArgs others, Result y,
                   Result means, Result scales, int64_t rows, int64_t columns,
                   int64_t epsilon, int64_t has_factor, int64_t has_shift) {
  const auto other = [&others](int64_t place) {
    return others.get<Values>(place)->typed_data();
  };
  const auto bits = static_cast<uint32_t>(epsilon);
  Norm norm{x.typed_data(), has_factor ? other(0) : nullptr,
            has_shift ? other(has_factor) : nullptr, columns, 0};
  std::memcpy(&norm.epsilon, &bits, sizeof(bits));
  float* out = y->typed_data();
  float* mean = means->typed_data();
  float* scale = scales->typed_data();
  return RunParts(pool, rows, 4 * rows * columns,
                  [=](Range range) { NormRows(norm, range, out, mean, scale); });
}

ffi::Future NormGradOf(ffi::ThreadPool pool, Values grad, Values x, Values means,
                       Values scales, ffi::RemainingArgs others, Result result,
                       int64_t rows, int64_t columns, int64_t has_factor,
                       int64_t has_added) {
  const auto other = [&others](int64_t place) {
    return others.get<Values>(place)->typed_data();
  };
  const NormGrad of{grad.typed_data(),
                    x.typed_data(),
                    means.typed_data(),
                    scales.typed_data(),
                    has_factor ? other(0) : nullptr,
                    has_added ? other(has_factor) : nullptr,
                    columns};
  float* out = result->typed_data();
  return RunParts(pool, rows, 8 * rows * columns,
                  [=](Range range) { NormGradRows(of, range, out); });
}

ffi::Future NormFactorGradOf(ffi::ThreadPool pool, Values grad, Values x, Values means,
                             Values scales, Result result, int64_t rows,
                             int64_t columns) {
  const NormGrad of{grad.typed_data(),
                    x.typed_data(),
                    means.typed_data(),
                    scales.typed_data(),
                    nullptr,
                    nullptr,
                    columns};
  float* out = result->typed_data();
  return RunParts(pool, columns, 4 * rows * columns,
                  [=](Range range) { NormFactorGradColumns(of, rows, range, out); });
}

XLA_FFI_DEFINE_HANDLER(kSum, Sum,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Ret<Values>()
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("is_of_columns"));

XLA_FFI_DEFINE_HANDLER(kSoftmax, Softmax,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Ret<Values>()
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("is_safe")
                           .Attr<int64_t>("is_log"));

XLA_FFI_DEFINE_HANDLER(kSoftmaxGrad, SoftmaxGrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Ret<Values>()
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("is_log"));

XLA_FFI_DEFINE_HANDLER(kNorm, NormOf,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .RemainingArgs()
                           .Ret<Values>()
                           .Ret<Values>()
                           .Ret<Values>()
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("epsilon")
                           .Attr<int64_t>("has_factor")
                           .Attr<int64_t>("has_shift"));

// The gradient of the result, the input, and its means and scales.
auto NormGradArgs() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Values>()
      .Arg<Values>()
      .Arg<Values>()
      .Arg<Values>();
}

XLA_FFI_DEFINE_HANDLER(kNormGrad, NormGradOf,
                       NormGradArgs()
                           .RemainingArgs()
                           .Ret<Values>()
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("has_factor")
                           .Attr<int64_t>("has_added"));

XLA_FFI_DEFINE_HANDLER(
    kNormFactorGrad, NormFactorGradOf,
    NormGradArgs().Ret<Values>().Attr<int64_t>("rows").Attr<int64_t>("columns"));

}  // namespace

XLA_FFI_Handler* SumHandler() { return kSum; }

XLA_FFI_Handler* SoftmaxHandler() { return kSoftmax; }

XLA_FFI_Handler* SoftmaxGradHandler() { return kSoftmaxGrad; }

XLA_FFI_Handler* NormHandler() { return kNorm; }

XLA_FFI_Handler* NormGradHandler() { return kNormGrad; }

XLA_FFI_Handler* NormFactorGradHandler() { return kNormFactorGrad; }

}  // namespace xla_pp
