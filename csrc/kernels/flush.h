/* flush.h: a mode of the processor in which subnormal operands and results count as zero.
 *
 * The tails of wavelets are subnormal in float32, and each subnormal costs an Intel CPU about 150
 * cycles. After the call the caller's control word is restored: its rounding mode, its exception
 * flags and its own choice about subnormals. The code that runs in this mode must be a function
 * that is not inlined, because compilers may move arithmetic across the switch. */
#ifndef WAVEPE_FLUSH_H
#define WAVEPE_FLUSH_H

#include "simd.h"

#if defined(__SSE__)
typedef uint32_t float_mode;
INLINE float_mode flush_subnormals(void) {
    float_mode mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040); /* FTZ flushes results, DAZ operands */
    return mode;
}
INLINE void restore_subnormals(float_mode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
INLINE float_mode flush_subnormals(void) {
    float_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"(mode | (1u << 24)) : "memory"); /* FZ flushes both */
    return mode;
}
INLINE void restore_subnormals(float_mode mode) {
    __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory");
}
#else
typedef int float_mode;
INLINE float_mode flush_subnormals(void) { return 0; }
INLINE void restore_subnormals(float_mode mode) { (void)mode; }
#endif

/* Make one call in this mode. Requires: the called function is NOINLINE. */
#define FLUSHED(call)                         \
    do {                                      \
        float_mode mode = flush_subnormals(); \
        call;                                 \
        restore_subnormals(mode);             \
    } while (0)

#endif
