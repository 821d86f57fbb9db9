// Threads for tasks that may block.
//
// The thread that completes the future of an op runs the rest of the op's program,
// perhaps up to a collective in which the program waits for other devices. So each
// completion needs a thread that nothing else waits for.
#pragma once

#include <functional>

namespace xla_pp {

// Runs a task on a thread of its own; threads are kept and used again.
void RunElsewhere(std::function<void()> task);

}  // namespace xla_pp
