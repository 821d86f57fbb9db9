// The ops of XLA programs that send and receive, as handlers of XLA's FFI.
//
// Receive: the route (see abi.h) → shards, a token.
// Send: the route, shards → a token.
// Begin, end: a mark (see abi.h), values to be computed before → a token.
//
// Routes and marks are int32[], two words for each number, low words first: in memory
// the same as int64[].
//
// A token is an int32[1] without a meaning: a program that returns it keeps the op.

#include "handlers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "engine.h"
#include "engines.h"
#include "gelu.h"
#include "pages.h"
#include "pause.h"
#include "placed.h"
#include "products.h"
#include "recorder.h"
#include "rows.h"
#include "views.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

struct Route : RouteFields {
  const int64_t* holders = nullptr;  // [tensor * num_devices + device]
  const int64_t* rows = nullptr;     // see `RowsOf`
  size_t num_rows = 0;

  bool is_alike() const { return num_sources == 0; }
};

constexpr size_t kFirstSent = 1;  // operand of the send op

// One piece of a value, and its place on this rank.
struct Row {
  size_t tensor;
  int64_t source;  // the sender's device
  int64_t tile;    // the receiver's
  Box box;
};

struct Shard {
  char* data;
  size_t size;
};

const char* NameOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return "bool";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::S16:
      return "int16";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U16:
      return "uint16";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::U64:
      return "uint64";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F64:
      return "float64";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::C64:
      return "complex64";
    case ffi::DataType::C128:
      return "complex128";
    default:
      return "float8";
  }
}

// Adds e.g. "float32[4,2]".
void AppendText(const ffi::AnyBuffer& buffer, std::string* text) {
  if (!text->empty()) *text += " ";
  *text += NameOf(buffer.element_type());
  *text += "[";
  const auto dims = buffer.dimensions();
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i) *text += ",";
    *text += std::to_string(dims[i]);
  }
  *text += "]";
}

// All bits set are NaN in every float type, -1 in signed ones; a bool must be 0 or 1.
char FillingOf(ffi::DataType dtype) {
  return dtype == ffi::DataType::PRED ? 0 : static_cast<char>(0xFF);
}

Shard ShardOf(const ffi::AnyBuffer& buffer) {
  return {static_cast<char*>(buffer.untyped_data()), buffer.size_bytes()};
}

template <typename Fields>
Fields FieldsAt(const int64_t* data) {
  Fields fields;
  std::memcpy(&fields, data, sizeof(fields));
  return fields;
}

Route RouteOf(const ffi::AnyBuffer& buffer, size_t num_tensors) {
  const auto* fields = static_cast<const int64_t*>(buffer.untyped_data());
  Route route{FieldsAt<RouteFields>(fields)};
  const size_t num_holders = num_tensors * static_cast<size_t>(route.num_devices);
  const size_t row = kRowFields + 2 * static_cast<size_t>(route.num_levels);
  route.holders = fields + kRouteFields;
  route.rows = route.holders + num_holders;
  const size_t num_numbers = buffer.size_bytes() / sizeof(int64_t);
  route.num_rows = (num_numbers - kRouteFields - num_holders) / row;
  return route;
}

std::vector<Row> RowsOf(const Route& route) {
  std::vector<Row> rows(route.num_rows);
  const int64_t* fields = route.rows;
  for (Row& row : rows) {
    const auto head = FieldsAt<RowFields>(fields);
    row.tensor = static_cast<size_t>(head.tensor);
    row.source = head.source;
    row.tile = head.tile;
    row.box.offset = static_cast<size_t>(head.offset);
    row.box.run = static_cast<size_t>(head.run);
    fields += kRowFields;
    for (int64_t level = 0; level < route.num_levels; ++level, fields += 2) {
      if (fields[0] == 1) continue;
      row.box.levels.push_back(
          {static_cast<size_t>(fields[0]), static_cast<size_t>(fields[1])});
    }
  }
  return rows;
}

