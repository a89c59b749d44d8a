// attention.cpp: torch.ops.wavepe.attention_forward, fused attention [W][S][X][A].
//
// No sum runs across tasks. So how a call is split into tasks may depend on the number of threads.
#include "attention.h"

namespace wavepe {
namespace {

// Attention of few queries: tasks are parts of the keys, for a share of the key heads with all
// their query heads (decoding.h).
void decode(const Call &call, const HeadMatrices &out, char *lse) {
    wpe_decoding d{};
    d.kernels = call.kernels;
    d.table = &call.table;
    d.group = call.group;
    d.slots = call.table_per_head() ? call.group : 1;
    d.call = &call;
    d.head = [](const void *of, int64_t head, int64_t *shift) {
        const Call &call = *static_cast<const Call *>(of);
        *shift = call.table_shift(head % call.heads);
        return call.head(head / call.heads, head % call.heads);
    };
    wpe_plan_decoding(&d);
    const int64_t pairs = call.key_head_count();
    const Memory sums(d.parts, product({pairs, call.group, d.head_sums, d.item}));
    std::vector<std::atomic<int64_t>> done(pairs);  // the parts of each key head that are done
    // Key heads that share a table share its packing. So a task has as many of them as leave each
    // thread one share of each part.
    const bool share_packing = d.table_bytes && !call.table_per_head();
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t shares = share_packing ? std::min(pairs, threads) : pairs;
    run_tasks(d.parts * shares, d.task_bytes, [&](int64_t task, char *scratch) {
        const int64_t part = task / shares, share = task % shares;
        const int64_t begin = share * pairs / shares, end = (share + 1) * pairs / shares;
        decode_part(d, part, begin, end, pairs, sums.at(0), done.data(), scratch,
                    [&](int64_t head) {
                        const int64_t b = head / call.heads, h = head % call.heads;
                        return std::pair{out.result(b, h), call.head_row(lse, b, h)};
                    });
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
    call.read();
    const int64_t threads = torch::stable::get_num_threads();
    char *rows = at_mutable(lse, 0);
    if (decodes) {
        decode(call, HeadMatrices(out), rows);
        return {out, lse};
    }
    call.pack_tables(WPE_FORWARD);
    if (threads == 1 || call.key_head_count() >= 4 * threads)
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
