// Stress and fault tests of the matching, for `make sanitize`: many threads play the
// devices of two ranks, whose engines are joined by links in memory.

#include "../engine.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../recorder.h"
#include "expect.h"

namespace xla_pp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A link to one peer in this process, with a thread of its own.
class MemoryLink : public Link {
 public:
  explicit MemoryLink(LinkEvents events) : events_(std::move(events)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~MemoryLink() override { Close("", seconds(0)); }

  std::string Address() const override {
    const MemoryLink* self = this;
    return std::string(reinterpret_cast<const char*>(&self), sizeof(self));
  }

  void Connect(int, const std::string& address) override {
    std::lock_guard lock(mutex_);
    std::memcpy(&peer_, address.data(), sizeof(peer_));
  }

  void Send(int, std::string header, Bytes payload) override {
    auto bytes = std::make_shared<Bytes>(std::move(payload));
    MemoryLink* peer;
    {
      std::lock_guard lock(mutex_);
      peer = peer_;
    }
    if (!peer) return;
    peer->Post([peer, header = std::move(header), bytes] {
      peer->events_.arrived(header, std::move(*bytes));
    });
  }

  // Lets the user believe that the peer has died.
  void Lose(int peer) {
    Post([this, peer] { events_.lost(peer, "it was killed"); });
  }

  bool Close(const std::string& farewell, std::chrono::duration<double>) override {
    if (!thread_.joinable()) return true;
    if (!farewell.empty()) Send(0, farewell, Bytes(0));
    {
      std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_one();
    thread_.join();
    return true;
  }

 private:
  void Post(std::function<void()> event) {
    {
      std::lock_guard lock(mutex_);
      if (is_closed_) return;
      queue_.push_back(std::move(event));
    }
    changed_.notify_one();
  }

  void Run() {
    std::unique_lock lock(mutex_);
    while (!is_closed_) {
      lock.unlock();
      events_.tick();
      lock.lock();
      changed_.wait_for(lock, milliseconds(5),
                        [this] { return is_closed_ || !queue_.empty(); });
      while (!queue_.empty()) {
        auto event = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        event();
        lock.lock();
      }
    }
  }

  LinkEvents events_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  MemoryLink* peer_ = nullptr;
  bool is_closed_ = false;
  std::thread thread_;
};

struct Node {
  std::unique_ptr<Engine> engine;
  MemoryLink* link = nullptr;

  Node(int rank, int num_devices, std::chrono::duration<double> timeout) {
    EngineConfig config;
    config.rank = rank;
    config.num_devices = num_devices;
    config.timeout = timeout;
    engine = std::make_unique<Engine>(config, [this](LinkEvents events) {
      auto made = std::make_unique<MemoryLink>(std::move(events));
      link = made.get();
      return made;
    });
  }
};

struct Pair {
  Node zero;
  Node one;

  // With a process, large messages go through memory that both could share.
  Pair(int num_devices, std::chrono::duration<double> timeout, int pid = 0)
      : zero(0, num_devices, timeout), one(1, num_devices, timeout) {
    zero.engine->Connect(1, one.engine->Address(), pid);
    one.engine->Connect(0, zero.engine->Address(), pid);
  }
  // Neither may send to a link that is gone.
  ~Pair() {
    zero.engine->Close(seconds(1));
    one.engine->Close(seconds(1));
  }
};

Key KeyOf(int source, int microbatch, uint64_t number, uint64_t generation = 0) {
  Key key;
  key.generation = generation;
  key.edge = {source, 0, 1};
  key.microbatch = microbatch;
  key.number = number;
  return key;
}

Layout LayoutOf(int num_devices, uint64_t digest = 7) {
  return {num_devices, digest, "float32[2]"};
}

void Send(Node& node, int peer, Key key, int device, int num_devices, char content,
          size_t size = 64, uint64_t digest = 7, uint64_t order = 0) {
  Message message;
  message.key = key;
  message.device = device;
  message.order = order;
  message.layout = LayoutOf(num_devices, digest);
  message.bytes = node.engine->BytesFor(peer, size);
  std::memset(message.bytes.data(), content, size);
  if (const SharedBlock* block = message.bytes.block()) block->Write(size);
  node.engine->Send(peer, std::move(message));
}

// Sends a message in shared memory before anything of it was written.
const SharedBlock* SendAhead(Node& node, Key key, size_t size, int device = 0,
                             int num_devices = 1) {
  Message message;
  message.key = key;
  message.device = device;
  message.layout = LayoutOf(num_devices);
  message.bytes = node.engine->BytesFor(1, size);
  const SharedBlock* block = message.bytes.block();
  node.engine->Send(1, std::move(message));
  return block;
}

// One receive op: waits as XLA would, for `done`.
class Receiver {
 public:
  // `condition` is looked at when the rest of the program may run.
  Receiver(
      Node& node, Key key, int device, int num_devices, size_t size = 64,
      std::function<bool()> condition = [] { return true; })
      : out_(size) {
    Request request;
    request.key = key;
    request.layout = LayoutOf(num_devices);
    request.part_sizes.assign(num_devices, size);
    request.results.push_back({out_.data(), size, -1});
    request.pieces.push_back({device, 0, 0, {0, size, {}}});
    request.done = [state = state_, condition] {
      std::lock_guard lock(state->mutex);
      state->was_so = condition();
      state->is_done = true;
      state->changed.notify_all();
    };
    node.engine->inbox().Receive(std::move(request));
  }

  bool IsDone(milliseconds limit) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, limit, [this] { return state_->is_done; });
  }

