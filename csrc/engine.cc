#include "engine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

namespace xla_pp {
namespace {

constexpr size_t kMaxNotices = 100;

enum class MessageKind : uint32_t { kData = 1, kReport = 2, kFarewell = 3 };

// The start of every message; the layout's text follows. Both ends have one byte order.
struct Header {
  Token token{};
  MessageKind kind = MessageKind::kData;
  int32_t source = 0;
  uint64_t generation = 0;
  uint64_t number = 0;  // of a report: how many steps its rank had ended
  uint64_t digest = 0;
  int32_t direction = 0;
  int32_t stage = 0;
  int32_t microbatch = 0;
  int32_t device = 0;
  int32_t num_devices = 0;
  int32_t origin = 0;
  // Of a message in shared memory, which has no bytes of its own.
  SharedPlace place;
  uint64_t size = 0;
};

std::string Encode(const Header& header, std::string_view text) {
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(text.substr(0, kMaxText + 1));
  return bytes;
}

// Returns whether a process exists and has not ended. Its state is the letter behind
// its name, which is in parentheses and may hold anything.
bool IsRunning(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const size_t end = line.rfind(')');
  if (end == std::string::npos || end + 2 >= line.size()) return true;
  const char state = line[end + 2];
  return state != 'Z' && state != 'X';
}

Bytes Copy(const std::string& text) {
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

}  // namespace

Engine::Engine(const EngineConfig& config,
               const std::function<std::unique_ptr<Link>(LinkEvents)>& make_link)
    : config_(config),
      is_sharing_(!std::getenv("UCX_TLS")),
      inbox_(config.rank, config.num_devices, config.timeout,
             [this](uint64_t generation, const Failure& failure) {
               PassOn(generation, failure);
             }) {
  LinkEvents events;
  events.arrived = [this](std::string_view header, Bytes payload) {
    Arrived(header, std::move(payload));
  };
  events.lost = [this](int peer, const std::string& reason) {
    inbox_.Lose(peer, reason);
  };
  events.tick = [this] { return Tick(); };
  link_ = make_link(std::move(events));
}

Engine::~Engine() { Close(std::chrono::seconds(0)); }

Bytes Engine::BytesFor(int peer, size_t size) {
  int pid = 0;
  if (is_sharing_) {
    std::lock_guard lock(mutex_);
    const auto found = pids_.find(peer);
    if (found != pids_.end()) pid = found->second;
  }
  // One message of all devices is written while another one is read.
  const int few = 2 * config_.num_devices;
  const SharedBlock* block = pid ? TakeShared(pid, size, few) : nullptr;
  return block ? Bytes(block, size) : Bytes(size);
}

void Engine::Send(int peer, Message message) {
  if (peer == config_.rank) {
    inbox_.Deliver(std::move(message));
    return;
  }
  const Key& key = message.key;
  if (const auto reason = inbox_.lost(peer)) {
    inbox_.Fail(key.generation, {FailureKind::kError,
                                 "send " + Describe(key) + ": " +
                                     GoneText(peer, *reason, RankName(config_.rank))});
    return;
  }
  if (inbox_.IsVoid(message)) return;  // nobody waits for it any more
  Header header;
  header.token = config_.token;
  header.source = config_.rank;
  header.generation = key.generation;
  header.number = key.number;
  header.digest = message.layout.digest;
  header.direction = key.edge.direction;
  header.stage = key.edge.stage;
  header.origin = key.edge.origin;
  header.microbatch = key.microbatch;
  header.device = message.device;
  header.num_devices = message.layout.num_devices;
  if (const SharedBlock* block = message.bytes.block()) {
    header.place = block->place;
    header.size = message.bytes.size();
    message.bytes.Leave();
  }
  link_->Send(peer, Encode(header, message.layout.text), std::move(message.bytes));
}

void Engine::Connect(int peer, const std::string& address, int pid) {
  {
    std::lock_guard lock(mutex_);
    if (!peers_.insert(peer).second) return;
    if (pid) pids_[peer] = pid;
  }
  link_->Connect(peer, address);
}

void Engine::PassOn(uint64_t generation, const Failure& failure) {
  std::string report = failure.text;
  if (failure.kind != FailureKind::kReport) {
    const bool is_late = failure.kind == FailureKind::kTimeout;
    report = std::to_string(config_.rank) + "\n" +
             (is_late ? "TransportTimeout" : "TransportError") + "\n\n" + failure.text;
  }
  Header header;
  header.token = config_.token;
  header.kind = MessageKind::kReport;
  header.source = config_.rank;
  header.generation = generation;
  header.number = failure.num_ended;
  std::lock_guard lock(mutex_);
  for (const int peer : peers_) link_->Send(peer, Encode(header, ""), Copy(report));
}

void Engine::Delay(int device, std::chrono::duration<double> time) {
  std::lock_guard lock(mutex_);
  delays_[device] = time;
}

std::vector<std::string> Engine::TakeNotices() {
  std::lock_guard lock(mutex_);
  return std::exchange(notices_, {});
}

bool Engine::Close(std::chrono::duration<double> timeout) {
  Header header;
  header.token = config_.token;
  header.kind = MessageKind::kFarewell;
  header.source = config_.rank;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  bool are_open = AreOpen();
  while (!are_open && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    are_open = AreOpen();
  }
  const auto left = std::max(end - Clock::now(), Clock::duration::zero());
  const bool is_clean = link_->Close(Encode(header, ""), left) && are_open;
  inbox_.Advance(UINT64_MAX);  // programs that still wait go on
  return is_clean;
}

bool Engine::AreOpen() {
  std::lock_guard lock(mutex_);
  return std::all_of(pids_.begin(), pids_.end(), [this](const auto& it) {
    return inbox_.lost(it.first) || xla_pp::AreOpen(it.second);
  });
}

void Engine::Arrived(std::string_view bytes, Bytes payload) {
  Header header;
  if (bytes.size() < sizeof(header)) {
    Notice("refused a message of " + std::to_string(bytes.size()) +
           " bytes: not one of this job");
    return;
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.token != config_.token) {
    Notice("refused a message from an unknown peer that calls itself rank " +
           std::to_string(header.source) + ": it does not know the job's token");
    return;
  }
  if (header.kind == MessageKind::kFarewell) {
    inbox_.Lose(header.source, "it has left the group or its program has ended");
    return;
  }
  if (header.kind == MessageKind::kReport) {
    inbox_.Fail(header.generation,
                {FailureKind::kReport, std::string(payload.data(), payload.size()),
                 header.number});
    return;
  }
  Message message;
  message.key.generation = header.generation;
  message.key.edge = {header.source, header.direction, header.stage, header.origin};
  message.key.microbatch = header.microbatch;
  message.key.number = header.number;
  message.device = header.device;
  message.layout.num_devices = header.num_devices;
  message.layout.digest = header.digest;
  message.layout.text = bytes.substr(sizeof(header));
  message.bytes = std::move(payload);
  if (header.place.number && !Open(header.place, header.size, &message)) return;
  {
    std::lock_guard lock(mutex_);
    auto delay = delays_.find(header.device);
    if (delay == delays_.end()) delay = delays_.find(-1);
    if (delay != delays_.end()) {
      const auto due =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(delay->second);
      delayed_.emplace_back(due, std::move(message));
      return;
    }
  }
  inbox_.Deliver(std::move(message));
}

bool Engine::Open(const SharedPlace& place, size_t size, Message* message) {
  std::string error;
  const SharedBlock* block = OpenShared(place, size, &error);
  if (block) {
    message->bytes = Bytes(block, size);
    return true;
  }
  const int source = message->key.edge.source;
  if (!IsRunning(place.owner)) {
    inbox_.Lose(source, "its process has ended");
    return false;
  }
  inbox_.Fail(message->key.generation,
              {FailureKind::kError,
               "recv " + Describe(message->key) + ": " + RankName(config_.rank) +
                   " cannot read the memory of " + RankName(source) + ": " + error +
                   ". Run both as the same user, or set UCX_TLS=all, with which no "
                   "memory is read."});
  return false;
}

Clock::time_point Engine::Tick() {
  if (Clock::now() >= next_look_) {
    LookAtProcesses();
    next_look_ = inbox_.Expire();
  }
  auto next = next_look_;
  std::list<std::pair<Clock::time_point, Message>> due;
  {
    std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (auto it = delayed_.begin(); it != delayed_.end();) {
      const auto current = it++;
      if (current->first <= now) {
        due.splice(due.end(), delayed_, current);
      } else {
        next = std::min(next, current->first);
      }
    }
  }
  for (auto& [time, message] : due) inbox_.Deliver(std::move(message));
  return next;
}

void Engine::LookAtProcesses() {
  std::vector<int> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto it = pids_.begin(); it != pids_.end();) {
      const auto current = it++;
      if (IsRunning(current->second)) continue;
      ended.push_back(current->first);
      pids_.erase(current);
    }
  }
  for (const int peer : ended) inbox_.Lose(peer, "its process has ended");
}

void Engine::Notice(std::string text) {
  std::lock_guard lock(mutex_);
  if (notices_.size() < kMaxNotices) notices_.push_back(std::move(text));
}

}  // namespace xla_pp
