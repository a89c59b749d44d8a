/* check_attention_store.c: check attention's store: sums of parts, rounded to the storage type. */
#include "attention_call.h"

#include <math.h>

/* Return the sum in order, in the arithmetic of the compute type. */
static wide sum_of_parts(const array *x, int64_t parts, int64_t r, int64_t c) {
    double sum = parts ? (double)get(x, 0, r, c) : 0;
    for (int64_t part = 1; part < parts; part++) {
        const double next = (double)get(x, part, r, c);
        sum = x->type == WPE_F64 ? sum + next : (double)((float)sum + (float)next);
    }
    return sum;
}

void check_attention_store(void) {
    static const int storages[] = {WPE_F16, WPE_BF16, WPE_F32, WPE_F64};
    const int storage = storages[random_int(0, 3)],
              compute_type = storage == WPE_F64 ? WPE_F64 : WPE_F32;
    const int64_t rows = random_size(0, 20), cols = random_size(0, 200), parts = random_int(0, 4);
    const array x = new_dense(compute_type, parts, rows, cols),
                out = new_output(storage, rows, cols, 1);
    fill_normal(&x, pow(10, random_uniform(-9, 9)));
    if (chance(0.4)) fill_special(&x, 0.1);
    seal(&x);
    wide *want = new_wides(rows * cols), *allowed = new_wides(rows * cols);
    for (int64_t n = 0; n < rows * cols; n++) {
        const wide sum = sum_of_parts(&x, parts, n / cols, n % cols);
        want[n] = rounded(storage, sum);
        /* Subnormals may count as zero, or may be copied. */
        if (storage != WPE_F16) allowed[n] = (wide)parts * smallest_normal(compute_type);
        allowed[n] = fabsl(sum) < 8 * smallest_normal(compute_type) ? allowed[n] : 0;
    }
    describe("%s %lld x %lld parts %lld x %s out %s", type_name(storage), (long long)rows,
             (long long)cols, (long long)parts, show(&x), show(&out));
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        reset(&out);
        if (CALL(k, attention[compute_type == WPE_F64].store, matrix_out_of(&out), storage, x.data,
                 rows, cols, x.stride[1], parts, x.stride[0]))
            compare("out", &out, want, allowed);
    }
}
