// Memory of large values that is used again.
//
// XLA's CPU client takes the memory of every value, and of a program's temporary
// values, from the C library. That maps each large one by itself and unmaps it when it
// is freed, so every value has fresh pages, which cost more than to write them. In
// place of that, a freed block waits here for the next value of about its size.
//
// All blocks are the C library's own: whoever frees one elsewhere does no harm. No more
// are kept than were in use at once in one of the last steps, and a little. The largest
// are kept apart from the others, and next to nothing of them is to spare.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xla_pp {

// Keeps blocks of values from the least size on, in bytes; those from `large` on apart.
void KeepBlocks(size_t least, size_t large);

// As the C library's functions of these names, but with blocks that were freed before.
int PosixMemalign(void** out, size_t alignment, size_t size);
void* AlignedAlloc(size_t alignment, size_t size);
void Free(void* block);

// Steps that count: when XLA frees what a program had differs from step to step, and so
// does what is in use at once.
constexpr int kStepsOfBlocks = 32;

// Begins a step: blocks that so many steps have not used go back to the C library.
void BeginStepOfBlocks();
// Gives all blocks that wait back.
void DropBlocks();
// Returns how many bytes wait.
int64_t WaitingBytes();

}  // namespace xla_pp
