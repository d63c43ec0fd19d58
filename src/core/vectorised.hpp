// How loops over numbers use the vectors of the processor that they run on.
#pragma once

// A function with this is compiled for several generations of a processor and chosen when the library
// is loaded, which takes glibc (musl has no ifunc); on aarch64 the baseline has vectors already.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(UNISONO_SANITIZE)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif
// What it calls has to become a part of it, or would stay compiled for the oldest generation.
#define INLINED inline __attribute__((always_inline))
