/* flush.h: subnormals counted as zero, in operands and results.
 *
 * The tails of wavelets are subnormal float32, and each one costs an Intel CPU about 150 cycles.
 * The caller's control word is put back, with its rounding mode, exception flags and its own choice
 * about subnormals. What runs between is a function of its own, which is not inlined: compilers
 * may move arithmetic across the switch. */
#ifndef WAVEPE_FLUSH_H
#define WAVEPE_FLUSH_H

#include "simd.h"

#if defined(__SSE__)
typedef uint32_t float_mode;
INLINE float_mode flush_subnormals(void) {
    float_mode mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040); /* FTZ: results; DAZ: operands */
    return mode;
}
INLINE void restore_subnormals(float_mode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
INLINE float_mode flush_subnormals(void) {
    float_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"(mode | (1u << 24)) : "memory"); /* FZ: both */
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

/* Makes one call of a function that is not inlined. */
#define FLUSHED(call)                         \
    do {                                      \
        float_mode mode = flush_subnormals(); \
        call;                                 \
        restore_subnormals(mode);             \
    } while (0)

#endif
