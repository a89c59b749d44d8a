/* array.c: the values of arrays, and their comparison with expected values. */
#include "check.h"
#include "frame.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void *at(const array *x, int64_t i, int64_t j, int64_t k) {
    const int64_t element = i * x->stride[0] + j * x->stride[1] + k * x->stride[2];
    return (char *)x->data + element * (int64_t)type_size(x->type);
}

int64_t count_of(const array *x) { return x->shape[0] * x->shape[1] * x->shape[2]; }

/* Run the body for every element (i, j, k). n is its number in row-major order. */
#define EACH_ELEMENT(x)                                                    \
    for (int64_t n = 0, i = 0; i < (count_of(x) ? (x)->shape[0] : 0); i++) \
        for (int64_t j = 0; j < (x)->shape[1]; j++)                        \
            for (int64_t k = 0; k < (x)->shape[2]; k++, n++)

wide get(const array *x, int64_t i, int64_t j, int64_t k) {
    const void *from = at(x, i, j, k);
    switch (x->type) {
        case WPE_F16:
            return (wide)(float)*(const _Float16 *)from;
        case WPE_BF16: {
            const uint32_t bits = (uint32_t)*(const uint16_t *)from << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            return value;
        }
        case WPE_F32:
            return *(const float *)from;
        case WPE_F64:
            return *(const double *)from;
        case CHECK_I64:
            return *(const int64_t *)from;
        default:
            return *(const uint8_t *)from;
    }
}

wide *values_of(const array *x) {
    wide *values = new_wides(count_of(x));
    EACH_ELEMENT(x) values[n] = get(x, i, j, k);
    return values;
}

void put(const array *x, int64_t i, int64_t j, int64_t k, wide value) {
    void *to = at(x, i, j, k);
    switch (x->type) {
        case WPE_F16: /* `rounded` gives an f16, so the casts are exact */
            *(_Float16 *)to = (_Float16)(float)rounded(WPE_F16, value);
            break;
        case WPE_BF16: {
            const float exact = (float)rounded(WPE_BF16, value);
            uint32_t bits;
            memcpy(&bits, &exact, sizeof bits);
            *(uint16_t *)to = (uint16_t)(bits >> 16);
            break;
        }
        case WPE_F32:
            *(float *)to = (float)value;
            break;
        case WPE_F64:
            *(double *)to = (double)value;
            break;
        case CHECK_I64:
            *(int64_t *)to = (int64_t)value;
            break;
        default:
            *(uint8_t *)to = (uint8_t)value;
    }
}

void fill_normal(const array *x, double scale) {
    EACH_ELEMENT(x) put(x, i, j, k, scale * random_normal());
}

void fill_special(const array *x, double share) {
    EACH_ELEMENT(x) {
        if (!chance(share)) continue;
        const wide normal = smallest_normal(x->type);
        const wide specials[] = {0,
                                 -0.0L,
                                 INFINITY,
                                 -INFINITY,
                                 NAN,
                                 normal / 2,
                                 -3 * normal / 8,
                                 normal,
                                 1 / normal,
                                 1,
                                 -1,
                                 unit_roundoff(x->type)};
        put(x, i, j, k, specials[random_int(0, sizeof specials / sizeof *specials - 1)]);
    }
}

void copy_array(const array *to, const array *from) {
    EACH_ELEMENT(to) memcpy(at(to, i, j, k), at(from, i, j, k), type_size(to->type));
}

const char *show(const array *x) {
    static char texts[16][160];
    static int next;
    char *text = texts[next++ % 16];
    snprintf(text, sizeof texts[0], "%s %lldx%lldx%lld strides %lld,%lld,%lld", type_name(x->type),
             (long long)x->shape[0], (long long)x->shape[1], (long long)x->shape[2],
             (long long)x->stride[0], (long long)x->stride[1], (long long)x->stride[2]);
    return text;
}

/* ---- comparisons ----------------------------------------------------------------------------- */

static int within(wide got, wide want, wide allowed) {
    if (isinf(allowed)) return 1;
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got);
    if (got == want) return 1;
    return fabsl(got - want) <= allowed;
}

int compare(const char *what, const array *got, const wide *want, const wide *allowed) {
    if (!check_canaries(what, got)) return 0;
    int64_t wrong = 0, first[3] = {0}, first_n = 0;
    EACH_ELEMENT(got) {
        if (!must_be_written(got, i, j, k)) continue;
        const wide value = get(got, i, j, k), error = allowed ? allowed[n] : 0;
        if (within(value, want[n], error)) continue;
        /* The result may be infinite if a number within the bound rounds to infinity. */
        if (isinf(value) && rounded(got->type, want[n] + copysignl(error, value)) == value)
            continue;
        if (!wrong++) {
            memcpy(first, (int64_t[]){i, j, k}, sizeof first);
            first_n = n;
        }
    }
    if (!wrong) return 1;
    const wide value = get(got, first[0], first[1], first[2]);
    fail(
        "%s: %lld of %lld wrong, first [%lld][%lld][%lld]: got %.17Lg, want %.17Lg, error %.3Lg, "
        "allowed %.3Lg",
        what, (long long)wrong, (long long)count_of(got), (long long)first[0], (long long)first[1],
        (long long)first[2], value, want[first_n], fabsl(value - want[first_n]),
        allowed ? allowed[first_n] : 0);
    return 0;
}

void keep_bits(const array *x, void *bits) {
    const size_t size = type_size(x->type);
    EACH_ELEMENT(x) memcpy((char *)bits + n * (int64_t)size, at(x, i, j, k), size);
}

int compare_bits(const char *what, const array *got, const void *bits) {
    const size_t size = type_size(got->type);
    EACH_ELEMENT(got) {
        const char *kept = (const char *)bits + n * (int64_t)size;
        if (!must_be_written(got, i, j, k) || !memcmp(kept, at(got, i, j, k), size)) continue;
        array other = *got;
        other.data = (void *)kept;
        const wide now = get(got, i, j, k), before = get(&other, 0, 0, 0);
        if (isnan(now) && isnan(before)) continue;
        fail("%s: [%lld][%lld][%lld] is %.17Lg, and %.17Lg before", what, (long long)i,
             (long long)j, (long long)k, now, before);
        return 0;
    }
    return 1;
}
