// The ops of XLA programs that compute attention and its gradients, as handlers of
// XLA's FFI. Scores are there for some rows and keys at a time, and stay in the caches;
// those of keys that no row of these sees are left out.
//
// Forward: queries, keys, values → the result, the sum of exponentials and the maximum
// of each row of scores.
// Gradients: that of the result, queries, keys, values, and the results of the forward
// → those of queries, keys and values.
//
// Queries, keys and values are (batch, heads, length, width) in other values, whose
// layout the attributes give. The result and the gradients are (batch, length, heads,
// width), in the order of rows.
//
// Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
// IO-Awareness", NeurIPS 2022; sums while the maximum grows: Milakov and Gimelshein,
// "Online normalizer calculation for softmax", arXiv 1805.02867.

#include "attention.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "abi.h"
#include "parts.h"
#include "products.h"
#include "terms.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

// How many rows and keys scores are there for: 64 KiB of them stay in the second cache.
constexpr int64_t kRows = 64;
constexpr int64_t kKeys = 256;

// A matrix in memory, whose rows are `step` numbers apart.
struct Matrix {
  float* data;
  int64_t step;

  float* Row(int64_t row) const { return data + row * step; }
  Factor From(int64_t row) const { return {Row(row), step, false}; }
  Factor Turned(int64_t row) const { return {Row(row), step, true}; }
};

// Matrices of one width, one for each head of each place of the batch.
struct Heads {
  float* data;
  int64_t batch_step;
  int64_t head_step;
  int64_t row_step;

  Matrix At(int64_t place, int64_t head) const {
    return {data + place * batch_step + head * head_step, row_step};
  }
};

struct Attention {
  int64_t batch;
  int64_t heads;
  int64_t rows;
  int64_t keys;
  int64_t width;
  bool is_causal;
  float scale;
};

// The rows of a part of the scores, and the keys.
struct Tile {
  Range rows;
  Range keys;

  // How many of the keys a row of the tile sees.
  int64_t Seen(int64_t row, bool is_causal) const {
    return is_causal
               ? std::clamp<int64_t>(rows.begin + row + 1 - keys.begin, 0, keys.size)
               : keys.size;
  }
};

// Calls `run` with all tiles in which rows see keys, those of equal rows in turn.
template <typename Run>
void ForTiles(const Attention& of, Run run) {
  for (int64_t row = 0; row < of.rows; row += kRows) {
    const Range rows{row, std::min(kRows, of.rows - row)};
    const int64_t seen = of.is_causal ? std::min(of.keys, row + rows.size) : of.keys;
    for (int64_t key = 0; key < seen; key += kKeys) {
      run(Tile{rows, {key, std::min(kKeys, seen - key)}});
    }
  }
}

// Turns scores into exponentials of what they are less than the largest so far. Sums
// and results of the keys before are scaled by what that grows.
XPP_VECTORS void Weigh(const Attention& of, const Tile& tile, float* scores,
                       float* sums, float* maxima, float* result, int64_t step) {
  for (int64_t row = 0; row < tile.rows.size; ++row) {
    float* own = scores + row * tile.keys.size;
    const int64_t seen = tile.Seen(row, of.is_causal);
    const bool is_first = tile.keys.begin == 0;
    const float before = is_first ? -Infinity() : maxima[row];
    const float found = MaxOf(own, seen);
    const float most = found > before ? found : before;
    // All may be minus infinity so far; a later one may not.
    const float less = most == -Infinity() ? 0 : most;
    for (int64_t i = 0; i < seen; ++i) own[i] = Exp(own[i] - less);
    std::fill(own + seen, own + tile.keys.size, 0.0f);
    const float sum = SumOf(seen, [own](int64_t i) { return own[i]; });
    maxima[row] = most;
    if (is_first) {
      sums[row] = sum;
      continue;
    }
    const float factor = most == before ? 1.0f : Exp(before - most);
    sums[row] = sums[row] * factor + sum;
    if (factor == 1.0f) continue;
    float* out = result + row * step;
    for (int64_t i = 0; i < of.width; ++i) out[i] *= factor;
  }
}

XPP_VECTORS void Divide(int64_t rows, int64_t width, const float* sums, float* result,
                        int64_t step) {
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = 1 / sums[row];
    float* out = result + row * step;
    for (int64_t i = 0; i < width; ++i) out[i] *= factor;
  }
}

