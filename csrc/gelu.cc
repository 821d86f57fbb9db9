// The ops of XLA programs for GELU, as handlers of XLA's FFI.
//
// GELU: floats → each times the probability that a normal variable is less.
// Gradient: the gradient of that, floats → the gradient of the floats.
//
// Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv 1606.08415.

#include "gelu.h"

#include <cstdint>

#include "parts.h"
#include "terms.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kOperations = 32;  // for each float, about

struct Normal {
  float share;    // the probability that a normal variable is less
  float density;  // e^(-x^2 / 2)
};

// Within 5e-7 of the share, relative.
//
// The share of what is below -a is e^(-a^2 / 2) times a polynomial in 1 / (1 + 0.3 a),
// which was fitted for 0 <= a <= 9 to be within 5e-8.
//
// Source of the form: Hastings, Approximations for Digital Computers, 1955.
XPP_INLINE Normal NormalOf(float x) {
  const float size = x < 0 ? -x : x;
  const float t = 1.0f / (1.0f + 0.3f * size);
  float series = 0.03753525041f;
  series = series * t - 0.16501769100f;
  series = series * t + 0.21996773872f;
  series = series * t - 0.06639919281f;
  series = series * t + 0.13541825288f;
  series = series * t + 0.09778458043f;
  series = series * t + 0.12110558545f;
  series = series * t + 0.11960550072f;
  const float density = Exp(-0.5f * x * x);
  const float rest = series * t * density;
  return {x < 0 ? rest : 1.0f - rest, density};
}

XPP_VECTORS void GeluOf(const float* values, int64_t count, float* result) {
  for (int64_t i = 0; i < count; ++i) result[i] = values[i] * NormalOf(values[i]).share;
}

XPP_VECTORS void GeluGradOf(const float* grads, const float* values, int64_t count,
                            float* result) {
  constexpr float kOneByRootOfTwoPi = 0.398942280f;
  for (int64_t i = 0; i < count; ++i) {
    const auto [share, density] = NormalOf(values[i]);
    result[i] = grads[i] * (share + values[i] * (kOneByRootOfTwoPi * density));
  }
}

ffi::Future Run(ffi::ThreadPool pool, Floats values,
                ffi::ResultBuffer<ffi::F32> result) {
  const auto count = static_cast<int64_t>(values.element_count());
  const float* from = values.typed_data();
  float* out = result->typed_data();
  return RunParts(pool, count, kOperations * count, [=](Range part) {
    GeluOf(from + part.begin, part.size, out + part.begin);
  });
}

ffi::Future RunGrad(ffi::ThreadPool pool, Floats grads, Floats values,
                    ffi::ResultBuffer<ffi::F32> result) {
  const auto count = static_cast<int64_t>(values.element_count());
  const float *grad = grads.typed_data(), *from = values.typed_data();
  float* out = result->typed_data();
  return RunParts(pool, count, kOperations * count, [=](Range part) {
    GeluGradOf(grad + part.begin, from + part.begin, part.size, out + part.begin);
  });
}

XLA_FFI_DEFINE_HANDLER(
    kRun, Run, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>());

XLA_FFI_DEFINE_HANDLER(
    kRunGrad, RunGrad,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Ret<Floats>());

}  // namespace

XLA_FFI_Handler* GeluHandler() { return kRun; }

XLA_FFI_Handler* GeluGradHandler() { return kRunGrad; }

}  // namespace xla_pp
