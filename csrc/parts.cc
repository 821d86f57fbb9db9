#include "parts.h"

namespace xla_pp {
namespace {

std::atomic<int64_t> the_max_parts{1};

}  // namespace

void SetMaxParts(int64_t max_parts) { the_max_parts = max_parts; }

int64_t MaxParts() { return the_max_parts; }

}  // namespace xla_pp
