// Makes the ops of XLA programs known to XLA.
#pragma once

#include <string>

#include "abi.h"

namespace xla_pp {

// Makes XLA call the handler of an op for custom calls of this target. Returns what is
// wrong, or nothing. `get_api` is the address of xla::ffi::GetXlaFfiApi in the XLA that
// runs the programs.
std::string RegisterHandler(const void* get_api, const std::string& target, Op op);

}  // namespace xla_pp
