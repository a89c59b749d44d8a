/* numbers.c: random numbers, and rounding to the storage types. */
#include "check.h"
#include "frame.h"

#include <math.h>

static uint64_t state;

void seed_random(uint64_t seed) { state = seed; }

uint64_t random_bits(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double random_uniform(double least, double most) {
    return least + (most - least) * ((double)(random_bits() >> 11) * 0x1p-53);
}

int chance(double probability) { return random_uniform(0, 1) < probability; }

int64_t random_int(int64_t least, int64_t most) {
    uint64_t span = (uint64_t)most - (uint64_t)least + 1;
    return (int64_t)((uint64_t)least + (span ? random_bits() % span : random_bits()));
}

/* Return a sum of four uniform numbers, with variance 1. The last term fills all 53 bits. */
double random_normal(void) {
    uint64_t bits = random_bits();
    double sum = -131070;
    for (int i = 0; i < 4; i++) sum += (double)(bits >> (16 * i) & 0xffff);
    return (sum + random_uniform(-0.5, 0.5)) * (1.7320508075688772 / 65536);
}

int64_t random_size(int64_t least, int64_t most) {
    static const int64_t blocks[] = {6, 8, 16, 32, 64, 96, 192};
    if (least == 0 && chance(0.03)) return 0;
    for (int tries = 0; tries < 20; tries++) {
        int64_t size = random_int(1, 9);
        if (chance(0.6)) {
            size = blocks[random_int(0, 6)] + random_int(-1, 1);
            if (chance(0.3)) size += blocks[random_int(0, 6)];
        }
        if (size >= least && size <= most) return size;
    }
    return random_int(least, most);
}

int64_t random_empty(int64_t size) { return chance(0.5) ? 1LL << 40 : size; }

/* ---- types ----------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t size;
    int bits, least_exponent; /* significant bits; exponent of the smallest normal number */
    wide largest;
} types[CHECK_TYPES] = {
    [WPE_F16] = {"f16", 2, 11, -14, 65504},
    [WPE_BF16] = {"bf16", 2, 8, -126, 0x1.fep+127L},
    [WPE_F32] = {"f32", 4, 24, -126, 0x1.fffffep+127L},
    [WPE_F64] = {"f64", 8, 53, -1022, 0x1.fffffffffffffp+1023L},
    [CHECK_I64] = {"i64", 8, 64, 0, 0x1p63L},
    [CHECK_U8] = {"u8", 1, 8, 0, 255},
};

const char *type_name(int type) { return types[type].name; }
size_t type_size(int type) { return types[type].size; }

/* Return the distance between neighbouring numbers of the type at magnitude x. */
static wide spacing(int type, wide x) {
    int exponent = types[type].least_exponent;
    if (isfinite(x) && x != 0) {
        const int of_x = ilogbl(x);
        if (of_x > exponent) exponent = of_x;
    }
    return ldexpl(1, exponent - types[type].bits + 1);
}

wide rounded(int type, wide x) {
    if (!isfinite(x)) return x;
    const wide step = spacing(type, x);
    x = rintl(x / step) * step;
    return fabsl(x) > types[type].largest ? copysignl(INFINITY, x) : x;
}

wide half_ulp(int type, wide x) { return spacing(type, x) / 2; }
wide unit_roundoff(int type) { return ldexpl(1, -types[type].bits); }
wide smallest_normal(int type) { return ldexpl(1, types[type].least_exponent); }