  char content() const { return out_.data()[out_.size() - 1]; }
  bool was_so() const { return state_->was_so; }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    bool was_so = false;
  };
  Bytes out_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// A box of three dimensions goes into a message and out of it into another array.
void BoxesAreCopiedRunByRun() {
  char array[4][3][5], other[6][5] = {};
  for (int i = 0; i < 60; ++i) array[i / 15][i / 5 % 3][i % 5] = static_cast<char>(i);
  const Box box{1 * 15 + 0 * 5 + 2, 2, {{3, 15}, {2, 5}}};  // [1:4, 0:2, 2:4]
  EXPECT(box.size() == 12);
  char message[12];
  Pack(&array[0][0][0], box, message);
  for (int i = 0; i < 12; ++i) {
    EXPECT(message[i] == array[1 + i / 4][i / 2 % 2][2 + i % 2]);
  }
  Unpack(message, {5 + 1, 3, {{4, 5}}}, &other[0][0]);  // [1:5, 1:4]
  for (int i = 0; i < 30; ++i) {
    const int row = i / 5 - 1, column = i % 5 - 1;
    const bool is_in = row >= 0 && row < 4 && column >= 0 && column < 3;
    EXPECT(other[i / 5][i % 5] == (is_in ? message[row * 3 + column] : 0));
  }
  for (const size_t most : {1, 2, 3, 4, 7, 11, 12}) {
    char parts[12];
    size_t done = 0;
    for (const Box& part : PartsOf(box, most)) {
      EXPECT(part.size() > 0 && part.size() <= most);
      Pack(&array[0][0][0], part, parts + done);
      done += part.size();
    }
    EXPECT(done == 12 && std::memcmp(parts, message, 12) == 0);
  }
  Pack(&array[0][0][0], {0, 0, {}}, nullptr);
  Pack(&array[0][0][0], {0, 2, {{0, 1}}}, nullptr);
}

