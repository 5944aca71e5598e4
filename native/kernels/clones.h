// SPDX-License-Identifier: Apache-2.0
// CLONES: compile a function for several processors; the one at hand is picked when the module is loaded.
//
// A cloned function is a plain loop over a range: what it calls must be ALWAYS_INLINE, and the split among threads lies
// outside (threads.h), because GCC compiles the body of an OpenMP region for the lowest processor only.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SINGA_LITE_SANITIZE)
#define CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define CLONES
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
// Behind a lambda's parameters: it is compiled for the processor of the cloned function that it is in.
#define INLINE_LAMBDA __attribute__((always_inline))
