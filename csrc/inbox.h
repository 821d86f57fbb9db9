// Matches messages with the receive ops that wait for them.
//
// Terms: a *group* is all that belongs to one key: the messages of the sender's devices
// and the receives of this rank's devices. A *generation* is the time between two
// failures of the job.
//
// Laws:
// * A receive completes on all local devices or on none: no device goes on before the
//   messages of all of the sender's devices are here. XLA:CPU aborts the process when
//   devices reach a collective too far apart.
// * A receive never fails its program. After a failure every receive of that
//   generation completes at once, filled with NaN or -1, and `failure` returns the
//   reason. A failed program would stop on one device while another one already
//   waits for it in a collective.
// * Nothing here waits except `Settle`, which only the main thread calls, and a receive
//   whose message is still being written by its sender. Callbacks run without the lock.
//   `done` runs the rest of a program; it is called by the op itself or on a thread of
//   its own.
#pragma once

#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "abi.h"
#include "box.h"
#include "message.h"

namespace xla_pp {

using Clock = std::chrono::steady_clock;

// Why a generation has failed. A rank that has ended fewer of its steps than the rank
// that failed holds the failure until it has ended as many.
struct Failure {
  FailureKind kind;
  std::string text;
  uint64_t num_ended = 0;
};

constexpr size_t kNothing = SIZE_MAX;

// One tensor that a receive op fills on one device.
struct Result {
  char* out = nullptr;
  size_t size = 0;
  char filling = 0;        // byte that stands for a value that did not come
  bool is_padded = false;  // whether the pieces leave something out
};

// A part of a message that goes to one device.
struct Piece {
  int32_t source = 0;  // the sender's device whose message holds it
  size_t offset = 0;   // where in that message
  size_t result = 0;   // which of the results it is part of
  Box box;             // where in that result
};

// The receive op on one device.
struct Request {
  Key key;
  Layout layout;
  std::vector<Result> results;
  std::vector<Piece> pieces;
  std::vector<size_t> part_sizes;  // by the sender's device; kNothing: no message
  std::function<void()> done;
  // Set by the inbox: whether the op has not returned yet, and its floating point mode,
  // in which the rest of its program must run.
  bool is_running = false;
  std::fenv_t mode{};
};

// Completes a receive whose values will not come.
void Discard(Request request);

class Inbox {
 public:
  // `on_failure` is called when a generation fails, and when a failure of it is held,
  // without the lock.
  using OnFailure = std::function<void(uint64_t generation, const Failure&)>;

  Inbox(int rank, int num_devices, std::chrono::duration<double> timeout,
        OnFailure on_failure);
  // Waits for receives that are being filled; there must be no new ones.
  ~Inbox();

  // Called by the receive op of each device; calls `done` now or later.
  void Receive(Request request);

  // Takes a message that has arrived.
  void Deliver(Message message);

  // Allows messages on an edge. Others are a failure once they are a few seconds old.
  void Open(const Edge& edge);

  // Ends all receives of a generation, at once or when this rank has ended the steps
  // that are not concerned. Of several failures that of the earliest step counts, and
  // of these the first.
  void Fail(uint64_t generation, const Failure& failure);

  // Notes how many steps of a generation this rank has ended, and how many messages
  // they send from each device.
  void EndStep(uint64_t generation, uint64_t num_ended, uint64_t num_sent);

  // Returns whether a message that is to be sent belongs to a step that has failed.
  bool IsVoid(const Message& message) const;

  // Ends all receives from a peer that will send nothing any more.
  void Lose(int peer, const std::string& reason);

  // Forgets everything of older generations.
  void Advance(uint64_t generation);

  // Fails receives that wait for too long; returns when to check again.
  Clock::time_point Expire();

  // Waits until `count` receives of a generation have completed on all devices;
  // false if that takes longer than `limit` or the generation has failed.
  bool Settle(uint64_t generation, uint64_t count, std::chrono::duration<double> limit);

  // Returns the failure of a generation.
  std::optional<Failure> failure(uint64_t generation) const;
  // Returns why nothing comes from a peer any more.
  std::optional<std::string> lost(int peer) const;
  InboxStats stats() const;

 private:
  struct Part {
    Layout layout;
    Bytes bytes;
    int64_t delivered_ns = 0;
  };
  using Parts = std::map<int32_t, std::shared_ptr<const Part>>;
  struct Group {
    Parts parts;  // by the sender's device
    std::vector<Request> waiting;
    // Local devices whose receive has not been filled.
    std::shared_ptr<int> num_left;
    Layout layout;  // as asked for; all devices ask alike
    std::vector<size_t> part_sizes;
    bool is_whole = false;
    int num_received = 0;     // local devices whose op was called
    Clock::time_point since;  // of the first message or receive
    Clock::time_point waiting_since;
  };
  using Groups = std::map<Key, Group>;
  using Tasks = std::vector<std::function<void()>>;

  static bool AllArrived(const Group& group);
  std::optional<std::string> FaultOf(const Key& key, const Group& group) const;
  std::string LostText(const Key& key, const std::string& reason,
                       std::chrono::duration<double> waited) const;
  std::string LateText(const Key& key, std::chrono::duration<double> waited) const;
  // Returns whether a receive that waits since then for its message to be written need
  // not wait any more.
  bool IsOver(const Key& key, Clock::time_point since) const;
  // Writes the values of a receive, or what stands for them if they are not all
  // written.
  void Fill(const Request& request, const Parts& parts);
  // Copies them; returns false if `is_over` says that they will not all come.
  static bool Copy(const Request& request, const Parts& parts,
                   const std::function<bool()>& is_over);
  // Fails a receive whose message will not be written any more.
  void FailUnwritten(const Key& key, Clock::time_point since);
  // Counts a receive of one device that has been filled.
  void CountFilled(const Key& key, int& num_left);

  // These need the lock. `tasks` gets what is to be run without it. They may erase
  // groups.
  void ReceiveLocked(Request request, Tasks& tasks);
  void UpdateLocked(Groups::iterator found, Tasks& tasks);
  void AnswerLocked(const Key& key, Group& group, Tasks& tasks);
  void FailLocked(uint64_t generation, const Failure& failure, Tasks& tasks);
  // Likewise, in the step in which this rank is.
  void FailLocked(uint64_t generation, FailureKind kind, const std::string& text,
                  Tasks& tasks);
  uint64_t NumEndedLocked(uint64_t generation) const;

  const int rank_;
  const int num_devices_;
  const std::chrono::duration<double> timeout_;
  const OnFailure on_failure_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Groups groups_;
  std::set<Edge> edges_;
  std::map<uint64_t, Failure> failures_;
  std::map<uint64_t, Failure> held_;
  std::map<uint64_t, uint64_t> num_completed_;
  std::map<int, std::string> lost_;
  uint64_t generation_ = 0;
  uint64_t num_ended_ = 0;  // steps of the generation, and what they send
  uint64_t num_sent_ = 0;
  int num_filling_ = 0;
};

}  // namespace xla_pp
