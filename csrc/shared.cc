#include "shared.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace xla_pp {
namespace {

using Clock = std::chrono::steady_clock;

// Of smaller messages the copies cost less than what else a message costs.
constexpr size_t kLeast = size_t{64} << 10;
constexpr size_t kMaxBytes = size_t{512} << 20;
// Each takes a file.
constexpr size_t kMaxBlocks = 128;
// If there are too many, those go that nothing was sent in for so long.
constexpr auto kUnusedAfter = std::chrono::seconds(10);
constexpr size_t kHeadSize = 4096;
// For a block that is being read.
constexpr auto kMostWait = std::chrono::milliseconds(20);
// The reader first yields, which costs less than a microsecond, and then sleeps.
constexpr int kYields = 200;
constexpr auto kSleep = std::chrono::microseconds(50);

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(SharedHead) <= kHeadSize);

// Returns whether there is such a process; one that has ended, and whose parent has
// not noticed, counts.
bool Exists(int process) { return kill(process, 0) == 0 || errno != ESRCH; }

SharedHead* Map(int file, size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<SharedHead*>(memory);
}

void Unmap(const SharedBlock& block) { munmap(block.head, kHeadSize + block.capacity); }

// The blocks of this process, which other ones read.
class Owned {
 public:
  const SharedBlock* Take(int reader, size_t size, int few) {
    size_t capacity = kLeast;
    while (capacity < size) capacity *= 2;
    const auto end = Clock::now() + kMostWait;
    for (;;) {
      {
        std::lock_guard lock(mutex_);
        int num_taken = 0;
        bool is_read = false;
        for (Block& it : blocks_) {
          if (it.reader != reader || it.block.capacity != capacity) continue;
          if (it.is_free()) return it.Take(size);
          ++num_taken;
          is_read |= it.block.head->is_read != 0;
        }
        if (!is_read || num_taken < few || Clock::now() >= end) {
          if (!HasRoomFor(capacity)) DropUnused();
          return HasRoomFor(capacity) ? Add(reader, capacity, size) : nullptr;
        }
      }
      std::this_thread::yield();
    }
  }

  bool AreOpen(int reader) {
    std::lock_guard lock(mutex_);
    for (const Block& it : blocks_) {
      const SharedHead& head = *it.block.head;
      if (it.reader != reader) continue;
      if (head.is_taken && head.is_sent && !head.is_open) return false;
    }
    return true;
  }

 private:
  struct Block {
    SharedBlock block;
    int reader;
    size_t size;  // of the last message
    Clock::time_point taken_at;

    bool is_free() const {
      return !block.head->is_taken.load(std::memory_order_acquire) &&
             block.head->written == size;
    }
    const SharedBlock* Take(size_t new_size) {
      SharedHead& head = *block.head;
      size = new_size;
      head.is_sent = head.is_read = 0;
      head.written = 0;
      head.is_taken = 1;
      taken_at = Clock::now();
      return &block;
    }
  };

  bool HasRoomFor(size_t capacity) const {
    return blocks_.size() < kMaxBlocks && bytes_ + capacity <= kMaxBytes;
  }

  static bool IsUnused(const Block& it) {
    if (it.is_free()) return Clock::now() - it.taken_at >= kUnusedAfter;
    const SharedHead& head = *it.block.head;
    return head.is_sent && head.written == it.size && !Exists(it.reader);
  }

  void DropUnused() {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      const auto current = it++;
      if (!IsUnused(*current)) continue;
      const SharedBlock& block = current->block;
      block.head->is_dropped = 1;
      close(block.place.file);
      Unmap(block);
      bytes_ -= block.capacity;
      blocks_.erase(current);
    }
  }

  const SharedBlock* Add(int reader, size_t capacity, size_t message_size) {
    const int file = memfd_create("torch_xla_pp", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    const size_t size = kHeadSize + capacity;
    void* memory =
        ftruncate(file, static_cast<off_t>(size)) == 0 ? Map(file, size) : nullptr;
    if (!memory) {
      close(file);
      return nullptr;
    }
    auto* head = new (memory) SharedHead;
    head->number = ++last_;
    bytes_ += capacity;
    const SharedPlace place{getpid(), file, head->number};
    blocks_.push_back({{place, capacity, head}, reader, 0, {}});
    return blocks_.back().Take(message_size);
  }

  std::mutex mutex_;
  std::list<Block> blocks_;
  size_t bytes_ = 0;
  uint64_t last_ = 0;
};

// The blocks of other processes that this one has in its memory.
class Opened {
 public:
  const SharedBlock* Open(const SharedPlace& place, size_t size, std::string* error) {
    std::lock_guard lock(mutex_);
    const auto key = std::make_pair(place.owner, place.number);
    auto found = blocks_.find(key);
    if (found == blocks_.end()) {
      CloseDropped();
      SharedBlock block{place};
      if (!OpenNew(&block, error)) return nullptr;
      found = blocks_.emplace(key, block).first;
    }
    if (found->second.capacity < size) {
      *error = "it is too small";
      return nullptr;
    }
    return &found->second;
  }

 private:
  static bool OpenNew(SharedBlock* block, std::string* error) {
    const std::string path = "/proc/" + std::to_string(block->place.owner) + "/fd/" +
                             std::to_string(block->place.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status{};
    const bool is_known = file >= 0 && fstat(file, &status) == 0;
    const auto size = static_cast<size_t>(status.st_size);
    if (is_known && size > kHeadSize) block->head = Map(file, size);
    *error = path + ": " + std::strerror(errno);
    if (file >= 0) close(file);
    if (!block->head) return false;
    block->capacity = size - kHeadSize;
    if (block->head->number != block->place.number) {
      *error = path + " is another file";
      Unmap(*block);
      return false;
    }
    block->head->is_open = 1;
    return true;
  }

  void CloseDropped() {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      const bool is_dropped = it->second.head->is_dropped != 0;
      if (is_dropped) Unmap(it->second);
      it = is_dropped ? blocks_.erase(it) : std::next(it);
    }
  }

  std::mutex mutex_;
  std::map<std::pair<int32_t, uint64_t>, SharedBlock> blocks_;
};

Owned& TheOwned() {
  static auto* owned = new Owned;  // lives as long as XLA's threads
  return *owned;
}

Opened& TheOpened() {
  static auto* opened = new Opened;
  return *opened;
}

}  // namespace

char* SharedBlock::data() const { return reinterpret_cast<char*>(head) + kHeadSize; }

bool SharedBlock::Await(size_t size, const std::function<bool()>& is_over) const {
  head->is_read = 1;
  for (int i = 0; head->written.load(std::memory_order_acquire) < size; ++i) {
    if (i < kYields) {
      std::this_thread::yield();
    } else {
      if (is_over()) return false;
      std::this_thread::sleep_for(kSleep);
    }
  }
  return true;
}

const SharedBlock* TakeShared(int reader, size_t size, int few) {
  if (size < kLeast || size > kMaxBytes) return nullptr;
  return TheOwned().Take(reader, size, few);
}

const SharedBlock* OpenShared(const SharedPlace& place, size_t size,
                              std::string* error) {
  return TheOpened().Open(place, size, error);
}

bool AreOpen(int reader) { return TheOwned().AreOpen(reader); }

}  // namespace xla_pp