// Computes the attention of one head.
void Attend(const Attention& of, Matrix query, Matrix key, Matrix value, float* scores,
            float* result, int64_t step, float* sums, float* maxima) {
  ForTiles(of, [&](const Tile& tile) {
    const auto& [rows, keys] = tile;
    float* out = result + rows.begin * step;
    Multiply({query.From(rows.begin), key.Turned(keys.begin), rows.size, of.width,
              keys.size, of.scale},
             scores, keys.size);
    Weigh(of, tile, scores, sums + rows.begin, maxima + rows.begin, out, step);
    const float kept = keys.begin == 0 ? 0.0f : 1.0f;
    Multiply({{scores, keys.size, false},
              value.From(keys.begin),
              rows.size,
              keys.size,
              of.width,
              1,
              kept},
             out, step);
  });
  Divide(of.rows, of.width, sums, result, step);
}

// Turns scores into probabilities.
XPP_VECTORS void Share(const Attention& of, const Tile& tile, float* scores,
                       const float* sums, const float* maxima) {
  for (int64_t row = 0; row < tile.rows.size; ++row) {
    float* own = scores + row * tile.keys.size;
    const int64_t seen = tile.Seen(row, of.is_causal);
    const float most = maxima[row], factor = 1 / sums[row];
    for (int64_t i = 0; i < seen; ++i) own[i] = Exp(own[i] - most) * factor;
    std::fill(own + seen, own + tile.keys.size, 0.0f);
  }
}

// The product of a result's row with its gradient.
XPP_VECTORS void Along(int64_t rows, int64_t width, Matrix grad, Matrix output,
                       float* along) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* one = grad.Row(row);
    const float* other = output.Row(row);
    along[row] = SumOf(width, [=](int64_t i) { return one[i] * other[i]; });
  }
}

// Turns gradients of probabilities into those of scores.
XPP_VECTORS void GradOfScores(const Attention& of, const Tile& tile,
                              const float* shares, const float* along, float* grads) {
  for (int64_t row = 0; row < tile.rows.size; ++row) {
    const float* share = shares + row * tile.keys.size;
    float* grad = grads + row * tile.keys.size;
    const int64_t seen = tile.Seen(row, of.is_causal);
    const float less = along[row], scale = of.scale;
    for (int64_t i = 0; i < seen; ++i) grad[i] = share[i] * (grad[i] - less) * scale;
    std::fill(grad + seen, grad + tile.keys.size, 0.0f);
  }
}

// What the gradients of one head are made of.
struct HeadGrad {
  Matrix grad;
  Matrix query;
  Matrix key;
  Matrix value;
  Matrix output;
  const float* sums;
  const float* maxima;
};

// Computes the gradients of one head.
void AttendGrad(const Attention& of, const HeadGrad& head, float* scores, float* grads,
                float* along, Matrix query, Matrix key, Matrix value) {
  for (int64_t row = 0; row < of.keys; ++row) {
    std::fill_n(key.Row(row), of.width, 0.0f);
    std::fill_n(value.Row(row), of.width, 0.0f);
  }
  Along(of.rows, of.width, head.grad, head.output, along);
  ForTiles(of, [&](const Tile& tile) {
    const auto& [rows, keys] = tile;
    const Factor shares_turned{scores, keys.size, true};
    const Factor grad{grads, keys.size, false}, grad_turned{grads, keys.size, true};
    Multiply({head.query.From(rows.begin), head.key.Turned(keys.begin), rows.size,
              of.width, keys.size, of.scale},
             scores, keys.size);
    Share(of, tile, scores, head.sums + rows.begin, head.maxima + rows.begin);
    Multiply({shares_turned, head.grad.From(rows.begin), keys.size, rows.size, of.width,
              1, 1},
             value.Row(keys.begin), value.step);
    Multiply({head.grad.From(rows.begin), head.value.Turned(keys.begin), rows.size,
              of.width, keys.size},
             grads, keys.size);
    GradOfScores(of, tile, scores, along + rows.begin, grads);
    const float kept = keys.begin == 0 ? 0.0f : 1.0f;
    Multiply({grad, head.key.From(keys.begin), rows.size, keys.size, of.width, 1, kept},
             query.Row(rows.begin), query.step);
    Multiply({grad_turned, head.query.From(rows.begin), keys.size, rows.size, of.width,
              1, 1},
             key.Row(keys.begin), key.step);
  });
}

using Values = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

// Matrices within a value, by attributes that begin with a word.
#define XPP_HEADS(of, data)                                                         \
  Heads {                                                                           \
    data + fields.of##_offset, fields.of##_batch, fields.of##_head, fields.of##_row \
  }

