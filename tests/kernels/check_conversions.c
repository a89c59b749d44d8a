/* check_conversions.c: check the conversions between storage types, bit by bit. */
#include "check.h"
#include "frame.h"
#include "functions.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { COUNT = 1024, PART = 1 << 13, WAYS = 3 };
static const char *const ways[] = {"whole vectors", "element by element", "pairs"};

/* Return the value of a 16-bit number: a sign, an exponent of 5 or 8 bits, and a fraction. */
static wide value_of(int type, uint16_t bits) {
    const int fraction_bits = type == WPE_F16 ? 10 : 7, exponent_bits = 15 - fraction_bits;
    const int most = (1 << exponent_bits) - 1, bias = most / 2;
    const int exponent = bits >> fraction_bits & most, fraction = bits & ((1 << fraction_bits) - 1);
    const wide sign = bits >> 15 ? -1 : 1;
    if (exponent == most) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpl(fraction, 1 - bias - fraction_bits);
    return sign * ldexpl(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

static int same_number(wide a, wide b) {
    return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b);
}

static void check_widened(const char *way, const array *x, const array *out, const wide *want) {
    for (int64_t i = 0; i < PART; i++) {
        const wide got = get(out, i, 0, 0);
        if (same_number(got, want[i])) continue;
        fail("%s: %04x is %.9Lg, want %.9Lg", way, ((const uint16_t *)x->data)[i], got, want[i]);
        return;
    }
}

/* Check all numbers of both 16-bit types: 16 cases hold them all. */
static void check_widen(void) {
    const int type = current.number % 2 ? WPE_F16 : WPE_BF16;
    const int64_t from = current.number / 2 % 8 * PART;
    const array x = new_dense(type, PART, 1, 1), out = new_dense(WPE_F32, PART, 1, 1);
    wide *want = new_wides(PART);
    for (int64_t i = 0; i < PART; i++) {
        ((uint16_t *)x.data)[i] = (uint16_t)(from + i);
        want[i] = value_of(type, (uint16_t)(from + i));
    }
    seal(&x);
    describe("%s, bits from %llx on", type_name(type), (unsigned long long)from);
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        const check_functions *f = functions_of(k);
        for (volatile int way = 0; way < WAYS; way++) {
            reset(&out);
            if (CALL_PLAIN((type == WPE_F16 ? f->widen_f16 : f->widen_bf16)[way](out.data, x.data,
                                                                                 PART)) &&
                check_canaries("out", &out))
                check_widened(ways[way], &x, &out, want);
        }
    }
}

/* Return a random number, the middle between two 16-bit numbers, or a neighbour of that middle in
 * the wider type. */
static wide random_number(int type, int from) {
    const wide value = value_of(type, (uint16_t)random_bits());
    const wide middle = value + copysignl(half_ulp(type, value), value);
    const uint32_t bits = (uint32_t)random_bits();
    float any;
    memcpy(&any, &bits, sizeof any);
    if (!isfinite(value) || isnan(any)) return value;
    switch (random_int(0, 3)) {
        case 0:
            return from == WPE_F32 ? any : ldexpl(random_normal(), (int)random_int(-170, 140));
        case 1:
            return middle;
        case 2:
            return middle * (1 + 2 * unit_roundoff(from));
        default:
            return middle * (1 - 2 * unit_roundoff(from));
    }
}

static void check_narrowed(const char *way, const array *x, const array *out) {
    if (!check_canaries("out", out)) return;
    for (int64_t i = 0; i < COUNT; i++) {
        const wide from = get(x, i, 0, 0), want = rounded(out->type, from);
        const wide got = type_size(out->type) == 2
                             ? value_of(out->type, ((const uint16_t *)out->data)[i])
                             : get(out, i, 0, 0);
        if (same_number(got, want)) continue;
        fail("%s: %La (%.17Lg) is rounded to %.9Lg, want %.9Lg", way, from, from, got, want);
        return;
    }
}

/* Put a NaN. For some of them, adding to the bits would carry into the exponent and the sign. The
 * last two are signalling. */
static void put_nan(const array *x, int64_t i, int signalling) {
    static const uint32_t bits32[] = {0x7fffffff, 0xffffffff, 0x7fc12345, 0x7f800001, 0xff800001};
    static const uint64_t bits64[] = {0x7fffffffffffffff, 0xffffffffffffffff, 0x7ff8123456789abc,
                                      0x7ff0000000000001, 0xfff0000000000001};
    const int which = (int)random_int(0, signalling ? 4 : 2);
    if (x->type == WPE_F32)
        memcpy(at(x, i, 0, 0), &bits32[which], 4);
    else
        memcpy(at(x, i, 0, 0), &bits64[which], 8);
}

static array random_numbers(int type, int from, int signalling) {
    const array x = new_dense(from, COUNT, 1, 1);
    for (int64_t i = 0; i < COUNT; i++) put(&x, i, 0, 0, random_number(type, from));
    fill_special(&x, 0.02);
    for (int64_t i = 0; i < COUNT; i++)
        if (chance(0.01)) put_nan(&x, i, signalling);
    seal(&x);
    return x;
}

static void check_narrow(void) {
    const int type = chance(0.5) ? WPE_F16 : WPE_BF16;
    const int signalling = chance(0.5);
    const int count = signalling ? 2 : WAYS; /* pairs are results, with quiet NaNs */
    const array x = random_numbers(type, WPE_F32, signalling);
    const array out = new_dense(type, COUNT, 1, 1);
    describe("f32 to %s%s", type_name(type), signalling ? ", signalling NaNs" : "");
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        const check_functions *f = functions_of(k);
        for (volatile int way = 0; way < count; way++) {
            reset(&out);
            if (CALL_PLAIN((type == WPE_F16 ? f->narrow_f16 : f->narrow_bf16)[way](out.data, x.data,
                                                                                   COUNT)))
                check_narrowed(ways[way], &x, &out);
        }
    }
}

static void check_narrow_double(void) {
    const int type = chance(0.5) ? WPE_F16 : WPE_F32;
    const array x = random_numbers(WPE_F16, WPE_F64, 1), out = new_dense(type, COUNT, 1, 1);
    describe("f64 to %s", type_name(type));
    const wpe_kernels *k;
    EACH_VARIANT(k) {
        const check_functions *f = functions_of(k);
        for (volatile int way = 0; way < 2; way++) {
            reset(&out);
            if (type == WPE_F16 ? CALL_PLAIN(f->narrow_double_f16[way](out.data, x.data, COUNT))
                                : CALL_PLAIN(f->narrow_double_f32[way](out.data, x.data, COUNT)))
                check_narrowed(ways[way], &x, &out);
        }
    }
}

const kernel_check conversion_checks[] = {
    {"widen", check_widen, NULL},
    {"narrow", check_narrow, NULL},
    {"narrow_double", check_narrow_double, NULL},
    {NULL, NULL, NULL},
};