// Both directions at once, four devices each, sends and receives in random order.
void ManyMessagesInAnyOrder() {
  constexpr int kDevices = 4, kMessages = 200;
  Pair pair(kDevices, seconds(60));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int rank = 0; rank < 2; ++rank) {
    Node& node = rank ? pair.one : pair.zero;
    for (int device = 0; device < kDevices; ++device) {
      threads.emplace_back([&node, rank, device] {
        std::mt19937 random(rank * 10 + device);
        std::vector<int> order(kMessages);
        for (int i = 0; i < kMessages; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        for (const int i : order) {
          Send(node, 1 - rank, KeyOf(rank, i % 16, i / 16), device, kDevices,
               static_cast<char>(i % 100 + device), 1 + i);
        }
      });
      threads.emplace_back([&node, &wrong, rank, device] {
        for (int i = 0; i < kMessages; ++i) {
          Receiver receiver(node, KeyOf(1 - rank, i % 16, i / 16), device, kDevices,
                            1 + i);
          if (!receiver.IsDone(milliseconds(30000))) ++wrong;
          if (receiver.content() != static_cast<char>(i % 100 + device)) ++wrong;
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  EXPECT(wrong == 0);
  for (Node* node : {&pair.zero, &pair.one}) {
    EXPECT(node->engine->inbox().Settle(0, kMessages, seconds(5)));
    EXPECT(node->engine->inbox().stats().num_messages == 0);
  }
}

// As above; a step's messages lie there until a receive takes them, or never does.
void LargeMessagesInSharedMemory() {
  constexpr int kMessages = 40;
  const size_t size = 300000;
  for (uint64_t generation = 0; generation < 3; ++generation) {
    Pair pair(1, seconds(60), getpid());
    EXPECT(pair.zero.engine->BytesFor(1, size).block());
    EXPECT(!pair.zero.engine->BytesFor(1, 1000).block());
    std::thread sender([&] {
      for (int i = 0; i < kMessages; ++i) {
        Send(pair.zero, 1, KeyOf(0, i, 0), 0, 1, static_cast<char>(i), size);
      }
    });
    for (int i = 0; i < kMessages / 2; ++i) {
      Receiver receiver(pair.one, KeyOf(0, i, 0), 0, 1, size);
      EXPECT(receiver.IsDone(milliseconds(30000)));
      EXPECT(receiver.content() == static_cast<char>(i));
    }
    sender.join();
    pair.one.engine->inbox().Advance(1);
    EXPECT(pair.zero.engine->Close(seconds(30)));
  }
}

void AReceiveFollowsTheWriting() {
  const size_t size = 3 * kSharedStep + 1000;
  Pair pair(1, seconds(60), getpid());
  TheRecorder().Start();
  Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1, size);  // else it waits here
  const SharedBlock* block = SendAhead(pair.zero, KeyOf(0, 0, 0), size);
  EXPECT(!receiver.IsDone(milliseconds(100)));
  std::memset(block->data(), 6, size);
  block->Write(2 * kSharedStep);
  EXPECT(!receiver.IsDone(milliseconds(100)));
  EXPECT(!pair.one.engine->inbox().Settle(0, 1, milliseconds(10)));
  const int64_t before_ns = NowNs();
  block->Write(size);
  const int64_t after_ns = NowNs();
  EXPECT(receiver.IsDone(milliseconds(30000)) && receiver.content() == 6);
  Record record;
  EXPECT(TheRecorder().Stop(&record, 1) == 1);
  EXPECT(record.event == static_cast<int64_t>(Event::kArrived));
  EXPECT(record.time_ns >= before_ns && record.time_ns <= after_ns);
  EXPECT(pair.one.engine->inbox().Settle(0, 1, seconds(30)));
  block = SendAhead(pair.zero, KeyOf(0, 0, 1), size);
  while (pair.one.engine->inbox().stats().num_messages == 0) std::this_thread::yield();
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    std::memset(block->data(), 7, size);
    block->Write(size);
  });
  Receiver late(pair.one, KeyOf(0, 0, 1), 0, 1, size);
  EXPECT(late.IsDone(milliseconds(0)) && late.content() == 7);
  writer.join();
}

// The sender's devices write one after another, and the receiver's go on together. The
// memory is free then, as the rest of a program may take long.
void DevicesGoOnWhenAllIsWritten() {
  const size_t size = kSharedStep;
  Pair pair(2, seconds(60), getpid());
  std::vector<const SharedBlock*> blocks;
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (const int device : {0, 1}) {
    const auto is_free = [&] { return !blocks.at(0)->head->is_taken; };
    receivers.push_back(
        std::make_unique<Receiver>(pair.one, KeyOf(0, 0, 0), device, 2, size, is_free));
  }
  for (const int device : {0, 1}) {
    blocks.push_back(SendAhead(pair.zero, KeyOf(0, 0, 0), size, device, 2));
  }
  std::memset(blocks[0]->data(), 5, size);
  blocks[0]->Write(size);
  EXPECT(!receivers[0]->IsDone(milliseconds(100)));
  std::memset(blocks[1]->data(), 6, size);
  blocks[1]->Write(size);
  for (const auto& receiver : receivers) EXPECT(receiver->IsDone(milliseconds(30000)));
  EXPECT(receivers[0]->content() == 5 && receivers[1]->content() == 6);
  // Whoever was last saw both free.
  EXPECT(receivers[0]->was_so() || receivers[1]->was_so());
}

// Whatever keeps the sender from writing the rest.
void AMessageThatIsNotWrittenEnds() {
  const size_t size = 2 * kSharedStep;
  const auto half_sent = [&](Pair& pair) {
    const SharedBlock* block = SendAhead(pair.zero, KeyOf(0, 0, 0), size);
    block->Write(size / 2);
    return block;
  };
  {
    Pair pair(1, seconds(60), getpid());
    Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1, size);
    const SharedBlock* block = half_sent(pair);
    EXPECT(!receiver.IsDone(milliseconds(50)));
    pair.one.link->Lose(0);
    EXPECT(receiver.IsDone(milliseconds(30000)) && receiver.content() == -1);
    EXPECT(!pair.one.engine->inbox().Settle(0, 1, milliseconds(10)));
    EXPECT(pair.one.engine->inbox().failure(0)->text.find("rank 0 is gone: it was") !=
           std::string::npos);
    EXPECT(pair.zero.engine->BytesFor(1, size).block() != block);
    block->Write(size);
  }
  {
    Pair pair(1, milliseconds(300), getpid());
    Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1, size);
    const SharedBlock* block = half_sent(pair);
    EXPECT(receiver.IsDone(milliseconds(30000)) && receiver.content() == -1);
    EXPECT(pair.one.engine->inbox().failure(0)->kind == FailureKind::kTimeout);
    block->Write(size);
  }
  {
    Pair pair(1, seconds(60), getpid());
    Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1, size);
    const SharedBlock* block = half_sent(pair);
    EXPECT(!receiver.IsDone(milliseconds(50)));
    pair.one.engine->inbox().Advance(1);
    EXPECT(receiver.IsDone(milliseconds(30000)) && receiver.content() == -1);
    EXPECT(!pair.one.engine->inbox().failure(1));
    block->Write(size);
  }
}