#define XPP_READ_FIELD(name) fields.name = attributes.get<int64_t>(#name).value();

template <typename Fields>
Attention SizesOf(const Fields& fields) {
  const auto bits = static_cast<uint32_t>(fields.scale);
  Attention of{fields.batch,
               fields.heads,
               fields.rows,
               fields.keys,
               fields.width,
               fields.is_causal != 0,
               0};
  std::memcpy(&of.scale, &bits, sizeof(bits));
  return of;
}

// Calls `run` with the place in the batch and the head of all of them, and with memory
// for some blocks of scores and a number for each row.
template <typename Run>
ffi::Future ForHeads(ffi::ThreadPool pool, const Attention& of, int64_t num_blocks,
                     int64_t num_products, Run run) {
  const int64_t count = of.batch * of.heads;
  const int64_t operations = count * num_products * of.rows * of.keys * of.width;
  return RunParts(pool, count, operations, [=](Range part) {
    const int64_t size = std::min(kRows, of.rows) * std::min(kKeys, of.keys);
    const std::unique_ptr<float[]> memory(new float[num_blocks * size + of.rows]);
    for (int64_t i = part.begin; i < part.begin + part.size; ++i) {
      run(i / of.heads, i % of.heads, memory.get(), size);
    }
  });
}

ffi::Future Run(ffi::ThreadPool pool, Values query, Values key, Values value,
                Result result, Result sums, Result maxima, ffi::Dictionary attributes) {
  AttentionFields fields;
  XPP_ATTENTION_FIELDS(XPP_READ_FIELD)
  const Attention of = SizesOf(fields);
  const Heads queries = XPP_HEADS(query, query.typed_data());
  const Heads keys = XPP_HEADS(key, key.typed_data());
  const Heads values = XPP_HEADS(value, value.typed_data());
  float *out = result->typed_data(), *sum = sums->typed_data(),
        *most = maxima->typed_data();
  return ForHeads(pool, of, 1, 2,
                  [=](int64_t place, int64_t head, float* scores, int64_t) {
                    const int64_t step = of.heads * of.width;
                    const int64_t row = (place * of.heads + head) * of.rows;
                    Attend(of, queries.At(place, head), keys.At(place, head),
                           values.At(place, head), scores,
                           out + place * of.rows * step + head * of.width, step,
                           sum + row, most + row);
                  });
}

ffi::Future RunGrad(ffi::ThreadPool pool, Values grad, Values query, Values key,
                    Values value, Values output, Values sums, Values maxima,
                    ffi::RemainingRets results, ffi::Dictionary attributes) {
  AttentionGradFields fields;
  XPP_ATTENTION_GRAD_FIELDS(XPP_READ_FIELD)
  const Attention of = SizesOf(fields);
  const auto result = [&results](int64_t number) {
    return (*results.get<Values>(static_cast<size_t>(number)))->typed_data();
  };
  const Heads grads = XPP_HEADS(grad, grad.typed_data());
  const Heads queries = XPP_HEADS(query, query.typed_data());
  const Heads keys = XPP_HEADS(key, key.typed_data());
  const Heads values = XPP_HEADS(value, value.typed_data());
  const Heads of_queries = XPP_HEADS(query_grad, result(fields.query_grad_result));
  const Heads of_keys = XPP_HEADS(key_grad, result(fields.key_grad_result));
  const Heads of_values = XPP_HEADS(value_grad, result(fields.value_grad_result));
  const int64_t step = of.heads * of.width;
  const Heads outputs{output.typed_data(), of.rows * step, of.width, step};
  const float *sum = sums.typed_data(), *most = maxima.typed_data();
  return ForHeads(
      pool, of, 2, 5, [=](int64_t place, int64_t head, float* memory, int64_t size) {
        const int64_t row = (place * of.heads + head) * of.rows;
        AttendGrad(
            of,
            {grads.At(place, head), queries.At(place, head), keys.At(place, head),
             values.At(place, head), outputs.At(place, head), sum + row, most + row},
            memory, memory + size, memory + 2 * size, of_queries.At(place, head),
            of_keys.At(place, head), of_values.At(place, head));
      });
}

XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Ret<Values>()
                           .Ret<Values>()
                           .Ret<Values>()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kRunGrad, RunGrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Handler* AttentionHandler() { return kRun; }

XLA_FFI_Handler* AttentionGradHandler() { return kRunGrad; }

}  // namespace xla_pp
