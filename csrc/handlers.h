// Registers the ops of XLA programs with XLA.
#pragma once

#include <string>

#include "abi.h"

namespace xla_pp {

// Makes XLA call the handler of an op for custom calls of this target. Returns an
// error, or nothing. `get_api` is the address of xla::ffi::GetXlaFfiApi in the XLA that
// runs the programs.
std::string RegisterHandler(const void* get_api, const std::string& target, Op op);

// Returns the handler of an op, an XLA_FFI_Handler*, to be registered elsewhere.
const void* HandlerOf(Op op);

}  // namespace xla_pp
