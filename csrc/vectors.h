// Marks for loops over many values.
#pragma once

// The best version for the processor is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define XPP_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define XPP_VECTORS
#endif

// A part of such loops.
#define XPP_INLINE inline __attribute__((always_inline))
