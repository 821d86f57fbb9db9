// Placed: another op, some of whose operands and results are pieces of larger values.
//
// The attribute `places` says which op it is, and where each of its operands and
// results lies; see abi.h. The others are the op's own. A larger value that is written
// to is the last operands and results, one memory each.

#include "placed.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "handlers.h"

namespace xla_pp {
namespace {

constexpr char kPlaces[] = "places";

// The operands or the results of an op, of which some were made here.
class Values {
 public:
  // Reads as many places as the next number says, and moves on behind them.
  Values(const XLA_FFI_CallFrame& frame, const int64_t** numbers) {
    const auto count = static_cast<size_t>(*(*numbers)++);
    buffers_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      PlaceFields place;
      std::memcpy(&place, *numbers, sizeof(place));
      *numbers += kPlaceFields;
      void* whole = place.value < frame.args.size
                        ? frame.args.args[place.value]
                        : frame.rets.rets[place.value - frame.args.size];
      if (place.offset >= 0) {
        XLA_FFI_Buffer buffer = *static_cast<XLA_FFI_Buffer*>(whole);
        buffer.data = static_cast<float*>(buffer.data) + place.offset;
        buffer.rank = place.rank;
        buffer.dims = const_cast<int64_t*>(*numbers);
        *numbers += place.rank;
        buffers_.push_back(buffer);
        whole = &buffers_.back();
      }
      pointers_.push_back(whole);
    }
  }

  int64_t size() const { return static_cast<int64_t>(pointers_.size()); }
  void** data() { return pointers_.data(); }

 private:
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
};

// Attributes without one of them.
class Others {
 public:
  Others(const XLA_FFI_Attrs& attributes, int64_t left_out) : attributes_(attributes) {
    for (int64_t i = 0; i < attributes.size; ++i) {
      if (i == left_out) continue;
      types_.push_back(attributes.types[i]);
      names_.push_back(attributes.names[i]);
      values_.push_back(attributes.attrs[i]);
    }
    attributes_.size = static_cast<int64_t>(types_.size());
    attributes_.types = types_.data();
    attributes_.names = names_.data();
    attributes_.attrs = values_.data();
  }

  const XLA_FFI_Attrs& get() const { return attributes_; }

 private:
  XLA_FFI_Attrs attributes_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

// Returns which attribute it is, the number of all if it is none.
int64_t PlacesAmong(const XLA_FFI_Attrs& attributes) {
  const auto is_it = [](const XLA_FFI_ByteSpan& name) {
    const size_t size = sizeof(kPlaces) - 1;
    return name.len == size && std::memcmp(name.ptr, kPlaces, size) == 0;
  };
  int64_t i = 0;
  while (i < attributes.size && !is_it(*attributes.names[i])) ++i;
  return i;
}

// What ops capture beyond their return are addresses of data, never these buffers.
XLA_FFI_Error* Placed(XLA_FFI_CallFrame* frame) {
  const int64_t at = PlacesAmong(frame->attrs);
  // XLA asks what the handler can do, which is the same for all of these ops.
  if (at == frame->attrs.size) return HandlerFor(Op::kCopy)(frame);
  const auto* array = static_cast<const XLA_FFI_Array*>(frame->attrs.attrs[at]);
  const auto* numbers = static_cast<const int64_t*>(array->data);
  XLA_FFI_Handler* const handler = HandlerFor(static_cast<Op>(*numbers++));
  Values operands(*frame, &numbers), results(*frame, &numbers);
  const Others others(frame->attrs, at);
  std::vector<XLA_FFI_ArgType> operand_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame inner = *frame;
  inner.args.size = operands.size();
  inner.args.types = operand_types.data();
  inner.args.args = operands.data();
  inner.rets.size = results.size();
  inner.rets.types = result_types.data();
  inner.rets.rets = results.data();
  inner.attrs = others.get();
  XLA_FFI_Error* error = handler(&inner);
  frame->future = inner.future;
  return error;
}

}  // namespace

XLA_FFI_Handler* PlacedHandler() { return Placed; }

}  // namespace xla_pp
