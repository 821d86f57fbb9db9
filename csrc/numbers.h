// Numbers messages of one name, so that a route may be used again.
//
// Law: the nth op of a name on a device gets the nth number. Sender and receiver agree
// because all devices of a rank run the same programs in the same order.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "message.h"

namespace xla_pp {

class Numbers {
 public:
  // Sets the number of `key` for the op that a device runs now, and returns how many
  // sends it has run before. Numbers of a generation are forgotten when the device has
  // come to the next one.
  uint64_t Assign(int device, bool is_receive, int peer, Key* key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    PerDevice& own = devices_[device];
    if (key->generation > own.generation) {
      own.generation = key->generation;
      own.next.clear();
      own.num_sent = 0;
    }
    key->number = own.next[{is_receive, peer, key->edge, key->microbatch}]++;
    return is_receive ? own.num_sent : own.num_sent++;
  }

 private:
  using Name = std::tuple<bool, int, Edge, int32_t>;

  struct PerDevice {
    uint64_t generation = 0;
    uint64_t num_sent = 0;
    std::map<Name, uint64_t> next;
  };

  std::mutex mutex_;
  std::map<int, PerDevice> devices_;
};

}  // namespace xla_pp