Key KeyOf(const Route& route, int64_t source) {
  Key key;
  key.generation = static_cast<uint64_t>(route.generation);
  key.edge = {static_cast<int32_t>(source), static_cast<int32_t>(route.direction),
              static_cast<int32_t>(route.stage), static_cast<int32_t>(route.origin)};
  key.microbatch = static_cast<int32_t>(route.microbatch);
  return key;
}

Box WholeBox(const Shard& shard) { return {0, shard.size, {}}; }

// Returns which parts of this rank's shards the messages hold.
//
// If both ranks shard the values in the same way, these are whole shards of owners; the
// tile is then the owner's number, too.
std::vector<Row> ContentOf(const Route& route, const std::vector<Shard>& shards) {
  if (!route.is_alike()) return RowsOf(route);
  std::vector<Row> rows;
  for (size_t t = 0; t < shards.size(); ++t) {
    for (int64_t d = 0; d < route.num_devices; ++d) {
      if (route.holders[t * route.num_devices + d] != d) continue;
      rows.push_back({t, d, d, WholeBox(shards[t])});
    }
  }
  return rows;
}

// The token is the last result of both ops.
void ClearToken(ffi::RemainingRets rets) {
  const auto token = *rets.get<ffi::AnyBuffer>(rets.size() - 1).value();
  std::memset(token.untyped_data(), 0, token.size_bytes());
}

ffi::Error Send(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  const Route route =
      RouteOf(args.get<ffi::AnyBuffer>(0).value(), args.size() - kFirstSent);
  const auto engine = FindEngine(route.engine);
  if (!engine) return ffi::Error::Success();  // its group was closed
  Message message;
  message.key = KeyOf(route, engine->rank());
  message.order = engine->numbers().Assign(device, /*is_receive=*/false,
                                           static_cast<int>(route.peer), &message.key);
  std::vector<Shard> shards;
  for (size_t i = kFirstSent; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i).value();
    AppendText(buffer, &message.layout.text);
    shards.push_back(ShardOf(buffer));
  }
  std::vector<Row> rows = ContentOf(route, shards);
  size_t size = 0;
  rows.erase(std::remove_if(rows.begin(), rows.end(),
                            [&](const Row& row) { return row.source != device; }),
             rows.end());
  if (rows.empty()) return ffi::Error::Success();
  for (const Row& row : rows) size += row.box.size();
  message.device = device;
  message.layout.num_devices = static_cast<int32_t>(route.num_devices);
  message.layout.digest = static_cast<uint64_t>(route.digest);
  message.bytes = engine->BytesFor(static_cast<int>(route.peer), size);
  const Key key = message.key;
  char* out = message.bytes.data();
  const SharedBlock* block = message.bytes.block();
  if (block) {
    // Its reader follows the writing. The thread that tells it may be on this core.
    engine->Send(static_cast<int>(route.peer), std::move(message));
    std::this_thread::yield();
  }
  size_t offset = 0;
  for (const Row& row : rows) {
    for (const Box& part : PartsOf(row.box, kSharedStep)) {
      Pack(shards[row.tensor].data, part, out + offset);
      offset += part.size();
      if (offset == size) TheRecorder().Note(Event::kSent, key, size);
      if (block) block->Write(offset);
    }
  }
  if (!block) engine->Send(static_cast<int>(route.peer), std::move(message));
  return ffi::Error::Success();
}

