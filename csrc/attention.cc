// The ops of XLA programs that compute attention and its gradients, as handlers of
// XLA's FFI. Scores are there for some rows and keys at a time, and stay in the caches;
// those of keys that no row of these sees are left out.
//
// Forward: queries, keys, values, a mask if there is one → the result, the sum of
// exponentials and the maximum of each row of scores. Gradients: that of the result,
// queries, keys, values, the results of the forward, the mask → those of queries, keys
// and values.
//
// Queries, keys and values are (batch, heads, length, width) in other values, whose
// layout the attributes give; a mask is bool, (batch, heads, length, keys), and says
// what rows see. The result and the gradients are (batch, length, heads,
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
  const bool* mask = nullptr;  // of one head
  int64_t mask_step = 0;
};

// The rows of a part of the scores, and the keys.
struct Tile {
  Range rows;
  Range keys;
  bool is_first;  // of those of its rows

  // How many of the keys come before the end of what causality lets a row see.
  int64_t Seen(int64_t row, bool is_causal) const {
    return is_causal
               ? std::clamp<int64_t>(rows.begin + row + 1 - keys.begin, 0, keys.size)
               : keys.size;
  }
};

// The mask of a row of a tile.
const bool* MaskOf(const Attention& of, const Tile& tile, int64_t row) {
  return of.mask + (tile.rows.begin + row) * of.mask_step + tile.keys.begin;
}

// Whether the mask hides all keys of a tile.
bool IsHidden(const Attention& of, const Tile& tile) {
  if (!of.mask) return false;
  const int64_t count = of.mask_step == 0 ? 1 : tile.rows.size;
  for (int64_t row = 0; row < count; ++row) {
    const auto size = static_cast<size_t>(tile.keys.size);
    if (std::memchr(MaskOf(of, tile, row), 1, size)) return false;
  }
  return true;
}

// Calls `run` with all tiles in which rows see keys, those of equal rows in turn; with
// one at least.
template <typename Run>
void ForTiles(const Attention& of, Run run) {
  for (int64_t row = 0; row < of.rows; row += kRows) {
    const Range rows{row, std::min(kRows, of.rows - row)};
    const int64_t seen = of.is_causal ? std::min(of.keys, row + rows.size) : of.keys;
    bool is_first = true;
    for (int64_t key = 0; key < seen; key += kKeys) {
      const Tile tile{rows, {key, std::min(kKeys, seen - key)}, is_first};
      const bool is_needed = is_first && key + kKeys >= seen;
      if (!is_needed && IsHidden(of, tile)) continue;
      run(tile);
      is_first = false;
    }
  }
}

// Makes scores of what the mask hides minus infinity.
XPP_VECTORS void Hide(const Attention& of, const Tile& tile, float* scores) {
  for (int64_t row = 0; of.mask && row < tile.rows.size; ++row) {
    float* own = scores + row * tile.keys.size;
    const bool* mask = MaskOf(of, tile, row);
    for (int64_t i = 0; i < tile.keys.size; ++i)
      own[i] = mask[i] ? own[i] : -Infinity();
  }
}

// One by a row's sum, by which its exponentials are scaled; 0 if a mask hides all.
XPP_INLINE float FactorOf(const Attention& of, float sum) {
  return of.mask && sum == 0 ? 0 : 1 / sum;
}

