// Notes when programs begin, end, send and receive, while it is on.
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

#include "abi.h"
#include "message.h"

namespace xla_pp {

class Recorder {
 public:
  // Switches it on, without notes.
  void Start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    is_on_ = true;
  }

  // Returns the number of records, and copies them to `out` if all fit.
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

  // Of now, if no time is given.
  void Note(Event event, const Key& key, size_t num_bytes = 0, int64_t time_ns = 0) {
    if (!is_on_) return;
    Record record;
    record.time_ns = time_ns;
    record.num_bytes = static_cast<int64_t>(num_bytes);
    record.direction = key.edge.direction;
    record.stage = key.edge.stage;
    record.origin = key.edge.origin;
    record.microbatch = key.microbatch;
    Note(event, record);
  }

  void Note(Event event, Record record) {
    if (!is_on_) return;
    record.event = static_cast<int64_t>(event);
    if (!record.time_ns) record.time_ns = NowNs();
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
