// The interface of this library and Python, stated once.
//
// torch_xla_pp/native/abi.py mirrors these lists; the two are compared when the library
// is loaded. Numbers count from 0. A list of fields is a row of int64 in this order.
// Where a row is an operand of a program, each number is two int32 words: compilers for
// accelerators refuse calls with 64-bit operands.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xla_pp {

// The ops that programs call.
#define XPP_OPS(X)                     \
  X(kSend, send)                       \
  X(kReceive, receive)                 \
  X(kBegin, begin)                     \
  X(kEnd, end)                         \
  X(kProduct, product)                 \
  X(kProductSum, product_sum)          \
  X(kProductBias, product_bias)        \
  X(kSum, sum)                         \
  X(kSoftmax, softmax)                 \
  X(kSoftmaxGrad, softmax_grad)        \
  X(kNorm, norm)                       \
  X(kNormGrad, norm_grad)              \
  X(kNormFactorGrad, norm_factor_grad) \
  X(kGelu, gelu)                       \
  X(kGeluGrad, gelu_grad)              \
  X(kCopy, copy)                       \
  X(kSplit, split)                     \
  X(kAttention, attention)             \
  X(kAttentionGrad, attention_grad)    \
  X(kPlaced, placed)                   \
  X(kPause, pause)

// The words of a number of an operand.
#define XPP_WORDS(X) X(low) X(high)

// The events that the recorder notes.
#define XPP_EVENTS(X)                                      \
  X(kBegan, began)     /* a program of an action */        \
  X(kEnded, ended)     /* likewise */                      \
  X(kSent, sent)       /* a device handed over its part */ \
  X(kAsked, asked)     /* a device asked for a message */  \
  X(kArrived, arrived) /* a part of a message came */

// Why a generation has failed.
#define XPP_FAILURES(X)                                       \
  X(kNone, none)                                              \
  X(kError, error)     /* the message or the peer is wrong */ \
  X(kTimeout, timeout) /* a message did not come in time */   \
  X(kReport, report)   /* a peer told of its own failure; the text is the peer's */

// Letters of the contents of messages: values, their gradients, and gradients to be
// summed over copies of a parameter, in other stages or in other replicas.
#define XPP_DIRECTIONS(X) X(F) X(B) X(S)

// Letters of the kinds of actions.
#define XPP_KINDS(X) X(F) X(B) X(I) X(W)

// A note. Of programs, `direction` is the kind of the action and there is no origin.
#define XPP_RECORD_FIELDS(X)                \
  X(event)                                  \
  X(time_ns) /* of the monotonic clock */   \
  X(num_bytes)                              \
  X(direction)                              \
  X(stage)  /* that consumes the values */  \
  X(origin) /* the stage that makes them */ \
  X(microbatch)

// The operand of begin and end: an action.
#define XPP_MARK_FIELDS(X) X(kind) X(stage) X(microbatch)

// The route operand of send and receive: what changes from call to call, so that
// nothing is recompiled. Calls that send or receive the same message in later steps
// have the same route. After these fields come, for each tensor and device of this
// rank, its holder, and then rows.
//
// If both ranks shard the values in the same way, a holder is the lowest device with
// the same shard; if not, it is the number of the tile that the device holds. In the
// second case, rows are the pieces that a message is cut into, in their order in the
// messages of their sources.
#define XPP_ROUTE_FIELDS(X)                                                          \
  X(engine)                                                                          \
  X(generation)                                                                      \
  X(peer)                                                                            \
  X(direction)                                                                       \
  X(stage)                                                                           \
  X(origin)                                                                          \
  X(microbatch)                                                                      \
  X(digest)                                                                          \
  X(num_devices) /* of this rank */                                                  \
  X(num_sources) /* devices of the sender; 0 if each gets the shard of the device */ \
                 /* of its number, as the values lie alike on both ranks */          \
  X(num_levels)  /* of each row's box */

// A row: one piece of a value, and its place on this rank. After these fields come
// count and distance in bytes of each level of the box.
#define XPP_ROW_FIELDS(X)                    \
  X(tensor)                                  \
  X(source) /* the sender's device */        \
  X(tile)   /* the receiver's */             \
  X(offset) /* in bytes, likewise the run */ \
  X(run)

