// Functions that the compiler builds for several instruction sets; the loader selects one.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define QG_CLONES __attribute__((target_clones("default", "avx2,fma", "avx512f")))
#else
#define QG_CLONES
#endif

#define QG_BODY inline __attribute__((always_inline))

// Before a loop: no iteration reads what another one writes.
#if defined(__clang__)
#define QG_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define QG_INDEPENDENT _Pragma("GCC ivdep")
#endif