// Turns scores into exponentials of what they are less than the largest so far. Sums
// and results of the keys before are scaled by what that grows.
XPP_VECTORS void Weigh(const Attention& of, const Tile& tile, float* scores,
                       float* sums, float* maxima, float* result, int64_t step) {
  for (int64_t row = 0; row < tile.rows.size; ++row) {
    float* own = scores + row * tile.keys.size;
    const int64_t seen = tile.Seen(row, of.is_causal);
    const float before = tile.is_first ? -Infinity() : maxima[row];
    const float found = MaxOf(own, seen);
    const float most = found > before ? found : before;
    // All may be minus infinity so far; a later one may not.
    const float less = most == -Infinity() ? 0 : most;
    for (int64_t i = 0; i < seen; ++i) own[i] = Exp(own[i] - less);
    std::fill(own + seen, own + tile.keys.size, 0.0f);
    const float sum = SumOf(seen, [own](int64_t i) { return own[i]; });
    maxima[row] = most;
    if (tile.is_first) {
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

XPP_VECTORS void Divide(const Attention& of, const float* sums, float* result,
                        int64_t step) {
  for (int64_t row = 0; row < of.rows; ++row) {
    const float factor = FactorOf(of, sums[row]);
    float* out = result + row * step;
    for (int64_t i = 0; i < of.width; ++i) out[i] *= factor;
  }
}

// Computes the attention of one head.
void Attend(const Attention& of, Matrix query, Matrix key, Matrix value, float* scores,
            float* result, int64_t step, float* sums, float* maxima) {
  ForTiles(of, [&](const Tile& tile) {
    const auto& [rows, keys, is_first] = tile;
    float* out = result + rows.begin * step;
    Multiply({query.From(rows.begin), key.Turned(keys.begin), rows.size, of.width,
              keys.size, of.scale},
             scores, keys.size);
    Hide(of, tile, scores);
    Weigh(of, tile, scores, sums + rows.begin, maxima + rows.begin, out, step);
    const float kept = is_first ? 0.0f : 1.0f;
    Multiply({{scores, keys.size, false},
              value.From(keys.begin),
              rows.size,
              keys.size,
              of.width,
              1,
              kept},
             out, step);
  });
  Divide(of, sums, result, step);
}

// Turns scores into probabilities.
XPP_VECTORS void Share(const Attention& of, const Tile& tile, float* scores,
                       const float* sums, const float* maxima) {
  for (int64_t row = 0; row < tile.rows.size; ++row) {
    float* own = scores + row * tile.keys.size;
    const int64_t seen = tile.Seen(row, of.is_causal);
    const float less = of.mask && maxima[row] == -Infinity() ? 0 : maxima[row];
    const float factor = FactorOf(of, sums[row]);
    for (int64_t i = 0; i < seen; ++i) own[i] = Exp(own[i] - less) * factor;
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
    const auto& [rows, keys, is_first] = tile;
    const Factor shares_turned{scores, keys.size, true};
    const Factor grad{grads, keys.size, false}, grad_turned{grads, keys.size, true};
    Multiply({head.query.From(rows.begin), head.key.Turned(keys.begin), rows.size,
              of.width, keys.size, of.scale},
             scores, keys.size);
    Hide(of, tile, scores);
    Share(of, tile, scores, head.sums + rows.begin, head.maxima + rows.begin);
    Multiply({shares_turned, head.grad.From(rows.begin), keys.size, rows.size, of.width,
              1, 1},
             value.Row(keys.begin), value.step);
    Multiply({head.grad.From(rows.begin), head.value.Turned(keys.begin), rows.size,
              of.width, keys.size},
             grads, keys.size);
    GradOfScores(of, tile, scores, along + rows.begin, grads);
    const float kept = is_first ? 0.0f : 1.0f;
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

// Calls `run` with all places in the batch and heads, with the attention of each, and
// with memory for some blocks of scores and a number for each row.
template <typename Fields, typename Run>
ffi::Future ForHeads(ffi::ThreadPool pool, const Fields& fields,
                     ffi::RemainingArgs masks, int64_t num_blocks, int64_t num_products,
                     Run run) {
  const auto bits = static_cast<uint32_t>(fields.scale);
  Attention of{fields.batch,
               fields.heads,
               fields.rows,
               fields.keys,
               fields.width,
               fields.is_causal != 0,
               0};
  std::memcpy(&of.scale, &bits, sizeof(bits));
  const bool* mask = nullptr;
  if (fields.has_mask) mask = masks.get<ffi::Buffer<ffi::PRED>>(0)->typed_data();
  of.mask_step = fields.mask_row;
  const int64_t batch_step = fields.mask_batch, head_step = fields.mask_head;
  const int64_t count = of.batch * of.heads;
  const int64_t operations = count * num_products * of.rows * of.keys * of.width;
  return RunParts(pool, count, operations, [=](Range part) {
    const int64_t size = std::min(kRows, of.rows) * std::min(kKeys, of.keys);
    const std::unique_ptr<float[]> memory(new float[num_blocks * size + of.rows]);
    for (int64_t i = part.begin; i < part.begin + part.size; ++i) {
      const int64_t place = i / of.heads, head = i % of.heads;
      Attention own = of;
      if (mask) own.mask = mask + place * batch_step + head * head_step;
      run(own, place, head, memory.get(), size);
    }
  });
}

ffi::Future Run(ffi::ThreadPool pool, Values query, Values key, Values value,
                ffi::RemainingArgs masks, Result result, Result sums, Result maxima,
                ffi::Dictionary attributes) {
  AttentionFields fields;
  XPP_ATTENTION_FIELDS(XPP_READ_FIELD)
  const Heads queries = XPP_HEADS(query, query.typed_data());
  const Heads keys = XPP_HEADS(key, key.typed_data());
  const Heads values = XPP_HEADS(value, value.typed_data());
  float *out = result->typed_data(), *sum = sums->typed_data(),
        *most = maxima->typed_data();
  const auto run = [=](const Attention& of, int64_t place, int64_t head, float* scores,
                       int64_t) {
    const int64_t step = of.heads * of.width;
    const int64_t row = (place * of.heads + head) * of.rows;
    Attend(of, queries.At(place, head), keys.At(place, head), values.At(place, head),
           scores, out + place * of.rows * step + head * of.width, step, sum + row,
           most + row);
  };
  return ForHeads(pool, fields, masks, 1, 2, run);
}

ffi::Future RunGrad(ffi::ThreadPool pool, Values grad, Values query, Values key,
                    Values value, Values output, Values sums, Values maxima,
                    ffi::RemainingArgs masks, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  AttentionGradFields fields;
  XPP_ATTENTION_GRAD_FIELDS(XPP_READ_FIELD)
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
  const int64_t step = fields.heads * fields.width;
  const Heads outputs{output.typed_data(), fields.rows * step, fields.width, step};
  const float *sum = sums.typed_data(), *most = maxima.typed_data();
  const auto run = [=](const Attention& of, int64_t place, int64_t head, float* memory,
                       int64_t size) {
    const int64_t row = (place * of.heads + head) * of.rows;
    const HeadGrad from{grads.At(place, head),
                        queries.At(place, head),
                        keys.At(place, head),
                        values.At(place, head),
                        outputs.At(place, head),
                        sum + row,
                        most + row};
    AttendGrad(of, from, memory, memory + size, memory + 2 * size,
               of_queries.At(place, head), of_keys.At(place, head),
               of_values.At(place, head));
  };
  return ForHeads(pool, fields, masks, 2, 5, run);
}

XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .Arg<Values>()
                           .RemainingArgs()
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
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Handler* AttentionHandler() { return kRun; }

XLA_FFI_Handler* AttentionGradHandler() { return kRunGrad; }

}  // namespace xla_pp
