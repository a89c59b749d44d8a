// attention.cpp: torch.ops.wavepe.attention_forward, fused attention [W][S][X][A].
//
// No sum runs across tasks. So how a call is split into tasks may depend on the number of threads.
#include "attention.h"

namespace wavepe {
namespace {

// A task is a part of the keys for a share of the key heads, with all their query heads. The task
// that completes a key head merges its parts. The parts follow from the number of keys alone.
class Decoding {
  public:
    Decoding(const Call &call, const HeadMatrices &out, char *lse)
        : call(call),
          out(out),
          lse(lse),
          any(call.head(0, 0)),
          sizes(call.kernels->decode_sizes(&any, call.group)),
          pairs(call.key_head_count()),
          parts(wpe_decode_parts(call.keys)),
          part_bytes(ceil_div(call.bytes(call.group * sizes.sums), 64) * 64),
          workspace_bytes(ceil_div(call.bytes(sizes.workspace), 64) * 64),
          sums(product({pairs, parts}), part_bytes),
          done(pairs) {
        if (call.relative.rows)
            table_bytes =
                call.table_bytes(wpe_decode_most_rows(call.queries, call.keys), WPE_FORWARD);
    }

    void run() {
        const int64_t threads = torch::stable::get_num_threads();
        // Key heads that share a table share its packing. So a task has as many of them as leave
        // each thread one share of each part.
        const bool share_packing = table_bytes && !call.table_per_head();
        const int64_t shares = share_packing ? std::min(pairs, threads) : pairs;
        run_tasks(parts * shares, workspace_bytes + tables() * table_bytes,
                  [&](int64_t task, char *scratch) {
                      const int64_t share = task % shares;
                      run_part(task / shares, share * pairs / shares, (share + 1) * pairs / shares,
                               scratch);
                  });
    }

  private:
    const Call &call;
    const HeadMatrices &out;
    char *lse;
    const wpe_attention any;
    const wpe_decode_sizes sizes;
    const int64_t pairs, parts, part_bytes, workspace_bytes;
    const Memory sums;
    std::vector<std::atomic<int64_t>> done;  // the parts of each key head that are done
    int64_t table_bytes = 0;                 // of the rows that a part reads

    int64_t tables() const { return call.table_per_head() ? call.group : 1; }

    void run_part(int64_t part, int64_t begin, int64_t end, char *scratch) {
        const wpe_range keys = wpe_decode_part(call.keys, part);
        std::vector<PackedTable> packed(tables());
        std::optional<int64_t> packed_for;  // the offset, if all heads share the table
        std::vector<wpe_attention> heads(call.group);
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / call.key_heads, first = pair % call.key_heads * call.group;
            for (int64_t g = 0; g < call.group; g++) {
                wpe_attention &a = heads[g] = call.head(b, first + g);
                if (!a.relative) continue;
                PackedTable &table = packed[call.table_per_head() ? g : 0];
                if (call.table_per_head() || packed_for != a.offset)
                    call.pack_table(
                        table, first + g, wpe_decode_rows(&a, keys.begin, keys.end),
                        scratch + workspace_bytes + (call.table_per_head() ? g * table_bytes : 0),
                        WPE_FORWARD);
                packed_for = a.offset;
                a.relative = table.relative.rows ? &table.relative : nullptr;
            }
            call.kernels->decode(heads.data(), call.group, keys.begin, keys.end,
                                 part_sums(pair, part), scratch);
            if (done[pair].fetch_add(1) + 1 < parts) continue;
            for (int64_t g = 0; g < call.group; g++)
                call.kernels->merge(&heads[g], part_sums(pair, 0) + call.bytes(g * sizes.sums),
                                    parts, call.elements(part_bytes), out.result(b, first + g),
                                    call.head_row(lse, b, first + g));
        }
    }

    char *part_sums(int64_t pair, int64_t part) const {
        return sums.at((pair * parts + part) * part_bytes);
    }
};

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
        Decoding(call, HeadMatrices(out), rows).run();
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