void AllDevicesOrNone() {
  Pair pair(2, seconds(60));
  Receiver first(pair.one, KeyOf(0, 0, 0), 0, 2);
  Receiver second(pair.one, KeyOf(0, 0, 0), 1, 2);
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 2, 5);
  EXPECT(!first.IsDone(milliseconds(200)));
  Send(pair.zero, 1, KeyOf(0, 0, 0), 1, 2, 6);
  EXPECT(first.IsDone(milliseconds(5000)) && second.IsDone(milliseconds(5000)));
  EXPECT(first.content() == 5 && second.content() == 6);
}

// Slices of two senders' devices are side by side in one shard; the rest is padding.
void PiecesOfSeveralSourcesMakeAShard() {
  Pair pair(1, seconds(60));
  char shard[2][5];
  std::memset(shard, 9, sizeof(shard));
  std::promise<void> done;
  Request request;
  request.key = KeyOf(0, 0, 0);
  request.layout = LayoutOf(3);
  request.part_sizes = {6, kNothing, 2};  // the first source has more for others
  request.results.push_back({&shard[0][0], sizeof(shard), -1, true});
  request.pieces.push_back({0, 2, 0, {0, 2, {{2, 5}}}});
  request.pieces.push_back({2, 0, 0, {2, 1, {{2, 5}}}});
  request.done = [&] { done.set_value(); };
  pair.one.engine->inbox().Receive(std::move(request));
  Send(pair.zero, 1, KeyOf(0, 0, 0), 2, 3, 5, 2);
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 3, 4, 6);
  done.get_future().wait();
  const char expected[2][5] = {{4, 4, 5, 0, 0}, {4, 4, 5, 0, 0}};
  EXPECT(std::memcmp(shard, expected, sizeof(shard)) == 0);
}

