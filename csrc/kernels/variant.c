/* variant.c: the table of kernels of one instruction set.
 *
 * setup.py compiles this file once per variant, with -DVARIANT=portable, avx2 or avx512 and the
 * variant's -march. It includes each template once per type (see template.h). */
#include "template.h"

#ifdef __x86_64__ /* setup.py leaves -march out of CFLAGS, but a compiler's wrapper may add it */
enum { bytes_portable = 16, bytes_avx2 = 32, bytes_avx2x2 = 64, bytes_avx512 = 64 };
_Static_assert(VECTOR_BYTES == PASTE2(bytes_, VARIANT),
               "the compiler has an -march of its own, which replaces this variant's");
#endif

#define REAL_TYPE f32
#define TYPE      f16
#include "rope.c"
#include "wavelet.c"
#undef TYPE
#define TYPE bf16
#include "rope.c"
#undef TYPE
#define TYPE f32
#include "attention.c"
#include "relative_bias.c"
#include "rope.c"
#include "rope_table.c"
#include "wavelet.c"
#undef TYPE
#undef REAL_TYPE

#define REAL_TYPE f64
#define TYPE      f64
#include "attention.c"
#include "relative_bias.c"
#include "rope.c"
#include "rope_table.c"
#include "wavelet.c"
#include "wavelet_backward.c"

#define OF(op, type)   PASTE3(op, type, VARIANT)
#define REAL_TYPES(op) {[WPE_F32] = OF(op, f32), [WPE_F64] = OF(op, f64)}
#define ATTENTION(type)                                   \
    {                                                     \
        .sizes = OF(attention_sizes, type),               \
        .seen_keys = OF(attention_seen_keys, type),       \
        .zone_size = OF(attention_zone_size, type),       \
        .pack_zone = OF(attention_pack_zone, type),       \
        .pack = OF(attention_pack, type),                 \
        .forward = OF(attention_forward, type),           \
        .backward = OF(attention_backward, type),         \
        .decode_sizes = OF(attention_decode_sizes, type), \
        .decode = OF(attention_decode, type),             \
        .merge = OF(attention_merge, type),               \
        .store = OF(attention_store, type),               \
    }
#define STRING_(x) #x
#define STRING(x)  STRING_(x)
const wpe_kernels PASTE2(wpe_kernels_, VARIANT) = {
    .name = STRING(VARIANT),
    .psi = {[WPE_F16] = OF(psi, f16), [WPE_F32] = OF(psi, f32), [WPE_F64] = OF(psi, f64)},
    .wavelet_table = {[WPE_F16] = OF(wavelet_table, f16),
                      [WPE_F32] = OF(wavelet_table, f32),
                      [WPE_F64] = OF(wavelet_table, f64)},
    .wavelet_backward = OF(wavelet_backward, f64),
    .rope_table = REAL_TYPES(rope_table),
    .rope = {[WPE_F16] = OF(rope, f16),
             [WPE_BF16] = OF(rope, bf16),
             [WPE_F32] = OF(rope, f32),
             [WPE_F64] = OF(rope, f64)},
    .packed_size = REAL_TYPES(packed_size),
    .pack_table = REAL_TYPES(pack_table),
    .relative_bias = REAL_TYPES(relative_bias),
    .skew = REAL_TYPES(skew),
    .unskew = REAL_TYPES(unskew),
    .attention = {ATTENTION(f32), ATTENTION(f64)},
};
