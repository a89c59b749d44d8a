/* check.h: the functions that the checks of kernels share.
 *
 * A check draws one random call and computes the expected results once. Then it runs every variant
 * on the same inputs and compares. All random numbers come from random_bits, which is seeded by the
 * seed, the name of the check and the number of the case. So `--seed S --kernel NAME --case K`
 * repeats one call. A check looks like this:
 *
 *     array x = new_input(WPE_F32, n, 1, 1), out = new_output(WPE_F32, n, 1, 1);
 *     fill_normal(&x, 1);
 *     seal(&x);
 *     wide *want = ..., *allowed = ...;
 *     describe("n %lld x %s out %s", (long long)n, show(&x), show(&out));
 *     const wpe_kernels *k;
 *     EACH_VARIANT(k) {
 *         reset(&out);
 *         if (CALL(k, psi[WPE_F32], ...)) compare("out", &out, want, allowed);
 *     }
 *
 * A check frees nothing: all memory is freed when the case ends. If a kernel crashes or aborts,
 * that is reported like a wrong result, and the next variant runs. */
#ifndef WAVEPE_CHECK_H
#define WAVEPE_CHECK_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "wavepe.h"

/* The type of references for which double is not enough. It has 64 bits of precision on x86, 113 on
 * aarch64. */
typedef long double wide;

/* ---- the checks ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;    /* for --kernel */
    void (*check)(void); /* one random call */
    void (*bench)(void); /* or NULL */
} kernel_check;

/* Lists of checks. An entry without a name ends a list. check.c runs all lists. */
extern const kernel_check wavelet_checks[], rope_table_checks[], rope_checks[], bias_checks[];
extern const kernel_check function_checks[], conversion_checks[], attention_checks[];

/* ---- random draws ---------------------------------------------------------------------------- */

uint64_t random_bits(void);
int chance(double probability);
int64_t random_int(int64_t least, int64_t most); /* least and most included */
double random_uniform(double least, double most);
double random_normal(void);
/* Return a size in least..most: 1 to 9, or within 1 of 6, 8, 16, 32, 64, 96, 192 or of a sum of two
 * of these. 0 is rare, and only if least is 0. */
int64_t random_size(int64_t least, int64_t most);
/* Return the number of rows of an output without columns: sometimes too many to loop over. The
 * kernel must not read an input with so many rows, so give that input 0 rows. */
int64_t random_empty(int64_t size);

/* ---- numbers --------------------------------------------------------------------------------- */

/* Element types of arrays: wpe_dtype, and integers. */
enum { CHECK_I64 = WPE_DTYPES, CHECK_U8, CHECK_TYPES };
const char *type_name(int type);
size_t type_size(int type);

/* Return x rounded to the type, to nearest even. */
wide rounded(int type, wide x);
/* Return half the distance between neighbouring numbers of the type at magnitude x. That is the
 * largest error of one rounding. */
wide half_ulp(int type, wide x);
wide unit_roundoff(int type); /* half an ulp of 1 */
wide smallest_normal(int type);

/* ---- memory ---------------------------------------------------------------------------------- */

/* An array of three dimensions. Unused dimensions have size 1. Its memory lies directly before or
 * directly after pages that cannot be read or written. */
typedef struct {
    void *data; /* element (0, 0, 0) */
    int type;
    int64_t shape[3], stride[3]; /* strides in elements */
    struct memory *memory;
} array;

/* Make an array with random strides: dense, with holes, with dimensions in another order, negative,
 * and for inputs also zero. Outputs, and the holes of both, are filled with a pattern, which is a
 * NaN. */
array new_input(int type, int64_t size0, int64_t size1, int64_t size2);
array new_output(int type, int64_t size0, int64_t size1, int64_t size2);
/* Make a contiguous row-major array. */
array new_dense(int type, int64_t size0, int64_t size1, int64_t size2);
/* Make a contiguous array that is aligned to 64 bytes, for packed memory and workspaces. */
array new_block(int type, int64_t elements);