void ADeathEndsEveryReceiveAlike() {
  Pair pair(2, seconds(60));
  Receiver first(pair.one, KeyOf(0, 0, 0), 0, 2);
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 2, 5);
  pair.one.link->Lose(0);
  EXPECT(first.IsDone(milliseconds(5000)));
  Receiver second(pair.one, KeyOf(0, 0, 0), 1, 2);
  EXPECT(second.IsDone(milliseconds(5000)));
  EXPECT(first.content() == -1 && second.content() == -1);
  const auto failure = pair.one.engine->inbox().failure(0);
  EXPECT(failure && failure->kind == FailureKind::kError);
  EXPECT(failure->text.find("rank 0 is gone: it was killed") != std::string::npos);
  // The failure went on to the peer, as a report.
  for (int i = 0; i < 500 && !pair.zero.engine->inbox().failure(0); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  const auto report = pair.zero.engine->inbox().failure(0);
  EXPECT(report && report->kind == FailureKind::kReport);
  EXPECT(report->text.rfind("1\nTransportError\n\nrecv 1F0", 0) == 0);
}

void WhatOneDeviceGotTheOthersGetToo() {
  Pair pair(2, seconds(60));
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 2, 5);
  Send(pair.zero, 1, KeyOf(0, 0, 0), 1, 2, 6);
  Receiver first(pair.one, KeyOf(0, 0, 0), 0, 2);
  EXPECT(first.IsDone(milliseconds(5000)) && first.content() == 5);
  pair.one.engine->Report(0, "1\nValueError\n\nbad");
  Receiver second(pair.one, KeyOf(0, 0, 0), 1, 2);
  EXPECT(second.IsDone(milliseconds(5000)) && second.content() == 6);
}

void ATimeLimitAndTheNextGeneration() {
  Pair pair(1, milliseconds(300));
  Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1);
  EXPECT(receiver.IsDone(milliseconds(5000)) && receiver.content() == -1);
  const auto failure = pair.one.engine->inbox().failure(0);
  EXPECT(failure && failure->kind == FailureKind::kTimeout);
  pair.one.engine->inbox().Advance(1);
  EXPECT(!pair.one.engine->inbox().failure(0));
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 1, 5);  // late, of the old generation
  pair.zero.engine->inbox().Advance(1);
  Send(pair.zero, 1, KeyOf(0, 0, 0, 1), 0, 1, 6);
  Receiver next(pair.one, KeyOf(0, 0, 0, 1), 0, 1);
  EXPECT(next.IsDone(milliseconds(5000)) && next.content() == 6);
  EXPECT(pair.one.engine->inbox().stats().num_messages == 0);
}

// Rank 0 has ended a step, of which it still sends, and fails in the next one.
void AFailureOfALaterStepIsHeld() {
  Pair pair(1, seconds(60));
  Inbox& there = pair.zero.engine->inbox();
  Inbox& here = pair.one.engine->inbox();
  there.EndStep(0, 1, 2);
  pair.zero.engine->Report(0, "0\nValueError\n\nlater", 1);
  EXPECT(there.failure(0));
  Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1);
  Receiver next(pair.one, KeyOf(0, 1, 0), 0, 1);
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 1, 5, 64, 7, 1);
  Send(pair.zero, 1, KeyOf(0, 1, 0), 0, 1, 6, 64, 7, 2);  // of the step that failed
  EXPECT(receiver.IsDone(milliseconds(5000)) && receiver.content() == 5);
  EXPECT(!next.IsDone(milliseconds(100)) && !here.failure(0));
  here.EndStep(0, 1, 0);
  EXPECT(next.IsDone(milliseconds(5000)) && next.content() == -1);
  const auto failure = here.failure(0);
  EXPECT(failure && failure->text == "0\nValueError\n\nlater");
}

