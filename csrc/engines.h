// The engines of this process by number: XLA passes nothing but buffers to the ops of
// its programs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "engine.h"

namespace xla_pp {

class Engines {
 public:
  // Returns its number, which is not 0.
  int64_t Add(std::shared_ptr<Engine> engine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t id = next_++;
    engines_[id] = std::move(engine);
    return id;
  }

  // Returns null for one that was removed.
  std::shared_ptr<Engine> Find(int64_t id) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = engines_.find(id);
    return found == engines_.end() ? nullptr : found->second;
  }

  void Remove(int64_t id) {
    std::shared_ptr<Engine> removed;  // which may end outside of the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = engines_.find(id);
    if (found == engines_.end()) return;
    removed = std::move(found->second);
    engines_.erase(found);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Engine>> engines_;
  int64_t next_ = 1;
};

inline Engines& TheEngines() {
  static auto* engines = new Engines;  // lives as long as XLA's threads
  return *engines;
}

inline std::shared_ptr<Engine> FindEngine(int64_t id) { return TheEngines().Find(id); }

}  // namespace xla_pp
