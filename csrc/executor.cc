#include "executor.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace xla_pp {
namespace {

class Executor {
 public:
  void Run(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > num_idle_) {
      std::thread([this] { Work(); }).detach();
      ++num_idle_;  // it takes a task as soon as it runs
    }
    changed_.notify_one();
  }

 private:
  // A new thread counts as idle from the start.
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      --num_idle_;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      ++num_idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t num_idle_ = 0;
};

}  // namespace

void RunElsewhere(std::function<void()> task) {
  static auto* executor = new Executor;  // its threads run as long as the process
  executor->Run(std::move(task));
}

}  // namespace xla_pp
