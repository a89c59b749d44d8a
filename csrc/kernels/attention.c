/* attention.c: softmax attention with a relative term, forward and backward [W][S][X][A].
 *
 * Made of the parts included here. A block of queries meets its keys tile by tile, nothing of size
 * (queries, keys) is kept: forward with a running maximum and sum, backward in one pass from lse,
 * in five products a tile. With T = R P^T the relative term, S the scores, W the weights:
 *
 *     S = T + Q K^T      dW = dO V^T      dV += W^T dO      dK += dS^T Q      dQ += dS K
 *
 * and, after all tiles, dR += dT P (dT is dS, see attention_table.c) and dP += dT^T R. Query blocks
 * are outermost: keys outermost cost the same, and a second pass over the tiles a quarter more.
 * Rows are trimmed to the keys they see by groups of GROUP. */

#include "attention_range.h"
#include "gemm.c"
#include "attention_rows.c"
#include "attention_pack.c"
#include "attention_block.c"
#include "attention_seen.c"
#include "attention_bias.c"
#include "attention_table.c"
#include "attention_softmax.c"
#include "attention_forward.c"
#include "attention_backward.c"
#include "attention_decode.c"

static wpe_range NAME(attention_seen_keys)(const wpe_attention *a, int64_t begin, int64_t end) {
    check_attention(a);
    assert(begin >= 0 && begin < end && end <= a->queries);
    return (wpe_range){keys_of(a, begin).begin, keys_of(a, end - 1).end};
}

static wpe_attention_sizes NAME(attention_sizes)(const wpe_attention *a, enum wpe_pass pass) {
    check_attention(a);
    MEMORY memory = {NULL, 0};
    BLOCK b;
    SCRATCH w;
    wpe_attention_sizes sizes;
    NAME(block_memory)(&b, a, pass, &memory);
    if (pass == WPE_BACKWARD)
        NAME(scratch_memory)(&w, &b, &memory);
    else
        NAME(take)(&memory, (pass == WPE_DECODE ? 1 : WPE_QUERY_BLOCK) * b.padded_dv);
    sizes.workspace = memory.used;
    sizes.packed = pass == WPE_DECODE ? 0 : NAME(packed_parts)(a, NULL, pass).size;
    sizes.dk_rows = round_up(a->keys, STEP) + GROUP;
    sizes.dk_cols = b.padded_d;
    sizes.dv_cols = b.padded_dv;
    sizes.dp_rows = a->relative ? a->relative->rows + GROUP : 0;
    return sizes;
}
