// The ops of XLA programs that send and receive, as handlers of XLA's FFI.
//
// Receive: the route, int64[8 + tensors * devices] (see `Route`) → shards, a token.
// Send: the route, shards → a token.
// Begin, end: a mark, int64[3] (kind, stage and microbatch of an action), whatever must
// be there before → a token.
//
// A token is an int32[1] without a meaning: a program that returns it keeps the op.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "recorder.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

// The route operand: what changes from call to call, so that nothing is recompiled.
// Calls that send or receive the same message in later steps have the same route.
struct Route {
  int64_t engine;
  int64_t generation;
  int64_t peer;
  int64_t direction;
  int64_t stage;
  int64_t origin;
  int64_t microbatch;
  int64_t digest;
  // owners[tensor * num_devices + device]: the lowest device with the same shard.
  const int64_t* owners;
};

constexpr size_t kRouteFields = 8;
constexpr size_t kFirstSent = 1;  // operand of the send op

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

Route RouteOf(const ffi::AnyBuffer& buffer) {
  const auto* fields = static_cast<const int64_t*>(buffer.untyped_data());
  return {fields[0], fields[1], fields[2],
          fields[3], fields[4], fields[5],
          fields[6], fields[7], fields + kRouteFields};
}

Key KeyOf(const Route& route, int64_t source) {
  Key key;
  key.generation = static_cast<uint64_t>(route.generation);
  key.edge = {static_cast<int32_t>(source), static_cast<int32_t>(route.direction),
              static_cast<int32_t>(route.stage), static_cast<int32_t>(route.origin)};
  key.microbatch = static_cast<int32_t>(route.microbatch);
  return key;
}

// Returns the number of devices that the route was made for, 0 if it does not fit.
size_t NumDevices(const ffi::AnyBuffer& route, size_t num_tensors) {
  const size_t left = route.element_count() - kRouteFields;
  return num_tensors && left % num_tensors == 0 ? left / num_tensors : 0;
}

// Returns how many bytes each device sends: its shards of the tensors it owns.
std::vector<size_t> PartSizes(const Route& route, const std::vector<Shard>& shards,
                              size_t num_devices) {
  std::vector<size_t> sizes(num_devices, kNothing);
  for (size_t t = 0; t < shards.size(); ++t) {
    for (size_t d = 0; d < num_devices; ++d) {
      if (route.owners[t * num_devices + d] != static_cast<int64_t>(d)) continue;
      sizes[d] = (sizes[d] == kNothing ? 0 : sizes[d]) + shards[t].size;
    }
  }
  return sizes;
}

// The token is the last result of both ops.
void ClearToken(ffi::RemainingRets rets) {
  const auto token = *rets.get<ffi::AnyBuffer>(rets.size() - 1).value();
  std::memset(token.untyped_data(), 0, token.size_bytes());
}

ffi::Error Send(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  const auto route_buffer = args.get<ffi::AnyBuffer>(0).value();
  const Route route = RouteOf(route_buffer);
  const auto engine = FindEngine(route.engine);
  if (!engine) return ffi::Error::Success();  // its group was closed
  Message message;
  message.key = KeyOf(route, engine->rank());
  engine->numbers().Assign(device, /*is_receive=*/false, static_cast<int>(route.peer),
                           &message.key);
  std::vector<Shard> shards;
  for (size_t i = kFirstSent; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i).value();
    AppendText(buffer, &message.layout.text);
    shards.push_back(ShardOf(buffer));
  }
  const size_t num_devices = NumDevices(route_buffer, shards.size());
  const size_t size = PartSizes(route, shards, num_devices).at(device);
  if (size == kNothing) return ffi::Error::Success();
  message.device = device;
  message.layout.num_devices = static_cast<int32_t>(num_devices);
  message.layout.digest = static_cast<uint64_t>(route.digest);
  message.bytes = Bytes(size);
  size_t offset = 0;
  for (size_t t = 0; t < shards.size(); ++t) {
    if (route.owners[t * num_devices + device] != device) continue;
    if (shards[t].size) {
      std::memcpy(message.bytes.data() + offset, shards[t].data, shards[t].size);
    }
    offset += shards[t].size;
  }
  TheRecorder().Note(Event::kSent, message.key, size);
  engine->Send(static_cast<int>(route.peer), std::move(message));
  return ffi::Error::Success();
}

ffi::Future Receive(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  const auto route_buffer = args.get<ffi::AnyBuffer>(0).value();
  const Route route = RouteOf(route_buffer);
  Request request;
  request.done = [promise] { promise->SetAvailable(); };
  std::vector<Shard> shards;
  for (size_t i = 0; i + 1 < rets.size(); ++i) {
    const auto buffer = *rets.get<ffi::AnyBuffer>(i).value();
    AppendText(buffer, &request.layout.text);
    shards.push_back(ShardOf(buffer));
    Piece piece;
    piece.out = shards.back().data;
    piece.size = shards.back().size;
    piece.filling = FillingOf(buffer.element_type());
    request.pieces.push_back(piece);
  }
  const size_t num_devices = NumDevices(route_buffer, shards.size());
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
  request.layout.num_devices = static_cast<int32_t>(num_devices);
  request.layout.digest = static_cast<uint64_t>(route.digest);
  request.part_sizes = PartSizes(route, shards, num_devices);
  std::vector<size_t> filled(num_devices, 0);
  for (size_t t = 0; t < shards.size(); ++t) {
    const int64_t* owners = route.owners + t * num_devices;
    request.pieces[t].owner = static_cast<int32_t>(owners[device]);
    request.pieces[t].offset = filled[owners[device]];
    for (size_t d = 0; d < num_devices; ++d) {
      if (owners[d] == static_cast<int64_t>(d)) filled[d] += shards[t].size;
    }
  }
  engine->inbox().Receive(std::move(request));
  return future;
}

// Tells the recorder that a program of an action begins or ends.
ffi::Error Mark(Event event, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ClearToken(rets);
  const auto mark = args.get<ffi::AnyBuffer>(0).value();
  const auto* fields = static_cast<const int64_t*>(mark.untyped_data());
  Record record;
  record.direction = fields[0];
  record.stage = fields[1];
  record.microbatch = fields[2];
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

XLA_FFI_Handler* const kHandlers[] = {kSend, kReceive, kBegin, kEnd};

}  // namespace

std::string RegisterHandler(const void* get_api, const std::string& target, Op op) {
  const auto* api = reinterpret_cast<const XLA_FFI_Api* (*)()>(get_api)();
  if (!api || api->struct_size != sizeof(XLA_FFI_Api) ||
      api->api_version.major_version != XLA_FFI_API_MAJOR ||
      api->api_version.minor_version != XLA_FFI_API_MINOR) {
    return "XLA's FFI has another version than the headers that this library was "
           "built with";
  }
  XLA_FFI_Error* error = ffi::Ffi::RegisterStaticHandler(
      api, target, "Host", kHandlers[static_cast<int32_t>(op)]);
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
