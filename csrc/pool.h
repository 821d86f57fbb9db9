// Blocks of host memory that are used again.
//
// Messages are large and live for milliseconds: memory that is fresh from the system
// for each of them would cost more time, in page faults, than copying it.
#pragma once

#include <cstddef>

namespace xla_pp {

// Returns a block of at least `size` bytes.
char* TakeBlock(size_t size);
// Gives a block back that was taken with this size.
void GiveBlock(char* block, size_t size);

}  // namespace xla_pp
