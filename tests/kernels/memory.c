/* memory.c: arrays between guard pages, which cannot be read or written, with a pattern in every
 * hole. */
#include "check.h"
#include "frame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* PATTERN repeated is a NaN in every storage type, but not the NaN that processors produce. */
enum { PATTERN = 0x7ff5, GUARD = 1 << 16 };

struct memory {
    char *map; /* the memory between the guards: map_bytes */
    size_t map_bytes;
    char *begin; /* the part that the kernel may use: `elements` elements of `size` bytes */
    int64_t elements;
    size_t size;
    uint8_t *must_write; /* for each element: whether it must be written; NULL: all may be */
    int sealed;
    struct memory *next;
};

static struct memory *in_use, *unused;

static void die(const char *what) {
    perror(what);
    exit(2);
}

static struct memory *map_pages(size_t bytes) {
    size_t rounded_up = (size_t)sysconf(_SC_PAGESIZE);
    while (rounded_up < bytes) rounded_up *= 2;
    for (struct memory **at = &unused; *at; at = &(*at)->next)
        if ((*at)->map_bytes == rounded_up) {
            struct memory *found = *at;
            *at = found->next;
            return found;
        }
    char *all = mmap(NULL, rounded_up + 2 * GUARD, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct memory *made = calloc(1, sizeof *made);
    if (all == MAP_FAILED || !made) die("memory for a case");
    made->map = all + GUARD;
    made->map_bytes = rounded_up;
    if (mprotect(made->map, rounded_up, PROT_READ | PROT_WRITE)) die("mprotect");
    return made;
}

/* Fill the memory by copies of the part that is already filled. Speed matters: a workspace has half
 * a megabyte and is filled before every call. */
static void fill_pattern(struct memory *m) {
    uint16_t *to = (uint16_t *)m->map;
    size_t filled = 1024;
    for (size_t i = 0; i < filled / 2; i++) to[i] = PATTERN;
    for (size_t more; filled < m->map_bytes; filled += more) {
        more = filled < m->map_bytes - filled ? filled : m->map_bytes - filled;
        memcpy(m->map + filled, m->map, more);
    }
}

/* Return memory that ends at the guard behind it, or begins at the guard before it. With `align`
 * there may be a gap before the guard behind it. */
static struct memory *take_memory(int64_t elements, size_t size, size_t align) {
    const size_t bytes = (size_t)elements * size;
    struct memory *m = map_pages(bytes + align);
    m->elements = elements;
    m->size = size;
    m->must_write = NULL;
    size_t offset = chance(0.7) ? (m->map_bytes - bytes) / align * align : 0;
    m->begin = m->map + offset;
    m->next = in_use;
    in_use = m;
    fill_pattern(m);
    return m;
}

static struct scratch {
    struct scratch *next;
    max_align_t memory[];
} *scratches;

void *scratch(size_t bytes) {
    struct scratch *made = calloc(1, sizeof *made + bytes);
    if (!made) die("scratch");
    made->next = scratches;
    scratches = made;
    return made->memory;
}

wide *new_wides(int64_t count) { return scratch((size_t)count * sizeof(wide)); }

void end_case(void) {
    while (in_use) {
        struct memory *m = in_use;
        in_use = m->next;
        if (m->sealed && mprotect(m->map, m->map_bytes, PROT_READ | PROT_WRITE)) die("mprotect");
        m->sealed = 0;
        m->next = unused;
        unused = m;
    }
    while (scratches) {
        struct scratch *next = scratches->next;
        free(scratches);
        scratches = next;
    }
}

/* ---- arrays ---------------------------------------------------------------------------------- */

static void dense_strides(array *x, int64_t padding) {
    x->stride[2] = 1;
    x->stride[1] = (x->shape[2] > 0 ? x->shape[2] : 1) + (x->shape[2] > 1 ? padding : 0);
    x->stride[0] = x->stride[1] * (x->shape[1] > 0 ? x->shape[1] : 1) + padding;
}

static void random_strides(array *x, int is_input) {
    int order[3] = {2, 1, 0}; /* innermost first */
    for (int i = 2; i > 0; i--) {
        const int other = (int)random_int(0, i), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    int64_t distance = 1;
    for (int i = 0; i < 3; i++) {
        const int64_t size = x->shape[order[i]];
        int64_t *stride = &x->stride[order[i]];
        if (size < 2 && chance(0.5)) { /* no second element: the stride may be anything */
            *stride = random_int(-3, 9);
            continue;
        }
        *stride = distance * (chance(0.5) ? 1 : random_int(1, 3)) + (chance(0.2) ? 1 : 0);
        distance = *stride * (size > 0 ? size : 1);
        if (chance(0.25)) *stride = -*stride;
        if (is_input && chance(0.15)) *stride = 0;
    }
}

static int all_dense;

void draw_layouts(void) { all_dense = chance(0.25); }

static array make_array(int type, int64_t size0, int64_t size1, int64_t size2, int is_input,
                        int dense) {
    array x = {.type = type, .shape = {size0, size1, size2}};
    const double style = dense || all_dense ? 0 : random_uniform(0, 1);
    dense_strides(&x, style < 0.4 ? 0 : random_int(1, 5));
    if (style > 0.6) random_strides(&x, is_input);
    int64_t low = 0, high = 0;
    for (int d = 0; d < 3; d++) {
        const int64_t reach = (x.shape[d] - 1) * x.stride[d];
        if (reach < 0) low += reach;
        if (reach > 0) high += reach;
    }
    const int empty = !count_of(&x);
    x.memory = take_memory(empty ? 0 : high - low + 1, type_size(type), type_size(type));
    x.data = x.memory->begin - (empty ? 0 : low * (int64_t)type_size(type));
    return x;
}

array new_input(int type, int64_t size0, int64_t size1, int64_t size2) {
    return make_array(type, size0, size1, size2, 1, 0);
}

array new_output(int type, int64_t size0, int64_t size1, int64_t size2) {
    array x = make_array(type, size0, size1, size2, 0, 0);
    expect_rows(&x, 0, size0);
    return x;
}

array new_dense(int type, int64_t size0, int64_t size1, int64_t size2) {
    array x = make_array(type, size0, size1, size2, 0, 1);
    expect_rows(&x, 0, size0);
    return x;
}

array new_block(int type, int64_t elements) {
    array x = {.type = type, .shape = {elements, 1, 1}, .stride = {1, 1, 1}};
    x.memory = take_memory(elements, type_size(type), 64);
    x.data = x.memory->begin;
    return x;
}

void expect_rows(const array *x, int64_t begin, int64_t end) {
    struct memory *m = x->memory;
    if (!m->must_write) m->must_write = scratch((size_t)m->elements + 1);
    memset(m->must_write, 0, (size_t)m->elements + 1);
    if (!count_of(x)) return;
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < x->shape[1]; j++)
            for (int64_t k = 0; k < x->shape[2]; k++)
                m->must_write[((char *)at(x, i, j, k) - m->begin) / (int64_t)m->size] = 1;
}

void seal(const array *x) {
    if (mprotect(x->memory->map, x->memory->map_bytes, PROT_READ)) die("mprotect");
    x->memory->sealed = 1;
}

void reset(const array *x) { fill_pattern(x->memory); }

int must_be_written(const array *x, int64_t i, int64_t j, int64_t k) {
    const struct memory *m = x->memory;
    return !m->must_write || m->must_write[((char *)at(x, i, j, k) - m->begin) / (int64_t)m->size];
}

/* ---- canaries -------------------------------------------------------------------------------- */

static int is_pattern(const char *from, size_t bytes) {
    for (size_t i = 0; i < bytes && i < 2; i++) {
        const int low = ((uintptr_t)(from + i) & 1) == 0; /* little endian */
        if ((uint8_t)from[i] != (uint8_t)(low ? PATTERN & 0xff : PATTERN >> 8)) return 0;
    }
    return bytes <= 2 || !memcmp(from, from + 2, bytes - 2); /* the pattern repeats */
}

static int gap_is_clean(const char *what, const char *side, const char *from, const char *to) {
    if (is_pattern(from, (size_t)(to - from))) return 1;
    while (is_pattern(from, 1)) from++;
    fail("%s: memory %s the array was written, %lld bytes from the end of that gap", what, side,
         (long long)(to - from));
    return 0;
}

int check_canaries(const char *what, const array *x) {
    const struct memory *m = x->memory;
    const char *end = m->begin + m->elements * (int64_t)m->size;
    if (!gap_is_clean(what, "before", m->map, m->begin)) return 0;
    if (!gap_is_clean(what, "behind", end, m->map + m->map_bytes)) return 0;
    for (int64_t i = 0; m->must_write && i < m->elements; i++) {
        if (is_pattern(m->begin + i * (int64_t)m->size, m->size) != m->must_write[i]) continue;
        const long long from_data = i - ((char *)x->data - m->begin) / (int64_t)m->size;
        fail(m->must_write[i]
                 ? "%s: element %+lld was not written, or depends on memory that was not"
                 : "%s: element %+lld was written, but should not be",
             what, from_data);
        return 0;
    }
    return 1;
}

const char *describe_address(const void *address) {
    static char text[200];
    const char *p = address;
    for (const struct memory *m = in_use; m; m = m->next) {
        const char *end = m->begin + m->elements * (int64_t)m->size;
        if (p < m->map - GUARD || p >= m->map + m->map_bytes + GUARD) continue;
        snprintf(text, sizeof text,
                 "%+lld bytes from the start, %+lld from the end of an array of %lld x %zu bytes%s",
                 (long long)(p - m->begin), (long long)(p - end), (long long)m->elements, m->size,
                 m->sealed ? ", which is read-only" : "");
        return text;
    }
    return "close to no array of this case";
}
