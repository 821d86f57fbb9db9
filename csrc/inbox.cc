#include "inbox.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "executor.h"
#include "recorder.h"

namespace xla_pp {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr auto kLookEvery = std::chrono::milliseconds(200);
constexpr auto kUnknownEdgeGrace = std::chrono::seconds(3);

std::string Text(Seconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", time.count());
  return text;
}

// Lets `fill` write the values of a receive and completes it: here if its op still
// runs, as the op then waits for this call.
void Complete(Request request, const std::function<void(const Request&)>& fill) {
  if (request.is_running) {
    fill(request);
    request.done();
    return;
  }
  RunElsewhere([request = std::move(request), fill] {
    std::fesetenv(&request.mode);
    fill(request);
    request.done();
  });
}

// Writes what stands for values that did not come.
void FillWithout(const Request& request) {
  for (const Result& result : request.results) {
    if (result.size) std::memset(result.out, result.filling, result.size);
  }
}

}  // namespace

void Discard(Request request) { Complete(std::move(request), FillWithout); }

Inbox::Inbox(int rank, int num_devices, Seconds timeout, OnFailure on_failure)
    : rank_(rank),
      num_devices_(num_devices),
      timeout_(timeout),
      on_failure_(std::move(on_failure)) {}

Inbox::~Inbox() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_filling_ == 0; });
}

void Inbox::Receive(Request request) {
  Tasks tasks;
  request.is_running = true;
  std::fegetenv(&request.mode);
  const Key key = request.key;
  {
    std::lock_guard lock(mutex_);
    ReceiveLocked(std::move(request), tasks);
    const auto found = groups_.find(key);
    if (found != groups_.end()) {
      for (Request& waiting : found->second.waiting) waiting.is_running = false;
    }
  }
  for (auto& task : tasks) task();
}

void Inbox::ReceiveLocked(Request request, Tasks& tasks) {
  const Key key = request.key;
  if (key.generation < generation_) {
    tasks.push_back([request = std::move(request)] { Discard(request); });
    return;
  }
  edges_.insert(key.edge);
  const auto now = Clock::now();
  const auto [found, is_new] = groups_.try_emplace(key);
  Group& group = found->second;
  if (is_new) group.since = now;
  if (group.num_received++ == 0) {
    group.waiting_since = now;
    group.num_left = std::make_shared<int>(num_devices_);
    group.layout = request.layout;
    group.part_sizes = request.part_sizes;
  }
  group.waiting.push_back(std::move(request));
  const auto gone = lost_.find(key.edge.source);
  if (gone != lost_.end() && !AllArrived(group) && !failures_.count(key.generation)) {
    FailLocked(key.generation, FailureKind::kError,
               LostText(key, gone->second, Seconds(0)), tasks);
    return;
  }
  UpdateLocked(found, tasks);
}

void Inbox::Deliver(Message message) {
  // Others arrive when they are written.
  if (!message.bytes.block()) TheRecorder().Note(Event::kArrived, message.key);
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    if (message.key.generation < generation_) return;
    const auto [found, is_new] = groups_.try_emplace(message.key);
    if (is_new) found->second.since = Clock::now();
    auto part = std::make_shared<Part>();
    part->layout = std::move(message.layout);
    part->bytes = std::move(message.bytes);
    part->delivered_ns = NowNs();
    found->second.parts.emplace(message.device, std::move(part));
    if (found->second.num_received) UpdateLocked(found, tasks);
  }
  for (auto& task : tasks) task();
}

bool Inbox::AllArrived(const Group& group) {
  for (size_t device = 0; device < group.part_sizes.size(); ++device) {
    const bool sends = group.part_sizes[device] != kNothing;
    if (sends && !group.parts.count(static_cast<int32_t>(device))) return false;
  }
  return true;
}

// Returns the error of the messages of a group that is being received.
std::optional<std::string> Inbox::FaultOf(const Key& key, const Group& group) const {
  for (const auto& [device, part] : group.parts) {
    const bool is_known =
        device >= 0 && static_cast<size_t>(device) < group.part_sizes.size();
    if (part->layout == group.layout && is_known &&
        part->bytes.size() == group.part_sizes[device]) {
      continue;
    }
    return "recv " + Describe(key) + " from " + RankName(key.edge.source) + " on " +
           RankName(rank_) + ": expected " + Describe(group.layout) + ", got " +
           Describe(part->layout) +
           ". Use the same model, split and schedule on both ranks.";
  }
  return std::nullopt;
}

std::string Inbox::LostText(const Key& key, const std::string& reason,
                            Seconds waited) const {
  return "recv " + Describe(key) + ": " +
         GoneText(key.edge.source, reason,
                  RankName(rank_) + " after " + Text(waited) + " s");
}