// The counters of an engine.
#define XPP_STATS_FIELDS(X)                                       \
  X(held_bytes)   /* of messages that no receive has taken yet */ \
  X(num_messages) /* one per device of a sender */                \
  X(num_waiting)  /* receive ops, one per device */

// The attributes of a product, alone, with a bias, or added to a sum.
#define XPP_PRODUCT_FIELDS(X) \
  X(batch)                    \
  X(rows)                     \
  X(depth)                    \
  X(columns)                  \
  X(is_left_turned)           \
  X(is_right_turned)

// The attributes of a sum: of each row, or of each column.
#define XPP_SUM_FIELDS(X) X(rows) X(columns) X(is_of_columns)

// The attributes of a softmax of rows: whether one of minus infinity alone gives zeros,
// and whether the result is the logarithm.
#define XPP_SOFTMAX_FIELDS(X) X(rows) X(columns) X(is_safe) X(is_log)

// The attributes of its gradient.
#define XPP_SOFTMAX_GRAD_FIELDS(X) X(rows) X(columns) X(is_log)

// The attributes of a layer norm of rows, by a factor and a shift if it has them.
// `epsilon` has the bits of a float.
#define XPP_NORM_FIELDS(X) X(rows) X(columns) X(epsilon) X(has_factor) X(has_shift)

// The attributes of the gradient of its input.
#define XPP_NORM_GRAD_FIELDS(X) X(rows) X(columns) X(has_factor) X(has_added)

// The attributes of the gradient of its factor.
#define XPP_NORM_FACTOR_GRAD_FIELDS(X) X(rows) X(columns)

// The attributes of GELU and of its gradient.
#define XPP_GELU_FIELDS(X) X(count)

// The attributes of a copy of a view of four dimensions. `factor` has the bits of a
// float.
#define XPP_COPY_FIELDS(X) \
  X(offset)                \
  X(factor)                \
  X(size_0)                \
  X(size_1)                \
  X(size_2)                \
  X(size_3)                \
  X(stride_0)              \
  X(stride_1)              \
  X(stride_2)              \
  X(stride_3)

// How matrices of one width, one for each head of each place of the batch, lie in a
// value: where the first number is, and how far apart they and their rows are.
#define XPP_LAYOUT_FIELDS(X, of) X(of##_offset) X(of##_batch) X(of##_head) X(of##_row)

// The attributes of attention, with a mask if it has one. `scale` has the bits of a
// float.
#define XPP_ATTENTION_FIELDS(X) \
  X(batch)                      \
  X(heads)                      \
  X(rows)                       \
  X(keys)                       \
  X(width)                      \
  X(is_causal)                  \
  X(has_mask)                   \
  X(scale)                      \
  XPP_LAYOUT_FIELDS(X, query)   \
  XPP_LAYOUT_FIELDS(X, key)     \
  XPP_LAYOUT_FIELDS(X, value)   \
  XPP_LAYOUT_FIELDS(X, mask)

// The attributes of its gradients: of which result each is a part, besides the layouts.
#define XPP_ATTENTION_GRAD_FIELDS(X) \
  XPP_ATTENTION_FIELDS(X)            \
  XPP_LAYOUT_FIELDS(X, grad)         \
  X(query_grad_result)               \
  XPP_LAYOUT_FIELDS(X, query_grad)   \
  X(key_grad_result)                 \
  XPP_LAYOUT_FIELDS(X, key_grad)     \
  X(value_grad_result)               \
  XPP_LAYOUT_FIELDS(X, value_grad)

// Where an operand or a result of an op lies, for a call of it on pieces of larger
// values. `value` counts the call's operands, then its results; `offset` is in numbers
// of float32, or -1 for all of that value. Otherwise `rank` sizes come after these
// fields. The attribute `places` has the op, then how many operands there are and the
// place of each, then likewise for results.
#define XPP_PLACE_FIELDS(X) X(value) X(offset) X(rank)

