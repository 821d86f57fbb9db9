// What the ops of XLA programs find by number: XLA passes them nothing but buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine.h"

namespace xla_pp {

int64_t AddEngine(std::shared_ptr<Engine> engine);
// Returns null for one that was removed.
std::shared_ptr<Engine> FindEngine(int64_t id);
std::shared_ptr<Engine> RemoveEngine(int64_t id);

// Makes XLA call the send or the receive handler for custom calls of this target.
// Returns what is wrong, or nothing. `get_api` is the address of
// xla::ffi::GetXlaFfiApi in the XLA that runs the programs.
std::string RegisterHandler(const void* get_api, const std::string& target,
                            bool is_receive);

}  // namespace xla_pp
