// Registers the ops of XLA programs with XLA.
#pragma once

#include <string>

#include "abi.h"
#include "xla/ffi/api/c_api.h"

namespace xla_pp {

// Makes XLA call the handler of an op for custom calls of this target. Returns an
// error, or nothing. `get_api` is the address of xla::ffi::GetXlaFfiApi in the XLA that
// runs the programs.
std::string RegisterHandler(const void* get_api, const std::string& target, Op op);

XLA_FFI_Handler* HandlerFor(Op op);

}  // namespace xla_pp
