// Sends and receives the messages of one process group.
//
// Law: programs of one device run in the order in which they were enqueued, so a
// receive must never wait for a later program of its own device. Between ranks the
// schedule ensures that; for a message to oneself the caller checks that the send was
// enqueued first.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "inbox.h"
#include "link.h"
#include "message.h"
#include "numbers.h"

namespace xla_pp {

// A secret of the members of the job.
using Token = std::array<char, 16>;

struct EngineConfig {
  int rank = 0;
  int num_devices = 1;
  std::chrono::duration<double> timeout{600};
  Token token{};
};

class Engine {
 public:
  // `make_link` gets the events for its link to call.
  Engine(const EngineConfig& config,
         const std::function<std::unique_ptr<Link>(LinkEvents)>& make_link);
  ~Engine();

  std::string Address() const { return link_->Address(); }
  // `pid` is the peer's process, which is checked from time to time: on one host, UCX
  // considers a killed process alive until its exit code is collected. 0 if it is not
  // on this host.
  void Connect(int peer, const std::string& address, int pid = 0);

  // Returns memory for what is sent to a peer. If other processes see it, it may be
  // sent before it is written; all of it must be then, see `TakeShared`.
  Bytes BytesFor(int peer, size_t size);

  // Called by the send op of each device, with a message of its own; `peer` is the
  // group rank that gets it. Never fails: `inbox().failure` returns errors.
  void Send(int peer, Message message);

  // Reports an error of this rank to the job, and ends its own receives. Every rank
  // forwards the first report of a generation to its peers, so it reaches all ranks
  // that are connected in some way, also those whose Python waits inside XLA.
  //
  // Format of a report: rank, type of the error and context, a line each, then the
  // text. `num_ended` is how many steps of the generation its rank had ended.
  void Report(uint64_t generation, const std::string& report, uint64_t num_ended = 0) {
    inbox_.Fail(generation, {FailureKind::kReport, report, num_ended});
  }

  // Holds messages from one device of each sender (all for -1) back, for tests and
  // benchmarks of a slow network.
  void Delay(int device, std::chrono::duration<double> time);

  // Returns messages to be logged since the last call, a line each.
  std::vector<std::string> TakeNotices();

  // Disconnects from the peers. Returns whether all that was sent has arrived.
  bool Close(std::chrono::duration<double> timeout);

  Inbox& inbox() { return inbox_; }
  Numbers& numbers() { return numbers_; }
  int rank() const { return config_.rank; }

 private:
  void Arrived(std::string_view header, Bytes payload);
  // Returns whether all peers that are left have what was sent in shared memory.
  bool AreOpen();
  // Returns whether the bytes of a message, which are in shared memory, are there.
  bool Open(const SharedPlace& place, size_t size, Message* message);
  Clock::time_point Tick();
  void PassOn(uint64_t generation, const Failure& failure);
  void LookAtProcesses();
  void Notice(std::string text);

  const EngineConfig config_;
  // Whether large messages to this host go through memory of ours: what the user lets
  // UCX use is used.
  const bool is_sharing_;
  Inbox inbox_;
  Numbers numbers_;

  std::mutex mutex_;
  std::set<int> peers_;
  std::map<int, int> pids_;  // of peers on this host that were alive at the last look
  std::vector<std::string> notices_;
  std::map<int, std::chrono::duration<double>> delays_;
  std::list<std::pair<Clock::time_point, Message>> delayed_;

  Clock::time_point next_look_;  // of the link's thread

  std::unique_ptr<Link> link_;  // last: its thread uses the others
};

}  // namespace xla_pp
