// Blocks of memory that a process of this host reads where another one has written.
//
// A message through UCX is copied by both: into memory that they share, and out of it.
// Large messages are written into such memory at once, and read there.
//
// Laws:
// * A block has one reader: the process that it was taken for. It holds one message
//   from when it is taken until it is freed: by its owner, or, once it was sent, by its
//   reader. It is not taken again before all of the message was written, either.
// * A message may be sent before it was written. Its reader follows the writing.
// * The owner's blocks are found by its process and a file of it, which has no name:
//   nothing is left when processes end, however they do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace xla_pp {

// Where the reader finds a block.
struct SharedPlace {
  int32_t owner = 0;  // its process
  int32_t file = -1;
  uint64_t number = 0;  // no other block of the owner has had it; 0 for none
};

// The beginning of a block, in the shared memory itself.
struct SharedHead {
  uint64_t number = 0;
  std::atomic<uint32_t> is_taken{0};
  std::atomic<uint32_t> is_sent{0};     // its reader frees it
  std::atomic<uint32_t> is_read{0};     // its reader has begun to read
  std::atomic<uint32_t> is_open{0};     // its reader has it in its memory
  std::atomic<uint32_t> is_dropped{0};  // its owner has not
  std::atomic<uint64_t> written{0};     // bytes of the message that are there
  std::atomic<int64_t> written_ns{0};   // when the last of them were
};

// Returns the time of the monotonic clock, which all processes of a host share.
inline int64_t NowNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

struct SharedBlock {
  SharedPlace place;
  size_t capacity = 0;
  SharedHead* head = nullptr;

  char* data() const;
  // Leaves the block to its reader.
  void Leave() const { head->is_sent = 1; }
  void Free() const { head->is_taken.store(0, std::memory_order_release); }
  // Notes that the first `size` bytes of the message are there.
  void Write(size_t size) const {
    head->written_ns.store(NowNs(), std::memory_order_relaxed);
    head->written.store(size, std::memory_order_release);
  }
  // Waits, as the reader, until they are; returns false if `is_over` says so before.
  bool Await(size_t size, const std::function<bool()>& is_over) const;
};

// A message is written, and its reader follows, by as many bytes at a time.
constexpr size_t kSharedStep = size_t{1} << 20;

// Returns a block for a message to a process of this host, or null where UCX does as
// well: for a small message, if there are too many blocks, or if the system has none.
// All of its bytes must be written. While `few` of its size are taken and one of them
// is being read, this waits for that, for some milliseconds at most: its memory is in
// the caches.
const SharedBlock* TakeShared(int reader, size_t size, int few);

// Returns a block that another process has sent here with a message of `size` bytes, or
// null, and why.
const SharedBlock* OpenShared(const SharedPlace& place, size_t size,
                              std::string* error);

// Returns whether a process has all blocks that were sent to it, which it cannot open
// any more once this process has ended.
bool AreOpen(int reader);

}  // namespace xla_pp
