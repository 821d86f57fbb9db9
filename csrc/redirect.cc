#include "redirect.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace xla_pp {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kCall = R_X86_64_JUMP_SLOT;
#elif defined(__aarch64__)
constexpr uint32_t kCall = R_AARCH64_JUMP_SLOT;
#else
constexpr uint32_t kCall = UINT32_MAX;
#endif

// The parts of a loaded library that name the functions it calls.
struct Tables {
  uintptr_t base = 0;
  const Elf64_Rela* calls = nullptr;
  size_t num_calls = 0;
  const Elf64_Sym* symbols = nullptr;
  const char* names = nullptr;
  // What the loader has made read-only.
  uintptr_t fixed_begin = 0, fixed_end = 0;
};

int FindTables(dl_phdr_info* info, size_t, void* data) {
  auto& tables = *static_cast<Tables*>(data);
  if (info->dlpi_addr != tables.base) return 0;
  const Elf64_Dyn* entry = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const uintptr_t begin = tables.base + part.p_vaddr;
    if (part.p_type == PT_DYNAMIC) entry = reinterpret_cast<const Elf64_Dyn*>(begin);
    if (part.p_type == PT_GNU_RELRO) {
      tables.fixed_begin = begin;
      tables.fixed_end = begin + part.p_memsz;
    }
  }
  // Some loaders leave addresses as they are in the file.
  const auto address = [&](uintptr_t found) {
    return found < tables.base ? tables.base + found : found;
  };
  for (; entry && entry->d_tag != DT_NULL; ++entry) {
    const uintptr_t value = entry->d_un.d_ptr;
    if (entry->d_tag == DT_JMPREL) {
      tables.calls = reinterpret_cast<const Elf64_Rela*>(address(value));
    } else if (entry->d_tag == DT_PLTRELSZ) {
      tables.num_calls = value / sizeof(Elf64_Rela);
    } else if (entry->d_tag == DT_SYMTAB) {
      tables.symbols = reinterpret_cast<const Elf64_Sym*>(address(value));
    } else if (entry->d_tag == DT_STRTAB) {
      tables.names = reinterpret_cast<const char*>(address(value));
    }
  }
  return 1;
}

// Writes a pointer, on a page that may be read-only, and leaves the page as it was.
bool Write(const Tables& tables, uintptr_t place, void* value) {
  const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* page = reinterpret_cast<void*>(place / page_size * page_size);
  if (mprotect(page, page_size, PROT_READ | PROT_WRITE)) return false;
  __atomic_store_n(reinterpret_cast<void**>(place), value, __ATOMIC_RELEASE);
  const bool is_fixed = place >= tables.fixed_begin && place < tables.fixed_end;
  if (is_fixed) mprotect(page, page_size, PROT_READ);
  return true;
}

}  // namespace

size_t RedirectCalls(uintptr_t base, const std::map<std::string, void*>& functions) {
  Tables tables;
  tables.base = base;
  dl_iterate_phdr(FindTables, &tables);
  if (!tables.calls || !tables.symbols || !tables.names) return 0;
  size_t count = 0;
  for (size_t i = 0; i < tables.num_calls; ++i) {
    const auto& call = tables.calls[i];
    if (ELF64_R_TYPE(call.r_info) != kCall) continue;
    const auto& symbol = tables.symbols[ELF64_R_SYM(call.r_info)];
    const auto found = functions.find(tables.names + symbol.st_name);
    if (found != functions.end()) {
      count += Write(tables, base + call.r_offset, found->second);
    }
  }
  return count;
}

}  // namespace xla_pp
