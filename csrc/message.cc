#include "message.h"

namespace xla_pp {

std::string RankName(int rank) { return "rank " + std::to_string(rank); }

std::string GoneText(int peer, const std::string& reason, const std::string& seen) {
  const std::string name = RankName(peer);
  return name + " is gone: " + reason + " (seen on " + seen +
         "). Look for the first error of " + name + ".";
}

std::string Describe(const Key& key) {
  const std::string stage = std::to_string(key.edge.stage);
  const std::string microbatch = std::to_string(key.microbatch);
  return stage + kDirections[key.edge.direction] + microbatch + " (stage " + stage +
         ", microbatch " + microbatch + ", from stage " +
         std::to_string(key.edge.origin) + ")";
}

bool operator==(const Layout& a, const Layout& b) {
  return a.num_devices == b.num_devices && a.digest == b.digest;
}

std::string Describe(const Layout& layout) {
  const bool is_long = layout.text.size() > kMaxText;
  return "shards " + layout.text.substr(0, kMaxText) + (is_long ? "..." : "") + " on " +
         std::to_string(layout.num_devices) + " devices (layout " +
         std::to_string(layout.digest) + ")";
}

}  // namespace xla_pp
