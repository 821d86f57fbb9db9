// Sums, maxima and exponentials along rows of floats.
//
// All loops are written so that compilers use vectors without reordering what is added:
// sums have kLanes partial sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace xla_pp {

constexpr int64_t kLanes = 16;
// Rows that are added up by themselves. Their sums are added up with what each addition
// has lost, so that errors do not grow with the number of blocks.
//
// Source: Kahan, Further remarks on reducing truncation errors, CACM 8(1), 1965.
constexpr int64_t kBlock = 64;
inline float Infinity() { return std::numeric_limits<float>::infinity(); }

// Adds to a sum, and to what it has lost so far; one that is infinite loses nothing.
XPP_INLINE void Add(float value, float& sum, float& lost) {
  const float wanted = value - lost;
  const float next = sum + wanted;
  const float difference = next - sum - wanted;
  lost = difference == difference ? difference : 0;
  sum = next;
}

XPP_INLINE float SumOfLanes(const float* lanes) {
  float result = 0;
  for (int64_t i = 0; i < kLanes; ++i) result += lanes[i];
  return result;
}

// The sum of term(i) for i < count; blocks of terms are added up by themselves.
template <typename Term>
XPP_INLINE float SumOf(int64_t count, Term term) {
  float total = 0, lost = 0;
  for (int64_t begin = 0; begin < count; begin += kLanes * kBlock) {
    const int64_t end = std::min(count, begin + kLanes * kBlock);
    float lanes[kLanes] = {};
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] += term(at + i);
    }
    float rest = 0;
    for (; at < end; ++at) rest += term(at);
    Add(SumOfLanes(lanes) + rest, total, lost);
  }
  return total;
}

// The largest of some values, unless these are NaN alone.
XPP_INLINE float MaxOf(const float* values, int64_t count) {
  typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
  Lanes lanes = Lanes{} - Infinity();
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    Lanes next;
    std::memcpy(&next, values + at, sizeof(next));
    lanes = next > lanes ? next : lanes;
  }
  float result = -Infinity();
  for (; at < count; ++at) result = values[at] > result ? values[at] : result;
  for (int64_t i = 0; i < kLanes; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

// e^x for x of at most 0, within 2 units in the last place; 0 where it would be
// denormal.
//
// x = n ln 2 + r, where |r| is at most ln 2 / 2, and e^r by its Taylor series. Adding
// 1.5 * 2^23 rounds to an integer, which then is in the lowest bits.
XPP_INLINE float Exp(float x) {
  constexpr float kRound = 12582912.0f;
  constexpr float kLowest = -87.33654f;
  const float bounded = x < kLowest ? kLowest : x;
  const float shifted = bounded * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts, of which the first has few digits.
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  // The exponent of 2^n; the other bits of `shifted` leave at the top.
  bits = static_cast<int32_t>((static_cast<uint32_t>(bits) + 127u) << 23);
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < kLowest ? 0.0f : series * power;
}

}  // namespace xla_pp
