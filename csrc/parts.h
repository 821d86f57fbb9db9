// Work of an op cut into parts, each for a thread of XLA's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace xla_pp {

// A part of something that has a length.
struct Range {
  int64_t begin;
  int64_t size;
};

// Sets how many parts work has at most: the cores for one device.
void SetMaxParts(int64_t max_parts);

int64_t MaxParts();

// Calls `run` with a range for each part of `length`, the first one on this thread.
// What `run` reads must live until the future is there, as buffers of the op do.
//
// `operations` says how much there is to do, in operations of which 2^21 are worth a
// thread of their own.
template <typename Run>
xla::ffi::Future RunParts(xla::ffi::ThreadPool pool, int64_t length, int64_t operations,
                          Run run) {
  const int64_t worth = std::min({operations >> 21, pool.num_threads(), MaxParts()});
  const int64_t num_parts = std::clamp<int64_t>(length, 1, std::max<int64_t>(worth, 1));
  auto promise = std::make_shared<xla::ffi::Promise>();
  auto num_left = std::make_shared<std::atomic<int64_t>>(num_parts);
  xla::ffi::Future future(*promise);
  const auto run_part = [=](int64_t part) {
    const int64_t begin = length * part / num_parts;
    run(Range{begin, length * (part + 1) / num_parts - begin});
    if (--*num_left == 0) promise->SetAvailable();
  };
  for (int64_t part = 1; part < num_parts; ++part) {
    pool.Schedule([run_part, part] { run_part(part); });
  }
  run_part(0);
  return future;
}

}  // namespace xla_pp
