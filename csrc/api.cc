// The functions that Python calls, with C's types only. No function throws. A text is
// copied into the caller's buffer of `capacity` bytes, cut if need be; its length is
// returned.

#include <algorithm>
#include <cstring>
#include <string>

#include "abi.h"
#include "blocks.h"
#include "engines.h"
#include "handlers.h"
#include "parts.h"
#include "products.h"
#include "recorder.h"
#include "redirect.h"
#include "ucx_link.h"

namespace xla_pp {
namespace {

int64_t CopyText(const std::string& text, char* out, int64_t capacity) {
  const auto size = std::min<int64_t>(static_cast<int64_t>(text.size()), capacity);
  std::memcpy(out, text.data(), static_cast<size_t>(size));
  return size;
}

using Seconds = std::chrono::duration<double>;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Returns the text of the interface, which Python compares with its own.
const char* xpp_abi() { return kAbi; }

// Returns the length of an error, 0 for success.
int64_t xpp_register(const void* get_api, const char* target, int32_t op, char* error,
                     int64_t capacity) {
  return CopyText(RegisterHandler(get_api, target, static_cast<Op>(op)), error,
                  capacity);
}

// Returns the handler of an op, for other XLAs than torch_xla's.
const void* xpp_handler(int32_t op) {
  return reinterpret_cast<const void*>(HandlerFor(static_cast<Op>(op)));
}

void xpp_use_blas(void* multiply, void* set_threads) {
  UseBlas({reinterpret_cast<decltype(Blas::multiply)>(multiply),
           reinterpret_cast<decltype(Blas::set_threads)>(set_threads)});
}

void xpp_use_cores(int64_t count) { SetMaxParts(count); }

// Lets the library at this address use blocks of large values again, see `KeepBlocks`.
// Returns whether it calls what takes and gives them.
int32_t xpp_keep_blocks(uint64_t base, int64_t least, int64_t large) {
  const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
  const bool is_led =
      RedirectCalls(base, {{"free", address(&Free)}}) &&
      RedirectCalls(base, {{"aligned_alloc", address(&AlignedAlloc)},
                           {"posix_memalign", address(&PosixMemalign)}});
  if (is_led) KeepBlocks(static_cast<size_t>(least), static_cast<size_t>(large));
  return is_led;
}

void xpp_begin_step_of_blocks() { BeginStepOfBlocks(); }

void xpp_drop_blocks() { DropBlocks(); }

int64_t xpp_waiting_bytes() { return WaitingBytes(); }

void xpp_start_recording() { TheRecorder().Start(); }

// Returns the number of records; copies them to `out` if its capacity suffices.
int64_t xpp_stop_recording(Record* out, int64_t capacity) {
  return static_cast<int64_t>(TheRecorder().Stop(out, static_cast<size_t>(capacity)));
}

// Returns the engine's number, or 0 with an error in `error`.
int64_t xpp_open(int32_t rank, int32_t num_devices, double timeout_s, const char* token,
                 const char* host, char* error, int64_t capacity) {
  EngineConfig config;
  config.rank = rank;
  config.num_devices = num_devices;
  config.timeout = Seconds(timeout_s);
  std::memcpy(config.token.data(), token, config.token.size());
  const std::string host_name = host;
  try {
    return TheEngines().Add(std::make_shared<Engine>(config, [&](LinkEvents events) {
      return MakeUcxLink(host_name, std::move(events));
    }));
  } catch (const std::exception& failed) {
    std::memset(error, 0, static_cast<size_t>(capacity));
    CopyText(failed.what(), error, capacity - 1);
    return 0;
  }
}

int64_t xpp_address(int64_t id, char* out, int64_t capacity) {
  const auto engine = FindEngine(id);
  return engine ? CopyText(engine->Address(), out, capacity) : 0;
}

void xpp_connect(int64_t id, int32_t peer, const char* address, int64_t size,
                 int32_t pid) {
  if (const auto engine = FindEngine(id)) {
    engine->Connect(peer, std::string(address, static_cast<size_t>(size)), pid);
  }
}

void xpp_expect(int64_t id, int32_t source, int32_t direction, int32_t stage,
                int32_t origin) {
  if (const auto engine = FindEngine(id)) {
    engine->inbox().Open({source, direction, stage, origin});
  }
}

void xpp_report(int64_t id, uint64_t generation, const char* report,
                uint64_t num_ended) {
  if (const auto engine = FindEngine(id)) {
    engine->Report(generation, report, num_ended);
  }
}

void xpp_end_step(int64_t id, uint64_t generation, uint64_t num_ended,
                  uint64_t num_sent) {
  if (const auto engine = FindEngine(id)) {
    engine->inbox().EndStep(generation, num_ended, num_sent);
  }
}

void xpp_advance(int64_t id, uint64_t generation) {
  if (const auto engine = FindEngine(id)) engine->inbox().Advance(generation);
}

// Returns the kind of failure of a generation, 0 for none, its text, and how many steps
// the rank had ended that failed.
int32_t xpp_failure(int64_t id, uint64_t generation, char* out, int64_t capacity,
                    int64_t* size, uint64_t* num_ended) {
  const auto engine = FindEngine(id);
  if (!engine) return 0;
  const auto failure = engine->inbox().failure(generation);
  if (!failure) return 0;
  *size = CopyText(failure->text, out, capacity);
  *num_ended = failure->num_ended;
  return static_cast<int32_t>(failure->kind);
}

int32_t xpp_settle(int64_t id, uint64_t generation, uint64_t count, double limit_s) {
  const auto engine = FindEngine(id);
  return engine && engine->inbox().Settle(generation, count, Seconds(limit_s));
}

int64_t xpp_take_notices(int64_t id, char* out, int64_t capacity) {
  const auto engine = FindEngine(id);
  if (!engine) return 0;
  std::string text;
  for (const std::string& notice : engine->TakeNotices()) text += notice + "\n";
  return CopyText(text, out, capacity);
}

void xpp_stats(int64_t id, InboxStats* out) {
  const auto engine = FindEngine(id);
  *out = engine ? engine->inbox().stats() : InboxStats{};
}

void xpp_delay(int64_t id, int32_t device, double time_s) {
  if (const auto engine = FindEngine(id)) engine->Delay(device, Seconds(time_s));
}

// Returns whether all that was sent has arrived within the time.
int32_t xpp_close(int64_t id, double timeout_s) {
  const auto engine = FindEngine(id);
  if (!engine) return 1;
  const bool is_clean = engine->Close(Seconds(timeout_s));
  TheEngines().Remove(id);
  return is_clean;
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace xla_pp
