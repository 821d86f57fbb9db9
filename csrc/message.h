// Messages between two ranks: names, layouts and bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "abi.h"
#include "pool.h"
#include "shared.h"

namespace xla_pp {

struct GiveBack {
  size_t size = 0;
  const SharedBlock* block = nullptr;

  void operator()(char* data) const {
    if (block) {
      block->Free();
    } else {
      GiveBlock(data, size);
    }
  }
};

// A block of host memory with one owner.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(size_t size) : data_(TakeBlock(size), GiveBack{size}), size_(size) {}
  // Of a block that other processes see, which is freed with the bytes.
  Bytes(const SharedBlock* block, size_t size)
      : data_(block->data(), GiveBack{size, block}), size_(size) {}

  char* data() { return data_.get(); }
  const char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  // Null if no other process sees the bytes.
  const SharedBlock* block() const { return data_.get_deleter().block; }
  // Forgets the bytes, which the reader of their block frees.
  void Leave() {
    block()->Leave();
    data_.release();
    size_ = 0;
  }

 private:
  std::unique_ptr<char, GiveBack> data_;
  size_t size_ = 0;
};

// The values that one stage consumes and another one makes.
struct Edge {
  int32_t source = 0;     // group rank of the sender
  int32_t direction = 0;  // see kDirections
  int32_t stage = 0;      // index of the stage that consumes them
  int32_t origin = 0;     // index of the stage that makes them

  bool operator<(const Edge& other) const {
    return std::tie(source, direction, stage, origin) <
           std::tie(other.source, other.direction, other.stage, other.origin);
  }
};

// One message. Equal names within a generation differ in their number: the
// nth receive of a name gets the nth send of it, whatever the order of arrival.
struct Key {
  uint64_t generation = 0;
  Edge edge;
  int32_t microbatch = 0;
  uint64_t number = 0;

  bool operator<(const Key& other) const {
    return std::tie(generation, edge, microbatch, number) <
           std::tie(other.generation, other.edge, other.microbatch, other.number);
  }
};

// Returns e.g. "rank 2".
std::string RankName(int rank);
// Returns the end of an error about a peer that sends and takes nothing any more.
std::string GoneText(int peer, const std::string& reason, const std::string& seen);
// Returns e.g. "2F0 (stage 2, microbatch 0, from stage 1)".
std::string Describe(const Key& key);

constexpr size_t kMaxText = 512;

// The layout on which both sides of a message must agree.
struct Layout {
  int32_t num_devices = 0;
  uint64_t digest = 0;  // of global shapes, dtypes and shardings
  // Dtypes and shapes of one device's shards, for errors only; a long one is cut.
  std::string text;
};

bool operator==(const Layout& a, const Layout& b);
std::string Describe(const Layout& layout);

// The part of a message that one device of the sender contributes.
struct Message {
  Key key;
  int32_t device = 0;
  uint64_t order = 0;  // among what the device sends in the generation, from 0
  Layout layout;
  Bytes bytes;
};

}  // namespace xla_pp