std::string Inbox::LateText(const Key& key, Seconds waited) const {
  return RankName(rank_) + " waited " + Text(waited) + " s for " +
         RankName(key.edge.source) + ": recv " + Describe(key) +
         ". See whether that rank still runs, or set TORCH_XLA_PP_TIMEOUT_S to more "
         "seconds.";
}

// Answers the receives of a group if it is complete, wrong or of a failed generation.
void Inbox::UpdateLocked(Groups::iterator found, Tasks& tasks) {
  const Key key = found->first;
  Group& group = found->second;
  if (!group.is_whole && !failures_.count(key.generation)) {
    if (const auto fault = FaultOf(key, group)) {
      FailLocked(key.generation, FailureKind::kError, *fault, tasks);
      return;
    }
    if (!AllArrived(group)) return;
    group.is_whole = true;
  }
  AnswerLocked(key, group, tasks);
  if (group.num_received == num_devices_) groups_.erase(found);
}

void Inbox::AnswerLocked(const Key& key, Group& group, Tasks& tasks) {
  for (Request& request : group.waiting) {
    ++num_filling_;
    auto parts = std::make_shared<Parts>();
    if (group.is_whole) *parts = group.parts;
    tasks.push_back([this, key, request = std::move(request), parts,
                     is_whole = group.is_whole, num_left = group.num_left] {
      Complete(request, [=](const Request& request) {
        is_whole ? Fill(request, *parts) : FillWithout(request);
        parts->clear();  // the rest of the program may take long
        CountFilled(key, *num_left);
      });
    });
  }
  group.waiting.clear();
}

void Inbox::Fill(const Request& request, const Parts& parts) {
  const auto since = Clock::now();
  if (Copy(request, parts, [&] { return IsOver(request.key, since); })) return;
  FillWithout(request);
  FailUnwritten(request.key, since);
}

bool Inbox::Copy(const Request& request, const Parts& parts,
                 const std::function<bool()>& is_over) {
  for (const Result& result : request.results) {
    if (result.is_padded) std::memset(result.out, 0, result.size);
  }
  for (const Piece& piece : request.pieces) {
    if (!piece.box.size()) continue;
    const Bytes& bytes = parts.at(piece.source)->bytes;
    size_t offset = piece.offset;
    for (const Box& part : PartsOf(piece.box, kSharedStep)) {
      const size_t end = offset + part.size();
      if (bytes.block() && !bytes.block()->Await(end, is_over)) return false;
      Unpack(bytes.data() + offset, part, request.results[piece.result].out);
      offset = end;
    }
  }
  // No device goes on before the others can.
  for (const auto& [device, part] : parts) {
    const SharedBlock* block = part->bytes.block();
    if (!block) continue;
    if (!block->Await(part->bytes.size(), is_over)) return false;
    const int64_t written_ns = block->head->written_ns;
    TheRecorder().Note(Event::kArrived, request.key, 0,
                       std::max(part->delivered_ns, written_ns));
  }
  return true;
}

bool Inbox::IsOver(const Key& key, Clock::time_point since) const {
  std::lock_guard lock(mutex_);
  return key.generation < generation_ || failures_.count(key.generation) ||
         lost_.count(key.edge.source) || Clock::now() - since >= timeout_;
}

void Inbox::FailUnwritten(const Key& key, Clock::time_point since) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    const Seconds waited = Clock::now() - since;
    const auto gone = lost_.find(key.edge.source);
    if (gone != lost_.end()) {
      FailLocked(key.generation, FailureKind::kError,
                 LostText(key, gone->second, waited), tasks);
    } else {
      FailLocked(key.generation, FailureKind::kTimeout, LateText(key, waited), tasks);
    }
  }
  for (auto& task : tasks) task();
}

void Inbox::CountFilled(const Key& key, int& num_left) {
  std::lock_guard lock(mutex_);
  --num_filling_;
  if (--num_left == 0 && key.generation >= generation_) {
    num_completed_[key.generation] += 1;
  }
  changed_.notify_all();
}

void Inbox::Open(const Edge& edge) {
  std::lock_guard lock(mutex_);
  edges_.insert(edge);
}

void Inbox::Fail(uint64_t generation, const Failure& failure) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    FailLocked(generation, failure, tasks);
  }
  for (auto& task : tasks) task();
}

void Inbox::EndStep(uint64_t generation, uint64_t num_ended, uint64_t num_sent) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    if (generation != generation_) return;
    num_ended_ = num_ended;
    num_sent_ = num_sent;
    const auto held = held_.find(generation);
    if (held != held_.end() && held->second.num_ended <= num_ended) {
      const Failure failure = held->second;
      FailLocked(generation, failure, tasks);
    }
  }
  for (auto& task : tasks) task();
}

