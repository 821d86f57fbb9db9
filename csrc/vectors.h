// Marks for loops over many values.
#pragma once

// The best version for the processor is chosen when the library is loaded. The third
// level of x86-64 is AVX2 and multiplications with additions in one; older compilers do
// not know it.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#if __GNUC__ >= 12 && !defined(__clang__)
#define XPP_VECTORS \
  __attribute__((target_clones("avx512f", "arch=x86-64-v3", "default")))
#else
#define XPP_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define XPP_VECTORS
#endif

// A part of such loops.
#define XPP_INLINE inline __attribute__((always_inline))
