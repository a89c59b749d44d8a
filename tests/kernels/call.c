/* call.c: call kernels, and catch the signals that they raise. */
#include "check.h"
#include "frame.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { STACK = 1 << 16, SECONDS_OF_A_CALL = 120 };

sigjmp_buf check_escape;
static volatile sig_atomic_t in_call;

uint64_t processor_modes(void) {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & 0xffc0;
#elif defined(__aarch64__)
    uint64_t modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
#else
    return 0;
#endif
}

void set_processor_modes(uint64_t modes) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)modes);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(modes));
#else
    (void)modes;
#endif
}

static uint64_t modes_before;

/* Fill the stack with NaN. So a local of a kernel that is read before it is written is NaN. */
static __attribute__((noinline)) void dirty_stack(void) {
    uint16_t below[STACK / 2];
    for (int i = 0; i < STACK / 2; i++) below[i] = 0x7ff5;
    __asm__ volatile("" : : "r"(below) : "memory");
}

void enter_call(const wpe_kernels *k, ptrdiff_t entry) {
    if (k) count_call(entry);
    dirty_stack();
    modes_before = processor_modes();
    in_call = 1;
    alarm(SECONDS_OF_A_CALL);
}

int leave_call(void) {
    in_call = 0;
    const uint64_t modes = processor_modes();
    if (modes == modes_before) return 1;
    set_processor_modes(modes_before);
    fail("the processor's modes are %llx, and were %llx before the call", (unsigned long long)modes,
         (unsigned long long)modes_before);
    return 0;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)context;
    const char *name = number == SIGSEGV   ? "SIGSEGV"
                       : number == SIGBUS  ? "SIGBUS"
                       : number == SIGILL  ? "SIGILL"
                       : number == SIGFPE  ? "SIGFPE"
                       : number == SIGABRT ? "SIGABRT: a contract was broken"
                                           : "it did not return in time";
    const int within_call = in_call;
    in_call = 0;
    set_processor_modes(modes_before);
    if (number == SIGSEGV || number == SIGBUS)
        fail("%s at %p, %s", name, info->si_addr, describe_address(info->si_addr));
    else
        fail("%s", name);
    if (within_call) siglongjmp(check_escape, 1);
    printf("this signal came from the checker, not from a kernel\n");
    fflush(stdout);
    _exit(2);
}

void catch_signals(void) {
    const int caught[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGALRM};
    /* SA_NODEFER: on_signal ends with a jump, and the signal must stay deliverable after it */
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) sigaction(caught[i], &action, NULL);
    modes_before = processor_modes();
}