bool Inbox::IsVoid(const Message& message) const {
  std::lock_guard lock(mutex_);
  const uint64_t generation = message.key.generation;
  const bool has_ended = generation == generation_ && message.order < num_sent_;
  return failures_.count(generation) && !has_ended;
}

uint64_t Inbox::NumEndedLocked(uint64_t generation) const {
  return generation == generation_ ? num_ended_ : 0;
}

void Inbox::FailLocked(uint64_t generation, FailureKind kind, const std::string& text,
                       Tasks& tasks) {
  FailLocked(generation, {kind, text, NumEndedLocked(generation)}, tasks);
}

void Inbox::FailLocked(uint64_t generation, const Failure& failure, Tasks& tasks) {
  if (generation < generation_ || failures_.count(generation)) return;
  const bool is_later = failure.num_ended > NumEndedLocked(generation);
  const auto held = held_.find(generation);
  if (is_later && held != held_.end() && held->second.num_ended <= failure.num_ended) {
    return;
  }
  (is_later ? held_ : failures_).insert_or_assign(generation, failure);
  tasks.push_back([=] { on_failure_(generation, failure); });
  if (is_later) return;
  for (auto it = groups_.begin(); it != groups_.end();) {
    const auto next = std::next(it);
    if (it->first.generation == generation && it->second.num_received) {
      UpdateLocked(it, tasks);
    }
    it = next;
  }
  tasks.push_back([this] { changed_.notify_all(); });
}

void Inbox::Lose(int peer, const std::string& reason) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    if (!lost_.try_emplace(peer, reason).second) return;
    for (const auto& [key, group] : groups_) {
      if (key.edge.source != peer || group.is_whole || group.waiting.empty()) continue;
      const Seconds waited = Clock::now() - group.waiting_since;
      FailLocked(key.generation, FailureKind::kError, LostText(key, reason, waited),
                 tasks);
      break;
    }
  }
  for (auto& task : tasks) task();
}

void Inbox::Advance(uint64_t generation) {
  Tasks tasks;
  {
    std::lock_guard lock(mutex_);
    if (generation <= generation_) return;
    while (!groups_.empty() && groups_.begin()->first.generation < generation) {
      const auto found = groups_.begin();
      AnswerLocked(found->first, found->second, tasks);
      groups_.erase(found);
    }
    failures_.erase(failures_.begin(), failures_.lower_bound(generation));
    held_.erase(held_.begin(), held_.lower_bound(generation));
    num_completed_.erase(num_completed_.begin(),
                         num_completed_.lower_bound(generation));
    generation_ = generation;
    num_ended_ = num_sent_ = 0;
  }
  for (auto& task : tasks) task();
}

Clock::time_point Inbox::Expire() {
  Tasks tasks;
  const auto now = Clock::now();
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, group] : groups_) {
      if (failures_.count(key.generation)) continue;
      const Seconds waited = now - group.waiting_since;
      if (!group.waiting.empty() && waited >= timeout_) {
        FailLocked(key.generation, FailureKind::kTimeout, LateText(key, waited), tasks);
        break;
      }
      if (!edges_.count(key.edge) && now - group.since >= kUnknownEdgeGrace) {
        FailLocked(key.generation, FailureKind::kError,
                   RankName(rank_) + " got " + Describe(key) + " from " +
                       RankName(key.edge.source) +
                       ": expected messages of known edges only, and this rank "
                       "receives nothing of that kind. Build the same pipeline on "
                       "every rank.",
                   tasks);
        break;
      }
    }
  }
  for (auto& task : tasks) task();
  return now + kLookEvery;
}

bool Inbox::Settle(uint64_t generation, uint64_t count, Seconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] {
    return failures_.count(generation) || generation < generation_ ||
           num_completed_[generation] >= count;
  });
  return !failures_.count(generation) && generation >= generation_ &&
         num_completed_[generation] >= count;
}

std::optional<Failure> Inbox::failure(uint64_t generation) const {
  std::lock_guard lock(mutex_);
  const auto found = failures_.find(generation);
  if (found == failures_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string> Inbox::lost(int peer) const {
  std::lock_guard lock(mutex_);
  const auto found = lost_.find(peer);
  if (found == lost_.end()) return std::nullopt;
  return found->second;
}

InboxStats Inbox::stats() const {
  std::lock_guard lock(mutex_);
  InboxStats stats;
  for (const auto& [key, group] : groups_) {
    for (const auto& [device, part] : group.parts) {
      stats.held_bytes += static_cast<int64_t>(part->bytes.size());
      stats.num_messages += 1;
    }
    stats.num_waiting += static_cast<int64_t>(group.waiting.size());
  }
  return stats;
}

}  // namespace xla_pp
