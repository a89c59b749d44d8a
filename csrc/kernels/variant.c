/* variant.c: one instruction set's table of kernels.
 *
 * setup.py compiles this file once per variant, with -DVARIANT=portable, avx2 or avx512 and that
 * variant's -march. The kernels are templates in plain C: included once per storage type, under
 * the names NAME(op) = op_<type>_<variant>. T is the storage type, REAL what it is computed in, V
 * LANES of it; the _PAIRS macros read and write the even and odd elements of 2 * LANES apart, and
 * TWO_A_LANE says that two elements of T fill a lane of V. */
#include "../wavepe.h"
#include "attention_range.h"
#include "simd_math.h"

#define PASTE3(a, b, c) a##_##b##_##c
#define PASTE(a, b, c)  PASTE3(a, b, c)
#define NAME(op)        PASTE(op, TYPE, VARIANT)
#define LOAD_FROM(type) load_##type
#define STORE_TO(type)  store_##type

/* ---- float16 ---- */
#define TYPE       f16
#define T          f16
#define LOAD_WIDE  load_wide_f16
#define STORE_WIDE store_wide_f16
#include "wavelet.c"
#undef LOAD_WIDE
#undef STORE_WIDE
#define REAL            float
#define V               f32v
#define LANES           F32_LANES
#define LOAD_REAL       load_f32
#define LOAD_REAL_PAIRS load_pairs_f32
#define LOAD            load_f16
#define STORE           store_f16
#define LOAD_PAIRS      load_pairs_f16
#define STORE_PAIRS     store_pairs_f16
#define TWO_A_LANE      0
#include "rope.c"
#undef TYPE
#undef T
#undef LOAD
#undef STORE
#undef LOAD_PAIRS
#undef STORE_PAIRS
#undef TWO_A_LANE

/* ---- bfloat16 ---- */
#define TYPE        bf16
#define T           bf16
#define LOAD        load_bf16
#define STORE       store_bf16
#define LOAD_PAIRS  load_pairs_bf16
#define STORE_PAIRS store_pairs_bf16
#define TWO_A_LANE  1
#include "rope.c"
#undef TYPE
#undef T
#undef LOAD
#undef STORE
#undef LOAD_PAIRS
#undef STORE_PAIRS
#undef TWO_A_LANE

/* ---- float32 ---- */
#define TYPE             f32
#define T                float
#define LOAD             load_f32
#define STORE            store_f32
#define LOAD_PAIRS       load_pairs_f32
#define STORE_PAIRS      store_pairs_f32
#define TWO_A_LANE       0
#define LOAD_WIDE        load_wide_f32
#define STORE_WIDE       store_wide_f32
#define EACH_STORAGE(DO) DO(WPE_F32, float, f32) DO(WPE_BF16, bf16, bf16) DO(WPE_F16, f16, f16)
#define EXP              exp_f32
#define TANH             tanh_f32
#define MAX              max_f32
#define ABS              abs_f32
#define SPLAT            splat_f32
#define REAL_ORDER       F32_ORDER
#define STORE_REAL       store_f32
#include "attention.c"
#include "relative_bias.c"
#include "rope.c"
#include "rope_table.c"
#include "wavelet.c"
#undef TYPE
#undef T
#undef LOAD
#undef STORE
#undef LOAD_WIDE
#undef STORE_WIDE
#undef REAL
#undef V
#undef LANES
#undef LOAD_PAIRS
#undef STORE_PAIRS
#undef LOAD_REAL
#undef LOAD_REAL_PAIRS
#undef EACH_STORAGE
#undef EXP
#undef TANH
#undef MAX
#undef ABS
#undef SPLAT
#undef REAL_ORDER
#undef STORE_REAL

/* ---- float64 ---- */
#define TYPE             f64
#define T                double
#define REAL             double
#define V                f64v
#define LANES            F64_LANES
#define LOAD             load_f64
#define STORE            store_f64
#define LOAD_REAL        load_f64
#define LOAD_WIDE        load_wide_f64
#define STORE_WIDE       store_wide_f64
#define LOAD_PAIRS       load_pairs_f64
#define STORE_PAIRS      store_pairs_f64
#define LOAD_REAL_PAIRS  load_pairs_f64
#define EACH_STORAGE(DO) DO(WPE_F64, double, f64)
#define EXP              exp_f64
#define TANH             tanh_f64
#define MAX              max_f64
#define ABS              abs_f64
#define SPLAT            splat_f64
#define REAL_ORDER       F64_ORDER
#define STORE_REAL       store_f64
#include "attention.c"
#include "relative_bias.c"
#include "rope.c"
#include "rope_table.c"
#include "wavelet.c"
#include "wavelet_backward.c"
#undef TYPE

#define OF(op, type) PASTE(op, type, VARIANT)
#define ATTENTION(type)                             \
    {                                               \
        .sizes = OF(attention_sizes, type),         \
        .keys = OF(attention_keys, type),           \
        .zone_size = OF(attention_zone_size, type), \
        .pack_zone = OF(attention_pack_zone, type), \
        .pack = OF(attention_pack, type),           \
        .forward = OF(attention_forward, type),     \
        .backward = OF(attention_backward, type),   \
        .decode = OF(attention_decode, type),       \
        .store = OF(attention_store, type),         \
    }
#define STRING2(x)      #x
#define STRING(x)       STRING2(x)
#define TABLE2(variant) wpe_kernels_##variant
#define TABLE(variant)  TABLE2(variant)
const wpe_kernels TABLE(VARIANT) = {
    .name = STRING(VARIANT),
    .psi = {[WPE_F16] = OF(psi, f16), [WPE_F32] = OF(psi, f32), [WPE_F64] = OF(psi, f64)},
    .wavelet_table = {[WPE_F16] = OF(wavelet_table, f16),
                      [WPE_F32] = OF(wavelet_table, f32),
                      [WPE_F64] = OF(wavelet_table, f64)},
    .wavelet_backward = OF(wavelet_backward, f64),
    .rope_table = {[WPE_F32] = OF(rope_table, f32), [WPE_F64] = OF(rope_table, f64)},
    .rope = {[WPE_F16] = OF(rope, f16),
             [WPE_BF16] = OF(rope, bf16),
             [WPE_F32] = OF(rope, f32),
             [WPE_F64] = OF(rope, f64)},
    .packed_size = {[WPE_F32] = OF(packed_size, f32), [WPE_F64] = OF(packed_size, f64)},
    .pack_table = {[WPE_F32] = OF(pack_table, f32), [WPE_F64] = OF(pack_table, f64)},
    .relative_bias = {[WPE_F32] = OF(relative_bias, f32), [WPE_F64] = OF(relative_bias, f64)},
    .skew = {[WPE_F32] = OF(skew, f32), [WPE_F64] = OF(skew, f64)},
    .unskew = {[WPE_F32] = OF(unskew, f32), [WPE_F64] = OF(unskew, f64)},
    .attention = {ATTENTION(f32), ATTENTION(f64)},
};
