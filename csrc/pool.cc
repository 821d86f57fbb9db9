#include "pool.h"

#include <array>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "pages.h"

namespace xla_pp {
namespace {

constexpr size_t kSmallest = 4096;
constexpr size_t kMaxKeptBytes = size_t{512} << 20;

class Pool {
 public:
  char* Take(size_t size) {
    const int bucket = BucketOf(size);
    {
      std::lock_guard lock(mutex_);
      auto& blocks = blocks_[bucket];
      if (!blocks.empty()) {
        char* block = blocks.back();
        blocks.pop_back();
        kept_bytes_ -= kSmallest << bucket;
        return block;
      }
    }
    auto* block = static_cast<char*>(std::malloc(kSmallest << bucket));
    if (!block) throw std::bad_alloc();
    AskForLargePages(block, kSmallest << bucket);
    return block;
  }

  void Give(char* block, size_t size) {
    const int bucket = BucketOf(size);
    const size_t capacity = kSmallest << bucket;
    {
      std::lock_guard lock(mutex_);
      if (kept_bytes_ + capacity <= kMaxKeptBytes) {
        kept_bytes_ += capacity;
        blocks_[bucket].push_back(block);
        return;
      }
    }
    std::free(block);
  }

 private:
  // Capacities are powers of two.
  static int BucketOf(size_t size) {
    int bucket = 0;
    while ((kSmallest << bucket) < size) ++bucket;
    return bucket;
  }

  std::mutex mutex_;
  std::array<std::vector<char*>, 64> blocks_;
  size_t kept_bytes_ = 0;
};

Pool& ThePool() {
  static auto* pool = new Pool;  // lives as long as XLA's threads
  return *pool;
}

}  // namespace

char* TakeBlock(size_t size) { return ThePool().Take(size); }

void GiveBlock(char* block, size_t size) { ThePool().Give(block, size); }

}  // namespace xla_pp
