/* faults.c: make the nth write below a folder fail, or send a signal right before it. For
 * faults.py.
 *
 * It works on Linux on x86-64. seccomp turns each system call that changes files into SIGSYS. The
 * handler counts the call, and then makes it or lets it fail. So the writes of libraries count like
 * our own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

/* The filter allows the system calls of this function only. */
long faults_call(long number, long a, long b, long c, long d, long e, long f);
extern const char faults_called[];
__asm__(
    ".globl faults_call\n.globl faults_called\n.hidden faults_called\nfaults_call:\n"
    "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\n"
    "mov %r9, %r8\nmov 8(%rsp), %r9\nsyscall\nfaults_called:\nret\n");

enum place { FD, PATH, AT, RENAME, OPEN, OPENAT }; /* where the call's arguments name the file */
static const struct {
    int number;
    enum place place;
    int grows; /* 1: needs space on the disk; -1: frees space */
    const char *name;
} CALLS[] = {
    {SYS_write, FD, 1, "write"},
    {SYS_writev, FD, 1, "writev"},
    {SYS_pwrite64, FD, 1, "pwrite"},
    {SYS_sendfile, FD, 1, "sendfile"},
    {SYS_copy_file_range, FD, 1, "copy_file_range"},
    {SYS_fallocate, FD, 1, "fallocate"},
    {SYS_ftruncate, FD, 0, "ftruncate"},
    {SYS_fsync, FD, 0, "fsync"},
    {SYS_open, OPEN, 1, "open"},
    {SYS_openat, OPENAT, 1, "open"},
    {SYS_mkdir, PATH, 1, "mkdir"},
    {SYS_mkdirat, AT, 1, "mkdir"},
    {SYS_link, RENAME, 1, "link"},
    {SYS_linkat, RENAME, 1, "link"},
    {SYS_rename, PATH, 0, "rename"},
    {SYS_renameat, AT, 0, "rename"},
    {SYS_renameat2, AT, 0, "rename"},
    {SYS_unlink, PATH, -1, "unlink"},
    {SYS_unlinkat, AT, -1, "unlink"},
    {SYS_rmdir, PATH, -1, "rmdir"},
};
enum { COUNT = sizeof CALLS / sizeof *CALLS };

static char folder[PATH_MAX];
static int wanted, fault, events; /* number of the event that meets the fault; fault; count */
static char last[PATH_MAX + 64];

/* Set `path` to the path that a call changes, or to "" if it does not lie below the folder. */
static void path_of(int call, const greg_t *regs, char *path) {
    const long a = regs[REG_RDI], b = regs[REG_RSI], c = regs[REG_RDX];
    const char *given = "";
    long at = AT_FDCWD;
    path[0] = 0;
    switch (CALLS[call].place) {
        case FD:
            at = CALLS[call].number == SYS_copy_file_range ? c : a;
            break;
        case PATH:
            given = (const char *)a;
            break;
        case RENAME: /* a new name for a file elsewhere */
            given = (const char *)(CALLS[call].number == SYS_link ? b : regs[REG_R10]);
            break;
        case AT:
            at = a, given = (const char *)b;
            break;
        case OPEN:
            if (!(b & O_CREAT)) return;
            given = (const char *)a;
            break;
        case OPENAT:
            if (!(c & O_CREAT)) return;
            at = a, given = (const char *)b;
            break;
    }
    if (given[0] != '/') {
        char link[64];
        snprintf(link, sizeof link, (int)at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d",
                 (int)at);
        const long length = readlink(link, path, PATH_MAX - 1);
        if (length < 0 || path[0] != '/') {
            path[0] = 0;
            return;
        }
        path[length] = 0;
        if (given[0]) strncat(strncat(path, "/", 2), given, PATH_MAX - 2 - strlen(path));
    } else {
        strncpy(path, given, PATH_MAX - 1)[PATH_MAX - 1] = 0;
    }
    const size_t length = strlen(folder);
    if (strncmp(path, folder, length) || path[length] != '/') path[0] = 0;
}

static void on_call(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    char path[PATH_MAX];
    int call = 0, error = 0;
    (void)number;
    while (call < COUNT && CALLS[call].number != info->si_syscall) call++;
    if (call < COUNT) path_of(call, regs, path);
    if (call < COUNT && path[0]) {
        events++;
        if (events <= wanted || !wanted)
            snprintf(last, sizeof last, "%s %s", CALLS[call].name, path + strlen(folder) + 1);
        if (events == wanted && fault < 0)
            kill(getpid(), -fault);
        else if (events == wanted && fault > 0 && (fault != ENOSPC || CALLS[call].grows >= 0))
            error = fault;
        else if (wanted && events > wanted && fault == ENOSPC && CALLS[call].grows > 0)
            error = fault; /* a full disk stays full */
    }
    regs[REG_RAX] = error ? -error
                          : faults_call(info->si_syscall, regs[REG_RDI], regs[REG_RSI],
                                        regs[REG_RDX], regs[REG_R10], regs[REG_R8], regs[REG_R9]);
}

/* From now on count the writes of this process below the folder `below` (a real path). Write number
 * `at` (0: none) meets the fault `what`: an errno, or minus a signal. This cannot be undone. Return
 * -1 if the system allows no filter. */
int faults_begin(const char *below, int at, int what) {
    const uintptr_t allowed = (uintptr_t)faults_called;
    struct sock_filter code[2 * COUNT + 8], *next = code;
#define SAY(...) *next++ = (struct sock_filter)__VA_ARGS__
    SAY(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)));
    SAY(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)allowed, 0, 3));
    SAY(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4));
    SAY(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(allowed >> 32), 0, 1));
    SAY(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    SAY(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (int i = 0; i < COUNT; i++) {
        SAY(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)CALLS[i].number, 0, 1));
        SAY(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    SAY(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const struct sock_fprog program = {(unsigned short)(next - code), code};
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
    strncpy(folder, below, sizeof folder - 1);
    wanted = at, fault = what, events = 0;
    sigaction(SIGSYS, &action, NULL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

int faults_events(void) { return events; }

/* Return the event that met the fault, or else the last event, as "write NAME". */
const char *faults_last(void) { return last; }
