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

enum class Op : int32_t { kSend = 0, kReceive = 1, kBegin = 2, kEnd = 3, kProduct = 4 };

// Makes XLA call the handler of an op for custom calls of this target. Returns what is
// wrong, or nothing. `get_api` is the address of xla::ffi::GetXlaFfiApi in the XLA that
// runs the programs.
std::string RegisterHandler(const void* get_api, const std::string& target, Op op);

}  // namespace xla_pp