void *at(const array *x, int64_t i, int64_t j, int64_t k);
wide get(const array *x, int64_t i, int64_t j, int64_t k);
void put(const array *x, int64_t i, int64_t j, int64_t k, wide value); /* rounds to the type */
int64_t count_of(const array *x);
wide *values_of(const array *x); /* row-major; lives until the case ends */

/* Set every element to a random number with standard deviation `scale`. */
void fill_normal(const array *x, double scale);
/* Overwrite about this share of the elements with 0, -0, infinities, NaN, subnormal and huge
 * numbers. */
void fill_special(const array *x, double share);
void copy_array(const array *to, const array *from); /* Requires: equal shapes. */

/* Forbid writes to an input from now on. A kernel that writes to it is reported. */
void seal(const array *x);
/* Fill an output, its holes and the memory around it with the pattern. */
void reset(const array *x);
/* Expect that a kernel writes rows begin..end-1 of the first dimension and no other elements. A new
 * output expects all its rows. */
void expect_rows(const array *x, int64_t begin, int64_t end);

/* Return zeroed memory without guard pages. It lives until the case ends. */
void *scratch(size_t bytes);
wide *new_wides(int64_t count);

/* Return a text like "f32 5x7x1 strides 9,-1,1", for describe. It lives for the next 16 calls. */
const char *show(const array *x);

/* ---- calls ----------------------------------------------------------------------------------- */

/* Set the line that describes the call in reports. */
void describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Report a failure of the current variant. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Return variant number `index` of those to check, or NULL past the last one. Reports name it. */
const wpe_kernels *take_variant(int index);
#define EACH_VARIANT(k) \
    for (volatile int variant_ = 0; ((k) = take_variant(variant_)) != NULL; variant_++)
/* Return whether two variants must give equal bits where wavepe.h or the docs promise equal bits.
 * They must if both use FMA instructions, which portable does not. */
int same_arithmetic(const wpe_kernels *a, const wpe_kernels *b);

/* Call a kernel: CALL(k, rope[type], out, ...). True if it returned and left the processor's modes
 * unchanged. CALL_FOR(value, k, packed_size[type], ...) also stores its return value.
 * Requires: locals that change between this call and the end of the loop over variants are
 * volatile, because a crash jumps back here (sigsetjmp). */
#define CALL(k, member, ...)          \
    (enter_call(k, ENTRY(k, member)), \
     sigsetjmp(check_escape, 0) ? 0 : ((k)->member(__VA_ARGS__), leave_call()))
#define CALL_FOR(value, k, member, ...) \
    (enter_call(k, ENTRY(k, member)),   \
     sigsetjmp(check_escape, 0) ? 0 : ((value) = (k)->member(__VA_ARGS__), leave_call()))
/* The same for a function that is not in the table of kernels. */
#define CALL_PLAIN(call) \
    (enter_call(NULL, 0), sigsetjmp(check_escape, 0) ? 0 : ((void)(call), leave_call()))

#define ENTRY(k, member) ((const void *const *)&(k)->member - (const void *const *)(k))
extern sigjmp_buf check_escape;
void enter_call(const wpe_kernels *k, ptrdiff_t entry);
int leave_call(void);

/* ---- comparisons: each reports an error, and returns whether all is right ------------------- */

/* Compare the expected elements of `got` with row-major `want`: |got - want| <= allowed (NULL: 0),
 * NaN for NaN, equal infinities. An infinite `allowed` allows any value. Also check_canaries. */
int compare(const char *what, const array *got, const wide *want, const wide *allowed);
/* Check that the kernel wrote all expected elements and nothing else. */
int check_canaries(const char *what, const array *x);
/* Keep the bits of all elements, row-major; and compare the expected elements with kept bits. All
 * NaNs count as equal. */
void keep_bits(const array *x, void *bits);
int compare_bits(const char *what, const array *got, const void *bits);

/* ---- timing ---------------------------------------------------------------------------------- */

/* Print the cycles per element of call(k, context), for every variant. */
typedef void bench_call(const wpe_kernels *k, void *context);
void bench(const char *what, double elements, bench_call *call, void *context);

#endif
