/* openmp_order.c: tells ThreadSanitizer the order of PyTorch's parallel parts (tests/races.py).
 *
 * libgomp starts and awaits its threads by futexes, which ThreadSanitizer does not see. So it would
 * report whatever one thread writes before or in a parallel part, and another one reads later.
 * PyTorch's parallel parts have no other order inside: no barriers, no critical sections. */
#define _GNU_SOURCE
#include <dlfcn.h>

void __tsan_acquire(void *);
void __tsan_release(void *);

typedef void body(void *);
typedef struct {
    body *run;
    void *data;
    char begun, ended; /* their addresses name the two points in time */
} part;

static void run(void *given) {
    part *p = given;
    __tsan_acquire(&p->begun);
    p->run(p->data);
    __tsan_release(&p->ended);
}

/* In front of libgomp's function of this name. */
void GOMP_parallel(body *function, void *data, unsigned threads, unsigned flags) {
    void (*parallel)(body *, void *, unsigned, unsigned) = dlsym(RTLD_NEXT, "GOMP_parallel");
    part p = {function, data, 0, 0};
    __tsan_release(&p.begun);
    parallel(run, &p, threads, flags);
    __tsan_acquire(&p.ended);
}
