// Tests of large blocks that are used again, for `make sanitize`.

#include "../blocks.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"

namespace xla_pp {
namespace {

constexpr size_t kLeast = 1000, kLarge = 64000, kAlignment = 64;

char* Taken(size_t size) {
  void* block = nullptr;
  EXPECT(PosixMemalign(&block, kAlignment, size) == 0);
  EXPECT(reinterpret_cast<uintptr_t>(block) % kAlignment == 0);
  std::memset(block, 1, size);
  return static_cast<char*>(block);
}

void AFreedBlockServesTheNextValueOfAboutItsSize() {
  DropBlocks();
  char* first = Taken(8000);
  Free(Taken(8000));  // so that two are kept
  DropBlocks();
  Free(first);
  EXPECT(WaitingBytes() >= 8000);
  EXPECT(Taken(7000) == first);
  Free(first);
  char* small = Taken(4000);  // much smaller: not this one
  EXPECT(small != first);
  Free(small);
  EXPECT(AlignedAlloc(kAlignment, 8000) == first);
  Free(first);
}

void OthersAreTheSystems() {
  DropBlocks();
  Free(nullptr);
  Free(Taken(kLeast - 100));
  Free(std::malloc(2 * kLeast));
  EXPECT(WaitingBytes() == 0);
  std::free(Taken(8000));  // by somebody who knows nothing of this
  Free(Taken(8000));
  DropBlocks();
  EXPECT(WaitingBytes() == 0);
}

// Forgets all that was in use.
void BeginAfresh() {
  for (int step = 0; step < kStepsOfBlocks; ++step) BeginStepOfBlocks();
  DropBlocks();
}

void NoMoreWaitThanWereInUse() {
  BeginAfresh();
  for (size_t size = 2000; size < 60000; size += size / 2) Free(Taken(size));
  EXPECT(WaitingBytes() < 60000 + 60000 / 4);
}

// What is in use at once differs from step to step, and no block is given back for it.
void TheMostOfSeveralStepsCounts() {
  BeginAfresh();
  char* first = Taken(20000);
  Free(Taken(30000));
  for (int step = 1; step < kStepsOfBlocks; ++step) {
    BeginStepOfBlocks();
    Free(first);
    EXPECT(WaitingBytes() >= 50000);
    first = Taken(20000);
  }
  Free(first);
}

void OfLargeBlocksNoneIsToSpare() {
  BeginAfresh();
  char* usual = Taken(kLarge - 1);
  char* large = Taken(kLarge);
  Free(usual);
  Free(large);
  EXPECT(Taken(kLarge) == large);  // what waits is not taken for what is kept apart
  EXPECT(Taken(kLarge - 1) == usual);
  Free(usual);
  Free(large);
  const int64_t both = WaitingBytes();
  Free(Taken(4 * kLarge));  // the other large one makes room, and the usual one stays
  EXPECT(WaitingBytes() >= static_cast<int64_t>(5 * kLarge - 1));
  EXPECT(WaitingBytes() < both + static_cast<int64_t>(3 * kLarge + kLarge / 2));
}

// Returns whether a value gets the block of its size that is freed a moment later.
// There is no room for another one while a block of another size waits.
bool GetsWhatIsFreedNext(size_t other_size) {
  BeginAfresh();
  char* used = Taken(20000);
  char* freed = Taken(30000);
  Free(Taken(other_size));
  std::atomic<bool> is_asked{false};
  std::thread other([&] {
    while (!is_asked) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    Free(freed);
  });
  is_asked = true;
  char* found = Taken(30000);
  other.join();
  Free(found);
  Free(used);
  return found == freed;
}

void ABlockIsAwaitedForAMoment() {
  bool is_found = false;
  for (int i = 0; i < 100 && !is_found; ++i) is_found = GetsWhatIsFreedNext(20000);
  EXPECT(is_found);
}

void ALargerOneIsLeftToOthersForAMoment() {
  bool is_found = false;
  for (int i = 0; i < 100 && !is_found; ++i) is_found = GetsWhatIsFreedNext(36000);
  EXPECT(is_found);
}

void BlocksOfEarlierStepsGoBack() {
  DropBlocks();
  Free(Taken(8000));
  BeginStepOfBlocks();
  Free(Taken(8000));
  for (int step = 0; step < kStepsOfBlocks; ++step) {
    BeginStepOfBlocks();
    EXPECT((WaitingBytes() > 0) == (step + 1 < kStepsOfBlocks));
  }
}

void ManyThreads() {
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([seed] {
      std::mt19937 random(seed);
      std::vector<std::pair<char*, size_t>> held;
      for (int i = 0; i < 3000; ++i) {
        if (held.size() < 8 && random() % 2) {
          const size_t size = 500 + random() % 130000;
          char* block = Taken(size);
          std::memset(block, static_cast<int>(seed), size);
          held.emplace_back(block, size);
        } else if (!held.empty()) {
          const auto [block, size] = held.back();
          held.pop_back();
          EXPECT(block[0] == static_cast<char>(seed));
          EXPECT(block[size - 1] == static_cast<char>(seed));
          Free(block);
        }
        if (seed == 0 && i % 100 == 0) BeginStepOfBlocks();
      }
      for (const auto& [block, size] : held) Free(block);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace xla_pp

int main() {
  xla_pp::KeepBlocks(xla_pp::kLeast, xla_pp::kLarge);
  xla_pp::AFreedBlockServesTheNextValueOfAboutItsSize();
  xla_pp::OthersAreTheSystems();
  xla_pp::NoMoreWaitThanWereInUse();
  xla_pp::TheMostOfSeveralStepsCounts();
  xla_pp::OfLargeBlocksNoneIsToSpare();
  xla_pp::ABlockIsAwaitedForAMoment();
  xla_pp::ALargerOneIsLeftToOthersForAMoment();
  xla_pp::BlocksOfEarlierStepsGoBack();
  xla_pp::ManyThreads();
  xla_pp::DropBlocks();
  std::puts("blocks_test: all is well");
}
