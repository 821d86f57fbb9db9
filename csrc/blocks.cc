#include "blocks.h"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "pages.h"

namespace xla_pp {
namespace {

// A value may get a block that is larger by this part of its own size.
constexpr size_t kMostSpare = 4;
// One that is larger by this part was made for a value of about its size.
constexpr size_t kLittleSpare = 64;
// All blocks together may take more than was in use at once, by this part of it: sizes
// differ, so that one cannot always take the place of another. Of large ones there are
// few, and one more of them would be much.
constexpr size_t kMostSpareOfAll = 8, kMostSpareOfLarge = 64;
// XLA begins a program a moment before it frees what the last one had. So if there is
// no room for one more block, one may be free at once; but sizes can also have changed.
constexpr auto kLongestWait = std::chrono::microseconds(500);
constexpr int kMostFutileWaits = 4;  // of a step

std::atomic<size_t> the_least{SIZE_MAX}, the_least_large{SIZE_MAX};

bool IsAligned(const void* block, size_t alignment) {
  return reinterpret_cast<uintptr_t>(block) % alignment == 0;
}

// Blocks to free, which takes long for large ones: after the lock, so made before it.
struct Dropped {
  std::vector<void*> blocks;
  ~Dropped() {
    for (void* block : blocks) std::free(block);
  }
};

class Blocks {
 public:
  explicit Blocks(size_t spare) : spare_(spare) {}

  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }

  int Take(void** out, size_t alignment, size_t size) {
    {
      Dropped dropped;
      std::unique_lock lock(mutex_);
      const auto find_close = [&] {
        return *out = Reuse(alignment, size, size / kLittleSpare);
      };
      const auto find = [&] {
        return *out = Reuse(alignment, size, size / kMostSpare);
      };
      if (find_close()) return 0;
      // A larger one may be asked for while this value would have it.
      if (IsAwaited(size) && MayWait() && WaitUntil(lock, find_close)) return 0;
      if (find() || (!Fits(size) && MayWait() && WaitUntil(lock, find))) return 0;
      MakeRoom(size, dropped);
    }
    if (const int error = posix_memalign(out, alignment, size)) return error;
    if (size >= the_least_large) AskForLargePages(*out, size);
    std::lock_guard lock(mutex_);
    Use(*out, size);
    return 0;
  }

  // Returns whether the block is one of these, and takes it back.
  bool Give(void* block) {
    Dropped dropped;
    std::lock_guard lock(mutex_);
    if (!Unuse(block)) return false;
    const size_t size = malloc_usable_size(block);
    waiting_.emplace(size, Waiting{block, step_});
    waiting_bytes_ += size;
    given_.notify_all();
    MakeRoom(0, dropped);
    return true;
  }

  void BeginStep() {
    Dropped dropped;
    std::lock_guard lock(mutex_);
    DropIf([&](const Waiting& each) { return each.step + kStepsOfBlocks <= step_; },
           dropped);
    ++step_;
    most_[step_ % kStepsOfBlocks] = asked_;
    futile_waits_ = 0;
    MakeRoom(0, dropped);
  }

  void Drop() {
    Dropped dropped;
    std::lock_guard lock(mutex_);
    DropIf([](const Waiting&) { return true; }, dropped);
  }

  int64_t waiting_bytes() {
    std::lock_guard lock(mutex_);
    return static_cast<int64_t>(waiting_bytes_);
  }

 private:
  struct Used {
    size_t asked;
    size_t size;
  };
  struct Waiting {
    void* block;
    int64_t step;  // the last that used it
  };
  using WaitingBySize = std::multimap<size_t, Waiting>;

  // Returns a block that is larger by `spare` bytes at most, or none.
  void* Reuse(size_t alignment, size_t size, size_t spare) {
    const auto last = waiting_.upper_bound(size + spare);
    for (auto it = waiting_.lower_bound(size); it != last; ++it) {
      void* block = it->second.block;
      if (IsAligned(block, alignment)) {
        Remove(it);
        Use(block, size);
        return block;
      }
    }
    return nullptr;
  }

  void Use(void* block, size_t size) {
    Unuse(block);  // somebody else may have freed it
    const Used used{size, malloc_usable_size(block)};
    used_.emplace(block, used);
    asked_ += used.asked;
    used_bytes_ += used.size;
    size_t& most = most_[step_ % kStepsOfBlocks];
    most = std::max(most, asked_);
  }

