// Fresh memory by large pages.
//
// The first touch of each page of fresh memory costs more than to copy what it holds. A
// large page takes the place of 512 small ones.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace xla_pp {

// Lets the system take large pages where nothing of the memory was touched yet, if it
// has such pages. Only whole ones are taken, so no memory around it is.
inline void AskForLargePages(void* data, size_t size) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + size) / kPage * kPage;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
}

}  // namespace xla_pp
