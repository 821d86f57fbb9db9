// Calls of a loaded library that are led to other functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace xla_pp {

// Leads the calls that the library at this address makes of these functions to others.
// Returns how many of them it calls. Source of the tables: System V ABI, "Object
// Files", "Dynamic Linking" (ELF-64).
size_t RedirectCalls(uintptr_t base, const std::map<std::string, void*>& functions);

}  // namespace xla_pp