  bool Unuse(void* block) {
    const auto it = used_.find(block);
    if (it == used_.end()) return false;
    asked_ -= it->second.asked;
    used_bytes_ -= it->second.size;
    used_.erase(it);
    return true;
  }

  // Returns whether a new block of `more` bytes fits in beside those that wait.
  bool Fits(size_t more) const {
    const size_t before = *std::max_element(most_.begin(), most_.end());
    const size_t most = std::max(before, asked_ + more);
    return used_bytes_ + waiting_bytes_ + more <= most + most / spare_;
  }

  // Returns whether there is no room for one more value of a size that is in use.
  bool IsAwaited(size_t size) const {
    if (Fits(size)) return false;
    return std::any_of(used_.begin(), used_.end(),
                       [&](const auto& each) { return each.second.asked == size; });
  }

  bool MayWait() const { return !waiting_.empty() && futile_waits_ < kMostFutileWaits; }

  template <typename Condition>
  bool WaitUntil(std::unique_lock<std::mutex>& lock, Condition condition) {
    const bool is_found = given_.wait_for(lock, kLongestWait, condition);
    futile_waits_ += !is_found;
    return is_found;
  }

  // Drops what has waited longest until a block of `more` bytes fits in.
  void MakeRoom(size_t more, Dropped& dropped) {
    while (!waiting_.empty() && !Fits(more)) {
      const auto oldest = std::min_element(waiting_.begin(), waiting_.end(),
                                           [](const auto& one, const auto& other) {
                                             return one.second.step < other.second.step;
                                           });
      dropped.blocks.push_back(oldest->second.block);
      Remove(oldest);
    }
  }

  template <typename Condition>
  void DropIf(Condition condition, Dropped& dropped) {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto next = std::next(it);
      if (condition(it->second)) {
        dropped.blocks.push_back(it->second.block);
        Remove(it);
      }
      it = next;
    }
  }

  void Remove(WaitingBySize::iterator it) {
    waiting_bytes_ -= it->first;
    waiting_.erase(it);
  }

  const size_t spare_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::unordered_map<void*, Used> used_;
  WaitingBySize waiting_;
  int64_t step_ = 0;
  int futile_waits_ = 0;  // in this step
  // Bytes in use, as they were asked for and as blocks have them; of those that wait.
  size_t asked_ = 0, used_bytes_ = 0, waiting_bytes_ = 0;
  // The most that was asked for at once in each of the last steps.
  std::array<size_t, kStepsOfBlocks> most_{};
};

// Blocks of usual values and of large ones; they live as long as XLA's threads.
struct Kept {
  Blocks usual{kMostSpareOfAll}, large{kMostSpareOfLarge};

  static Kept& The() {
    static auto* kept = new Kept;
    return *kept;
  }
  Blocks& Of(size_t size) { return size < the_least_large ? usual : large; }
  void Lock() { usual.Lock(), large.Lock(); }
  void Unlock() { large.Unlock(), usual.Unlock(); }
};

}  // namespace

void KeepBlocks(size_t least, size_t large) {
  // A forked child has the locks as they were, and not the threads that held them.
  pthread_atfork([] { Kept::The().Lock(); }, [] { Kept::The().Unlock(); },
                 [] { Kept::The().Unlock(); });
  the_least_large = large;
  the_least = least;
}

int PosixMemalign(void** out, size_t alignment, size_t size) {
  if (size < the_least) return posix_memalign(out, alignment, size);
  return Kept::The().Of(size).Take(out, alignment, size);
}

void* AlignedAlloc(size_t alignment, size_t size) {
  if (size < the_least) return aligned_alloc(alignment, size);
  void* block;
  const int error = Kept::The().Of(size).Take(&block, alignment, size);
  if (error) errno = error;
  return error ? nullptr : block;
}

void Free(void* block) {
  if (block && malloc_usable_size(block) >= the_least) {
    Kept& kept = Kept::The();
    if (kept.usual.Give(block) || kept.large.Give(block)) return;
  }
  std::free(block);  // small, or made before blocks were kept
}

void BeginStepOfBlocks() {
  Kept::The().usual.BeginStep();
  Kept::The().large.BeginStep();
}

void DropBlocks() {
  Kept::The().usual.Drop();
  Kept::The().large.Drop();
}

int64_t WaitingBytes() {
  return Kept::The().usual.waiting_bytes() + Kept::The().large.waiting_bytes();
}

}  // namespace xla_pp
