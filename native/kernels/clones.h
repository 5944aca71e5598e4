// SPDX-License-Identifier: Apache-2.0
// CLONES: compile a function for several processors; the one at hand is picked when the module is loaded.
//
// A cloned function is a plain loop over a range: what it calls must be ALWAYS_INLINE, and the split among threads is
// outside (threads.h), because GCC compiles the body of an OpenMP region for the lowest processor only.
#pragma once

// The clones are named by what a processor can do. Names of processors, such as arch=haswell, are taken for that one alone:
// every other, older or newer or AMD's, would get the lowest clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SINGA_LITE_SANITIZE)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else  // these know no levels; avx2 alone has no fused multiply-add
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define CLONES
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
// Behind a lambda's parameters: it is compiled for the processor of the cloned function that it is in.
#define INLINE_LAMBDA __attribute__((always_inline))
