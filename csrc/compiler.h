/* compiler.h: refuses, in words, compilers that are too old for the C code, or not exact. */
#ifndef WAVEPE_COMPILER_H
#define WAVEPE_COMPILER_H

/* Older ones lack these: GCC 11 __builtin_shufflevector, and _Float16 on x86; clang 17 the names
 * x86-64-v3 and x86-64-v4 in __builtin_cpu_supports. */
#ifdef __CUDACC__ /* nvcc has limits of its own */
#define WPE_TOO_OLD 0
#elif defined(__apple_build_version__) /* Apple's 16 is LLVM 17, and its 17 is LLVM 19 */
#define WPE_TOO_OLD (__clang_major__ < 17)
#elif defined(__clang__)
#define WPE_TOO_OLD (__clang_major__ < 18)
#else
#define WPE_TOO_OLD (__GNUC__ < 12)
#endif
#if WPE_TOO_OLD
#error "wavepe needs GCC 12, clang 18, Apple's clang 17 or newer: choose one with CC=... CXX=..."
#endif
/* setup.py leaves such flags out of CFLAGS. A compiler's wrapper or configuration may add them. */
#if defined(__FAST_MATH__) || __FINITE_MATH_ONLY__ || defined(__ASSOCIATIVE_MATH__) || \
    defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "wavepe needs exact arithmetic: the compiler runs with -ffast-math or one of its parts"
#endif

#endif