#define XPP_NUMBER(number, name) number,
#define XPP_NAME(number, name) " " #name
#define XPP_LETTER(letter) #letter
#define XPP_FIELD(name) int64_t name = 0;
#define XPP_FIELD_NAME(name) " " #name
#define XPP_ONE(name) +1
// Reads a field from the attributes of a call.
#define XPP_READ_FIELD(name) fields.name = attributes.get<int64_t>(#name).value();

enum class Op : int32_t { XPP_OPS(XPP_NUMBER) };
enum class Event : int64_t { XPP_EVENTS(XPP_NUMBER) };
enum class FailureKind : int32_t { XPP_FAILURES(XPP_NUMBER) };

constexpr char kDirections[] = XPP_DIRECTIONS(XPP_LETTER);

struct Record {
  XPP_RECORD_FIELDS(XPP_FIELD)
};
struct MarkFields {
  XPP_MARK_FIELDS(XPP_FIELD)
};
struct RouteFields {
  XPP_ROUTE_FIELDS(XPP_FIELD)
};
struct RowFields {
  XPP_ROW_FIELDS(XPP_FIELD)
};
struct ProductFields {
  XPP_PRODUCT_FIELDS(XPP_FIELD)
};
struct AttentionFields {
  XPP_ATTENTION_FIELDS(XPP_FIELD)
};
struct AttentionGradFields {
  XPP_ATTENTION_GRAD_FIELDS(XPP_FIELD)
};
struct PlaceFields {
  XPP_PLACE_FIELDS(XPP_FIELD)
};
struct InboxStats {
  XPP_STATS_FIELDS(XPP_FIELD)
};

constexpr size_t kRouteFields = XPP_ROUTE_FIELDS(XPP_ONE);
constexpr size_t kRowFields = XPP_ROW_FIELDS(XPP_ONE);
constexpr size_t kPlaceFields = XPP_PLACE_FIELDS(XPP_ONE);

// All of it, as `native.abi.text` writes it.
constexpr char kAbi[] =
    "ops" XPP_OPS(XPP_NAME) "\n"
    "words" XPP_WORDS(XPP_FIELD_NAME) "\n"
    "events" XPP_EVENTS(XPP_NAME) "\n"
    "failures" XPP_FAILURES(XPP_NAME) "\n"
    "directions" XPP_DIRECTIONS(XPP_FIELD_NAME) "\n"
    "kinds" XPP_KINDS(XPP_FIELD_NAME) "\n"
    "record" XPP_RECORD_FIELDS(XPP_FIELD_NAME) "\n"
    "mark" XPP_MARK_FIELDS(XPP_FIELD_NAME) "\n"
    "route" XPP_ROUTE_FIELDS(XPP_FIELD_NAME) "\n"
    "row" XPP_ROW_FIELDS(XPP_FIELD_NAME) "\n"
    "stats" XPP_STATS_FIELDS(XPP_FIELD_NAME) "\n"
    "product" XPP_PRODUCT_FIELDS(XPP_FIELD_NAME) "\n"
    "sum" XPP_SUM_FIELDS(XPP_FIELD_NAME) "\n"
    "softmax" XPP_SOFTMAX_FIELDS(XPP_FIELD_NAME) "\n"
    "softmax_grad" XPP_SOFTMAX_GRAD_FIELDS(XPP_FIELD_NAME) "\n"
    "norm" XPP_NORM_FIELDS(XPP_FIELD_NAME) "\n"
    "norm_grad" XPP_NORM_GRAD_FIELDS(XPP_FIELD_NAME) "\n"
    "norm_factor_grad" XPP_NORM_FACTOR_GRAD_FIELDS(XPP_FIELD_NAME) "\n"
    "gelu" XPP_GELU_FIELDS(XPP_FIELD_NAME) "\n"
    "copy" XPP_COPY_FIELDS(XPP_FIELD_NAME) "\n"
    "attention" XPP_ATTENTION_FIELDS(XPP_FIELD_NAME) "\n"
    "attention_grad" XPP_ATTENTION_GRAD_FIELDS(XPP_FIELD_NAME) "\n"
    "place" XPP_PLACE_FIELDS(XPP_FIELD_NAME) "\n";

}  // namespace xla_pp
