// Copies rectangular parts of dense arrays to and from messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace xla_pp {

// A part of an array: runs of bytes at regular distances. In a message the runs follow
// one another.
struct Box {
  struct Level {
    size_t count = 0;
    size_t distance = 0;  // in bytes
  };
  size_t offset = 0;          // of the first run
  size_t run = 0;             // bytes
  std::vector<Level> levels;  // outermost first

  size_t size() const {
    size_t size = run;
    for (const Level& level : levels) size *= level.count;
    return size;
  }
};

// Calls `copy` with the place of each run in the array and in the message.
template <typename Copy>
void ForEachRun(const Box& box, const Copy& copy) {
  if (!box.size()) return;
  std::vector<size_t> index(box.levels.size(), 0);
  size_t place = box.offset;
  for (size_t done = 0;; done += box.run) {
    copy(place, done);
    size_t level = box.levels.size();
    for (; level > 0; --level) {
      const Box::Level& current = box.levels[level - 1];
      place += current.distance;
      if (++index[level - 1] < current.count) break;
      place -= current.distance * current.count;
      index[level - 1] = 0;
    }
    if (level == 0) return;
  }
}

inline void Pack(const char* array, const Box& box, char* message) {
  ForEachRun(box, [&](size_t place, size_t done) {
    std::memcpy(message + done, array + place, box.run);
  });
}

inline void Unpack(const char* message, const Box& box, char* array) {
  ForEachRun(box, [&](size_t place, size_t done) {
    std::memcpy(array + place, message + done, box.run);
  });
}

// Cuts a box into ones of at most so many bytes, in the order of the message.
inline std::vector<Box> PartsOf(const Box& box, size_t most) {
  if (box.size() <= most) return {box};
  std::vector<Box> parts;
  if (box.levels.empty()) {
    for (size_t done = 0; done < box.run; done += most) {
      parts.push_back({box.offset + done, std::min(most, box.run - done), {}});
    }
    return parts;
  }
  const auto [count, distance] = box.levels[0];
  const size_t size = box.size() / count;
  const size_t step = std::max<size_t>(1, most / size);
  for (size_t i = 0; i < count; i += step) {
    Box part = box;
    part.offset += i * distance;
    part.levels[0].count = std::min(step, count - i);
    if (part.levels[0].count == 1) part.levels.erase(part.levels.begin());
    for (Box& each : PartsOf(part, most)) parts.push_back(std::move(each));
  }
  return parts;
}

}  // namespace xla_pp