void AnEarlierStepCountsBeforeALaterOne() {
  Pair pair(1, seconds(60));
  Inbox& here = pair.one.engine->inbox();
  pair.one.engine->Report(0, "0\nValueError\n\nlater", 2);
  pair.one.engine->Report(0, "0\nValueError\n\nlatest", 3);
  pair.one.engine->Report(1, "0\nValueError\n\nof the next generation", 1);
  EXPECT(!here.failure(0));
  here.EndStep(0, 1, 0);
  pair.one.engine->Report(0, "0\nValueError\n\nin this step", 1);
  EXPECT(here.failure(0)->text.find("in this step") != std::string::npos);
  here.Advance(1);
  EXPECT(!here.failure(1));
  here.EndStep(0, 2, 0);  // of a generation that is over
  EXPECT(!here.failure(1));
  here.EndStep(1, 1, 0);
  EXPECT(here.failure(1)->text.find("of the next") != std::string::npos);
}

void AnotherLayoutIsRefused() {
  Pair pair(1, seconds(60));
  Send(pair.zero, 1, KeyOf(0, 0, 0), 0, 1, 5, 64, 8);
  Receiver receiver(pair.one, KeyOf(0, 0, 0), 0, 1);
  EXPECT(receiver.IsDone(milliseconds(5000)) && receiver.content() == -1);
  EXPECT(pair.one.engine->inbox().failure(0)->text.find("expected shards float32[2]") !=
         std::string::npos);
}

// Failures, new generations and closing, while receives come in on all devices.
void FailuresAtAnyTime() {
  constexpr int kDevices = 2;
  Pair pair(kDevices, seconds(60));
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int device = 0; device < kDevices; ++device) {
    threads.emplace_back([&, device] {
      for (uint64_t i = 0; i < 300; ++i) {
        Receiver receiver(pair.one, KeyOf(0, 0, i % 10, i / 10), device, kDevices);
        EXPECT(receiver.IsDone(milliseconds(30000)));
      }
      is_over = true;
    });
  }
  threads.emplace_back([&] {
    for (uint64_t generation = 0; !is_over; ++generation) {
      pair.one.engine->Report(generation, "1\nValueError\n\nbad");
      std::this_thread::sleep_for(milliseconds(1));
      pair.one.engine->inbox().Advance(generation + 1);
    }
  });
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace xla_pp

int main() {
  xla_pp::BoxesAreCopiedRunByRun();
  xla_pp::ManyMessagesInAnyOrder();
  xla_pp::LargeMessagesInSharedMemory();
  xla_pp::AReceiveFollowsTheWriting();
  xla_pp::DevicesGoOnWhenAllIsWritten();
  xla_pp::AMessageThatIsNotWrittenEnds();
  xla_pp::AllDevicesOrNone();
  xla_pp::PiecesOfSeveralSourcesMakeAShard();
  xla_pp::ADeathEndsEveryReceiveAlike();
  xla_pp::WhatOneDeviceGotTheOthersGetToo();
  xla_pp::ATimeLimitAndTheNextGeneration();
  xla_pp::AFailureOfALaterStepIsHeld();
  xla_pp::AnEarlierStepCountsBeforeALaterOne();
  xla_pp::AnotherLayoutIsRefused();
  xla_pp::FailuresAtAnyTime();
  std::puts("engine_test: all is well");
  // Threads that wait for work have no end; the process does not wait for them.
  std::fflush(stdout);
  std::_Exit(0);
}
