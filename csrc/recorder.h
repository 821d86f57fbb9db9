// Notes when programs begin, end, send and receive, while somebody wants to know.
//
// One for the process: XLA passes handlers nothing but buffers. While it is off, a note
// costs the load of a flag.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "message.h"

namespace xla_pp {

enum class Event : int64_t {
  kBegan = 0,    // a program of an action
  kEnded = 1,    // likewise
  kSent = 2,     // a device handed over its part of a message
  kAsked = 3,    // a device asked for a message
  kArrived = 4,  // a part of a message came
};

// All fields are numbers of one size, which Python reads in this order. Of programs,
// `direction` is the kind of the action and there is no origin.
struct Record {
  int64_t event = 0;
  int64_t time_ns = 0;  // of the monotonic clock
  int64_t num_bytes = 0;
  int64_t direction = 0;
  int64_t stage = 0;
  int64_t origin = 0;
  int64_t microbatch = 0;
};

class Recorder {
 public:
  // Begins with nothing noted.
  void Start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    is_on_ = true;
  }

  // Returns the number of records, and hands them out if there is room for all.
  size_t Stop(Record* out, size_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_on_ = false;
    const size_t count = records_.size();
    if (count <= capacity) {
      std::copy(records_.begin(), records_.end(), out);
      records_ = {};
    }
    return count;
  }

  void Note(Event event, const Key& key, size_t num_bytes = 0) {
    if (!is_on_) return;
    Record record;
    record.num_bytes = static_cast<int64_t>(num_bytes);
    record.direction = key.edge.direction;
    record.stage = key.edge.stage;
    record.origin = key.edge.origin;
    record.microbatch = key.microbatch;
    Note(event, record);
  }

  void Note(Event event, Record record) {
    if (!is_on_) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    record.event = static_cast<int64_t>(event);
    record.time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_on_) records_.push_back(record);
  }

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  std::vector<Record> records_;
};

inline Recorder& TheRecorder() {
  static auto* recorder = new Recorder;  // lives as long as XLA's threads
  return *recorder;
}

}  // namespace xla_pp