ffi::Future Receive(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  const Route route = RouteOf(args.get<ffi::AnyBuffer>(0).value(), rets.size() - 1);
  Request request;
  request.done = [promise] { promise->SetAvailable(); };
  std::vector<Shard> shards;
  for (size_t i = 0; i + 1 < rets.size(); ++i) {
    const auto buffer = *rets.get<ffi::AnyBuffer>(i).value();
    AppendText(buffer, &request.layout.text);
    shards.push_back(ShardOf(buffer));
    AskForLargePages(shards.back().data, shards.back().size);
    request.results.push_back(
        {shards.back().data, shards.back().size, FillingOf(buffer.element_type())});
  }
  const auto engine = FindEngine(route.engine);
  if (!engine) {  // its group was closed
    request.is_running = true;
    Discard(std::move(request));
    return future;
  }
  request.key = KeyOf(route, route.peer);
  engine->numbers().Assign(device, /*is_receive=*/true, static_cast<int>(route.peer),
                           &request.key);
  TheRecorder().Note(Event::kAsked, request.key);
  const int64_t num_sources = route.is_alike() ? route.num_devices : route.num_sources;
  request.layout.num_devices = static_cast<int32_t>(num_sources);
  request.layout.digest = static_cast<uint64_t>(route.digest);
  request.part_sizes.assign(static_cast<size_t>(num_sources), kNothing);
  std::vector<size_t> missing;
  for (const Shard& shard : shards) missing.push_back(shard.size);
  for (Row& row : ContentOf(route, shards)) {
    size_t& filled = request.part_sizes.at(static_cast<size_t>(row.source));
    if (filled == kNothing) filled = 0;
    const size_t offset = filled;
    const size_t size = row.box.size();
    filled += size;
    if (route.holders[row.tensor * route.num_devices + device] != row.tile) continue;
    missing[row.tensor] -= size;
    request.pieces.push_back(
        {static_cast<int32_t>(row.source), offset, row.tensor, std::move(row.box)});
  }
  for (size_t t = 0; t < shards.size(); ++t) {
    request.results[t].is_padded = missing[t] != 0;
  }
  engine->inbox().Receive(std::move(request));
  return future;
}

// Notes in the recorder that a program of an action begins or ends.
ffi::Error Mark(Event event, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  const auto mark = args.get<ffi::AnyBuffer>(0).value();
  const auto* data = static_cast<const int64_t*>(mark.untyped_data());
  const auto fields = FieldsAt<MarkFields>(data);
  Record record;
  record.direction = fields.kind;
  record.stage = fields.stage;
  record.microbatch = fields.microbatch;
  TheRecorder().Note(event, record);
  return ffi::Error::Success();
}

ffi::Error Begin(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Mark(Event::kBegan, args, rets);
}

ffi::Error End(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Mark(Event::kEnded, args, rets);
}

XLA_FFI_DEFINE_HANDLER(
    kSend, Send,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER(
    kReceive, Receive,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER(kBegin, Begin, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER(kEnd, End, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_Handler* const kHandlers[] = {kSend,
                                      kReceive,
                                      kBegin,
                                      kEnd,
                                      ProductHandler(),
                                      ProductSumHandler(),
                                      ProductBiasHandler(),
                                      SumHandler(),
                                      SoftmaxHandler(),
                                      SoftmaxGradHandler(),
                                      NormHandler(),
                                      NormGradHandler(),
                                      NormFactorGradHandler(),
                                      GeluHandler(),
                                      GeluGradHandler(),
                                      CopyHandler(),
                                      SplitHandler(),
                                      AttentionHandler(),
                                      AttentionGradHandler(),
                                      PlacedHandler(),
                                      PauseHandler()};

}  // namespace

XLA_FFI_Handler* HandlerFor(Op op) { return kHandlers[static_cast<int32_t>(op)]; }

std::string RegisterHandler(const void* get_api, const std::string& target, Op op) {
  const auto* api = reinterpret_cast<const XLA_FFI_Api* (*)()>(get_api)();
  if (!api || api->struct_size != sizeof(XLA_FFI_Api) ||
      api->api_version.major_version != XLA_FFI_API_MAJOR ||
      api->api_version.minor_version != XLA_FFI_API_MINOR) {
    return "XLA's FFI has another version than the headers that this library was "
           "built with";
  }
  XLA_FFI_Error* error =
      ffi::Ffi::RegisterStaticHandler(api, target, "Host", HandlerFor(op));
  if (!error) return "";
  XLA_FFI_Error_GetMessage_Args message{};
  message.struct_size = XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE;
  message.error = error;
  api->XLA_FFI_Error_GetMessage(&message);
  const std::string text = message.message;
  XLA_FFI_Error_Destroy_Args destroy{};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return text;
}

}  // namespace xla_pp
