/* attention.c: softmax attention with a relative term, forward and backward [W][S][X][A].
 *
 * The files included below are its parts. For each block of queries they visit the keys tile by
 * tile and keep nothing of size (queries, keys). Forward keeps a running maximum and sum of each
 * row. Backward recomputes the scores and needs one pass over the tiles, because it knows lse.
 * There are five products for each tile. T = R P^T is the relative term, S the scores, W the
 * weights:
 *
 *     S = T + Q K^T      dW = dO V^T      dV += W^T dO      dK += dS^T Q      dQ += dS K
 *
 * After all tiles follow dR += dT P and dP += dT^T R, where dT is dS (see attention_table.c).
 * The loop over query blocks is outermost. Tried: keys outermost cost the same, two passes over the
 * tiles cost a quarter more. The products skip keys that no row of a group of GROUP rows sees. */

#include "attention_range.h"
#include "gemm.c"
#include "attention_rows.c"
#include "attention_pack.c"
#include "attention_block.c"
#include "attention_nonfinite.c"
#include "attention_bias.c"
#include "attention_table.c"
#include "attention_softmax.c"
#include "attention_forward.c"
#include "attention_backward.c"
#include "attention_decode.c"

static wpe_range NAME(attention_seen_keys)(const wpe_attention *a, int64_t begin, int64_t end) {
    check_attention(a);
    assert(begin >= 0 && begin < end && end <= a->queries);
    return (wpe_range){key_range_of(a, begin).begin, key_range_of(a, end - 1).end};
}

static wpe_attention_sizes NAME(attention_sizes)(const wpe_attention *a, enum wpe_pass pass) {
    check_attention(a);
    MEMORY memory = {NULL, 0};
    BLOCK b;
    SCRATCH w;
    wpe_attention_sizes sizes;
    NAME(block_memory)(&b, a, &memory);
    if (pass == WPE_BACKWARD)
        NAME(scratch_memory)(&w, &b, &memory);
    else
        NAME(take)(&memory, WPE_QUERY_BLOCK * b.padded_dv);
    sizes.workspace = memory.used;
    sizes.packed = NAME(packed_parts)(a, NULL, pass).size;
    sizes.dk_rows = round_up(a->keys, KEY_STEP) + GROUP;
    sizes.dk_cols = b.padded_d;
    sizes.dv_cols = b.padded_dv;
    sizes.dp_rows = a->relative ? a->relative->rows + GROUP : 0;
    sizes.dp_cols = b.padded_r;
    return sizes;
}
