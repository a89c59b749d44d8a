/* check.h: what every check of a kernel uses.
 *
 * A check draws one random call, computes what it should give once, runs every variant on the same
 * inputs and compares. All that it draws comes from random_bits, which is seeded by (seed, name of
 * the check, number of the case): `--seed S --kernel NAME --case K` repeats one call. The frame of
 * a check:
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
 * Nothing is freed by a check: memory is taken back when the case ends. A kernel that crashes or
 * aborts is reported like a wrong result, and the next variant runs. */
#ifndef WAVEPE_CHECK_H
#define WAVEPE_CHECK_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "wavepe.h"

/* What references are computed in where double is not enough: 64 bits on x86, 113 on aarch64. */
typedef long double wide;

/* ---- the checks ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;    /* for --kernel */
    void (*check)(void); /* one random call */
    void (*bench)(void); /* or NULL */
} kernel_check;

/* Lists of checks, each ended by an entry without a name; check.c names them all. */
extern const kernel_check wavelet_checks[], rope_table_checks[], rope_checks[], bias_checks[];
extern const kernel_check function_checks[], conversion_checks[], attention_checks[];

/* ---- random draws ---------------------------------------------------------------------------- */

uint64_t random_bits(void);
int chance(double probability);
int64_t random_int(int64_t least, int64_t most); /* both included */
double random_uniform(double least, double most);
double random_normal(void);
/* A size of least..most: 1 to 9, or next to 6, 8, 16, 32, 64, 96, 192 or a sum of two of them;
 * 0 is rare, where least is 0. */
int64_t random_size(int64_t least, int64_t most);
/* For the rows of an output without columns: now and then so many that nobody can count them. An
 * input with such rows is not to be read: give it none. */
int64_t random_empty(int64_t size);

/* ---- numbers --------------------------------------------------------------------------------- */

/* Element types of arrays: wpe_dtype, and integers. */
enum { CHECK_I64 = WPE_DTYPES, CHECK_U8, CHECK_TYPES };
const char *type_name(int type);
size_t type_size(int type);

/* x rounded to the type, to nearest even. */
wide rounded(int type, wide x);
/* Half the distance between the type's neighbours at magnitude x: the error of one rounding. */
wide half_ulp(int type, wide x);
/* Half an ulp of 1; the smallest normal number. */
wide unit_roundoff(int type);
wide smallest_normal(int type);

/* ---- memory ---------------------------------------------------------------------------------- */

/* An array of up to three dimensions; those not used have size 1. It ends right before, or begins
 * right after, pages that cannot be touched. */
typedef struct {
    void *data; /* element (0, 0, 0) */
    int type;
    int64_t shape[3], stride[3]; /* strides in elements */
    struct memory *memory;
} array;

/* Arrays with random strides: dense, with holes, in another order of the dimensions, negative, and
 * for inputs zero. Outputs are filled with a NaN of a known pattern; so are the holes of both. */
array new_input(int type, int64_t size0, int64_t size1, int64_t size2);
array new_output(int type, int64_t size0, int64_t size1, int64_t size2);
/* Dense, row-major. */
array new_dense(int type, int64_t size0, int64_t size1, int64_t size2);
/* Dense, on a multiple of 64 bytes: packed memory and workspaces. */
array new_block(int type, int64_t elements);

void *at(const array *x, int64_t i, int64_t j, int64_t k);
wide get(const array *x, int64_t i, int64_t j, int64_t k);
void put(const array *x, int64_t i, int64_t j, int64_t k, wide value); /* rounds to the type */
int64_t count_of(const array *x);
wide *values_of(const array *x); /* row-major, until the case ends */

/* Every element := random numbers of standard deviation `scale`. */
void fill_normal(const array *x, double scale);
/* Overwrites about `share` of the elements with 0, -0, infinities, NaN, subnormal and huge. */
void fill_special(const array *x, double share);
void copy_array(const array *to, const array *from); /* of the same shape */

/* From now on an input cannot be written: a kernel that does is reported. */
void seal(const array *x);
/* Fills an output, its holes and what surrounds it with the pattern. All of it, or, after
 * own_rows, rows begin..end-1 of its first dimension are expected to be written, and no more. */
void reset(const array *x);
void own_rows(const array *x, int64_t begin, int64_t end);

/* Memory without guards, zeroed, until the case ends. */
void *scratch(size_t bytes);
wide *new_wides(int64_t count);

/* "f32 5x7x1 strides 9,-1,1", for describe; good for the next 16 calls. */
const char *show(const array *x);

/* ---- calls ----------------------------------------------------------------------------------- */

/* The call in one line, for reports. */
void describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Reports a failure of the current variant. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The variants to check, in rising order; NULL past the end. Names the one in reports. */
const wpe_kernels *take_variant(int index);
#define EACH_VARIANT(k) \
    for (volatile int variant_ = 0; ((k) = take_variant(variant_)) != NULL; variant_++)
/* Whether two variants promise the same bits where the header or docs say so: they have the same
 * instructions (FMA). portable has none. */
int same_arithmetic(const wpe_kernels *a, const wpe_kernels *b);

/* Calls a kernel: CALL(k, rope[type], out, ...). True where it came back, with the processor's
 * modes as they were. CALL_FOR(value, k, packed_size[type], ...) also keeps what it returns.
 * Locals that change between this and the end of the loop over variants must be volatile. */
#define CALL(k, member, ...)          \
    (enter_call(k, ENTRY(k, member)), \
     sigsetjmp(check_escape, 0) ? 0 : ((k)->member(__VA_ARGS__), leave_call()))
#define CALL_FOR(value, k, member, ...) \
    (enter_call(k, ENTRY(k, member)),   \
     sigsetjmp(check_escape, 0) ? 0 : ((value) = (k)->member(__VA_ARGS__), leave_call()))
/* The same for a function that is no entry of the table. */
#define CALL_PLAIN(call) \
    (enter_call(NULL, 0), sigsetjmp(check_escape, 0) ? 0 : ((void)(call), leave_call()))

#define ENTRY(k, member) ((const void *const *)&(k)->member - (const void *const *)(k))
extern sigjmp_buf check_escape;
void enter_call(const wpe_kernels *k, ptrdiff_t entry);
int leave_call(void);

/* ---- comparisons: each reports what is wrong, and returns whether all is well ------------------
 */

/* The owned elements of `got` against row-major `want`: |got - want| <= allowed (NULL: 0), NaN
 * where NaN is wanted, infinities equal; anything where allowed is infinite. None is left
 * unwritten, and nothing else is written. */
int compare(const char *what, const array *got, const wide *want, const wide *allowed);
/* That nothing but the owned elements was written, and they all were. */
int check_canaries(const char *what, const array *x);
/* The owned elements' bits, row-major: of an earlier call. NaNs are equal to one another. */
void keep_bits(const array *x, void *bits);
int compare_bits(const char *what, const array *got, const void *bits);

/* ---- timing ---------------------------------------------------------------------------------- */

/* Prints cycles per element of call(k, context), for every variant. */
typedef void bench_call(const wpe_kernels *k, void *context);
void bench(const char *what, double elements, bench_call *call, void *context);

#endif
