// Tests of blocks that two processes share, for `make sanitize`: this one is the reader
// of its own blocks, which it has in its memory twice.

#include "../shared.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"

namespace xla_pp {
namespace {

constexpr size_t kSize = 100000;
constexpr size_t kMany = 1000;  // more than there may be
constexpr int kFew = 3;

const SharedBlock* Sent(int reader, char content) {
  const SharedBlock* block = TakeShared(reader, kSize, kFew);
  if (!block) return nullptr;
  std::memset(block->data(), content, kSize);
  block->Write(kSize);
  block->Leave();
  return block;
}

bool Never() { return false; }
bool Always() { return true; }

void TheReaderFreesABlock() {
  const SharedBlock* block = Sent(getpid(), 3);
  EXPECT(!AreOpen(getpid()));
  std::string error;
  const SharedBlock* read = OpenShared(block->place, kSize, &error);
  EXPECT(read && read->data() != block->data());
  EXPECT(read->data()[0] == 3 && read->data()[kSize - 1] == 3);
  EXPECT(AreOpen(getpid()));
  EXPECT(Sent(getpid(), 4) != block);
  read->Free();
  EXPECT(Sent(getpid(), 5) == block);
  EXPECT(OpenShared(block->place, kSize, &error) == read);
  EXPECT(read->data()[kSize - 1] == 5);
  read->Free();
}

void ABlockIsNotTakenBeforeItWasWritten() {
  const SharedBlock* block = TakeShared(getpid(), kSize, kFew);
  block->Leave();
  std::string error;
  const SharedBlock* read = OpenShared(block->place, kSize, &error);
  EXPECT(!read->Await(1, Always));
  block->Write(1);
  EXPECT(read->Await(1, Always));
  read->Free();
  EXPECT(Sent(getpid(), 1) != block);
  block->Write(kSize);
  EXPECT(Sent(getpid(), 1) == block);
  read->Free();
}

// A writer that is ahead takes the memory that its reader is about to free.
void OneThatIsReadIsWaitedFor() {
  constexpr size_t kOther = 4 * kSize;
  std::vector<const SharedBlock*> blocks;
  for (int i = 0; i < kFew; ++i) {
    blocks.push_back(TakeShared(getpid(), kOther, kFew));
    blocks.back()->Write(kOther);
    blocks.back()->Leave();
  }
  std::string error;
  const SharedBlock* read = OpenShared(blocks[1]->place, kOther, &error);
  EXPECT(read->Await(kOther, Never));
  std::thread reader([&] { read->Free(); });
  EXPECT(TakeShared(getpid(), kOther, kFew) == blocks[1]);
  reader.join();
  blocks[1]->Write(kOther);
  EXPECT(read->Await(kOther, Never));  // and is not freed in time
  const SharedBlock* fourth = TakeShared(getpid(), kOther, kFew);
  EXPECT(fourth != blocks[1]);
  fourth->Write(kOther);
  fourth->Free();
  for (const SharedBlock* block : blocks) block->Free();
}

void WhatIsNotThereIsAnError() {
  std::string error;
  const SharedBlock* block = TakeShared(getpid(), kSize, kFew);
  block->Write(kSize);
  SharedPlace place = block->place;
  EXPECT(!OpenShared(place, 10 * kSize, &error) && error == "it is too small");
  place.number = 12345;
  EXPECT(!OpenShared(place, kSize, &error));
  EXPECT(error.find("is another file") != std::string::npos);
  place.file = 9999;
  EXPECT(!OpenShared(place, kSize, &error));
  EXPECT(error.find("/fd/9999: No such file") != std::string::npos);
}

void SmallMessagesAreNotShared() { EXPECT(!TakeShared(getpid(), 1000, kFew)); }

// The memory of a process that has ended serves others.
void ThereAreNotTooManyBlocks() {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  size_t count = 0;
  while (count < kMany && Sent(child, 1)) ++count;
  EXPECT(count > 10 && count < kMany);
  EXPECT(!TakeShared(getpid(), kSize * 10, kFew));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const SharedBlock* block = TakeShared(getpid(), kSize * 10, kFew);
  EXPECT(block);
  block->Write(kSize * 10);
  block->Free();
}

// Each has a byte of its own in all blocks: the sanitizer takes the two places of a
// block for two, and does not see that one thread has it after another.
void ManyThreads() {
  std::vector<std::thread> threads;
  for (int place = 0; place < 4; ++place) {
    threads.emplace_back([place] {
      for (int i = 0; i < 2000; ++i) {
        const SharedBlock* block = TakeShared(getpid(), kSize, kFew);
        EXPECT(block);
        block->data()[place] = static_cast<char>(i);
        block->Write(kSize);
        block->Leave();
        std::string error;
        const SharedBlock* read = OpenShared(block->place, kSize, &error);
        EXPECT(read && read->Await(kSize, Never));
        EXPECT(read->data()[place] == static_cast<char>(i));
        read->Free();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace xla_pp

int main() {
  xla_pp::TheReaderFreesABlock();
  xla_pp::ABlockIsNotTakenBeforeItWasWritten();
  xla_pp::OneThatIsReadIsWaitedFor();
  xla_pp::WhatIsNotThereIsAnError();
  xla_pp::SmallMessagesAreNotShared();
  xla_pp::ThereAreNotTooManyBlocks();
  xla_pp::ManyThreads();
  std::puts("shared_test: all is well");
}
