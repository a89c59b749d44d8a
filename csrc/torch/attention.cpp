// attention.cpp: torch.ops.wavepe.attention_forward, fused attention [W][S][X][A].
//
// No sum runs across tasks. So how a call is split into tasks may depend on the number of threads.
#include "attention.h"

namespace wavepe {
namespace {

// A task is a part of the keys of a key head, for all its query heads. The task that completes a
// key head merges the parts. The parts follow from the number of keys alone.
void decode(const Call &call, const HeadMatrices &out, char *lse) {
    const int64_t group = call.group, pairs = call.key_head_count();
    const int64_t parts = std::max<int64_t>(ceil_div(call.keys, WPE_DECODE_KEYS), 1);
    const wpe_attention any = call.head(0, 0);
    const wpe_decode_sizes sizes = call.kernels->decode_sizes(&any, group);
    const int64_t part_bytes = ceil_div(call.bytes(group * sizes.sums), 64) * 64;
    const Memory sums(product({pairs, parts}), part_bytes);
    std::vector<std::atomic<int64_t>> done(pairs);
    run_tasks(pairs * parts, call.bytes(sizes.workspace), [&](int64_t task, char *scratch) {
        const int64_t pair = task / parts, begin = task % parts * WPE_DECODE_KEYS;
        const int64_t b = pair / call.key_heads, first = pair % call.key_heads * group;
        std::vector<wpe_attention> heads;
        std::vector<wpe_matrix> tables;
        for (int64_t h = first; h < first + group; h++) {
            heads.push_back(call.head(b, h));
            tables.push_back(call.table(h));
        }
        call.kernels->decode(heads.data(), tables.data(), group, begin,
                             std::min(begin + WPE_DECODE_KEYS, call.keys),
                             sums.at(task * part_bytes), scratch);
        if (done[pair].fetch_add(1) + 1 < parts) return;
        for (int64_t g = 0; g < group; g++)
            call.kernels->merge(&heads[g],
                                sums.at(pair * parts * part_bytes + call.bytes(g * sizes.sums)),
                                parts, call.elements(part_bytes), out.result(b, first + g),
                                call.head_row(lse, b, first + g));
    });
}

void forward_blocks(const Call &call, const HeadMatrices &out, char *lse, int64_t b, int64_t h,
                    const void *packed, int64_t begin, int64_t end, char *scratch) {
    const wpe_attention a = call.head(b, h);
    call.kernels->forward(&a, packed, out.result(b, h), call.head_row(lse, b, h), begin, end,
                          scratch);
}

// For many key heads: a task packs one key head and uses it for all its query heads.
void forward_by_key_head(const Call &call, const HeadMatrices &out, char *lse) {
    const wpe_attention_sizes sizes = call.sizes(WPE_FORWARD);
    const int64_t packed_bytes = call.bytes(sizes.packed);
    run_tasks(call.key_head_count(), packed_bytes + call.bytes(sizes.workspace),
              [&](int64_t t, char *scratch) {
                  const int64_t b = t / call.key_heads, kv = t % call.key_heads;
                  if (call.keys) call.pack_keys(b, kv, scratch, WPE_FORWARD);
                  for (int64_t h = kv * call.group; h < (kv + 1) * call.group; h++)
                      forward_blocks(call, out, lse, b, h, scratch, 0, call.queries,
                                     scratch + packed_bytes);
              });
}

// For few key heads: first all keys are packed. Then a task is a block of queries. The last blocks
// run first, because in a causal call they see the most keys.
void forward_by_block(const Call &call, const HeadMatrices &out, char *lse) {
    const wpe_attention_sizes sizes = call.sizes(WPE_FORWARD);
    const int64_t packed_bytes = call.bytes(sizes.packed), tiles = call.tiles();
    const Memory packed(call.key_head_count(), packed_bytes);
    run_tasks(call.key_head_count() * tiles, 0, [&](int64_t t, char *) {
        const int64_t pair = t / tiles;
        call.pack_tile(pair / call.key_heads, pair % call.key_heads, t % tiles,
                       packed.at(pair * packed_bytes), WPE_FORWARD);
    });
    const int64_t blocks = ceil_div(call.queries, WPE_QUERY_BLOCK), heads = call.batch * call.heads;
    run_tasks(blocks * heads, call.bytes(sizes.workspace), [&](int64_t t, char *scratch) {
        const int64_t begin = (blocks - 1 - t / heads) * WPE_QUERY_BLOCK;
        const int64_t b = t % heads / call.heads, h = t % call.heads;
        forward_blocks(call, out, lse, b, h,
                       packed.at((b * call.key_heads + h / call.group) * packed_bytes), begin,
                       std::min(begin + WPE_QUERY_BLOCK, call.queries), scratch);
    });
}

std::tuple<Tensor, Tensor> attention_forward(WPE_ATTENTION_PARAMETERS) {
    Call call({WPE_ATTENTION_NAMES});
    const bool decodes = wpe_decodes(call.queries, call.keys);
    Tensor out = new_result(q, {call.batch, call.heads, call.queries, call.value_size});
    Tensor lse = new_result(q, {call.batch, call.heads, call.queries}, call.compute_type());
    if (call.empty()) return {out, lse};
    call.read(decodes ? std::nullopt : std::optional(WPE_FORWARD));
    const int64_t threads = torch::stable::get_num_threads();
    char *rows = at_mutable(lse, 0);
    if (decodes)
        decode(call, HeadMatrices(out), rows);
    else if (threads == 1 || call.key_head_count() >= 4 * threads)
        forward_by_key_head(call, HeadMatrices(out), rows);
    else
        forward_by_block(call, HeadMatrices(out), rows);
    return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def("attention_forward(" WPE_ATTENTION_SCHEMA ") -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) { WPE_IMPL(m, attention_forward); }

}  // namespace wavepe
