// attention_backward.cpp: torch.ops.wavepe.attention_backward, the gradients of attention.
//
// How sums are split depends on shapes alone. So results do not depend on the number of threads.
#include "attention.h"

namespace wavepe {
namespace {

struct Gradients {
    Tensor dq, dk, dv, dp, dq_rel, dbias;
};

// The sizes of the sums of one task: dk and dv of a key head; dp of the table, or of each table of
// the key head's query heads.
struct Sums {
    int64_t dk, dv, dp;  // bytes
    int64_t tables;      // how many dp

    Sums(const Call &call, const wpe_attention_sizes &sizes, bool p_grad)
        : dk(call.bytes(sizes.dk_rows * sizes.dk_cols)),
          dv(call.bytes(sizes.dk_rows * sizes.dv_cols)),
          dp(p_grad ? call.bytes(sizes.dp_rows * sizes.dp_cols) : 0),
          tables(call.table_per_head() ? call.group : 1) {}
    int64_t keys_bytes() const { return dk + dv; }
    int64_t table_bytes() const { return dp * tables; }
};

// Blocks of queries begin..end-1, and the keys that they see, rounded to whole tiles.
struct Chunk {
    int64_t begin = 0, end = 0;
    wpe_range key_range{0, 0};
    int64_t number = 0;
};

class Backward {
    const Call &call;
    const HeadMatrices grad_out, out;
    const char *const lse, *const grad_lse;
    const HeadMatrices dq, dk, dv, dr;
    const Tensor &dp, &dbias;
    const bool p_grad, bias_grad;
    const wpe_attention_sizes sizes;
    const Sums sums;
    const int64_t blocks;
    const Memory bias_sums;  // (heads, batch, chunks, bias.rows)

  public:
    Backward(const Call &call, const Tensor &grad_out, const Tensor &out, const Tensor &lse,
             const std::optional<Tensor> &grad_lse, const Gradients &to, bool p_grad,
             bool bias_grad)
        : call(call),
          grad_out(grad_out),
          out(out),
          lse(at(lse, 0)),
          grad_lse(grad_lse ? at(*grad_lse, 0) : nullptr),
          dq(to.dq),
          dk(to.dk),
          dv(to.dv),
          dr(call.has_q_rel() ? HeadMatrices(to.dq_rel) : HeadMatrices()),
          dp(to.dp),
          dbias(to.dbias),
          p_grad(p_grad),
          bias_grad(bias_grad),
          sizes(call.sizes(WPE_BACKWARD)),
          sums(call, sizes, p_grad),
          blocks(ceil_div(call.queries, WPE_QUERY_BLOCK)),
          bias_sums(bias_grad ? call.heads * bias_parts() : 0, call.bytes(call.bias.rows), true) {}

    // Return how many chunks the query blocks of a key head are split into. Each has its own sums.
    int64_t chunk_count() const {
        return std::clamp<int64_t>(std::min(32 / call.key_head_count(), blocks / 4), 1, 4);
    }

    // Return how many sums of a head's bias gradient have to be added at the end.
    int64_t bias_parts() const { return call.batch * chunk_count(); }

    // Split the query blocks into at most `count` chunks that see about equally many keys.
    std::vector<Chunk> chunks(int64_t b, int64_t count) const {
        const wpe_attention a = call.head(b, 0);
        std::vector<int64_t> cost(blocks + 1);
        std::vector<wpe_range> seen(blocks);
        for (int64_t i = 0; i < blocks; i++) {
            seen[i] = call.kernels->seen_keys(&a, i * WPE_QUERY_BLOCK,
                                              std::min((i + 1) * WPE_QUERY_BLOCK, call.queries));
            cost[i + 1] = cost[i] + seen[i].end - seen[i].begin + WPE_QUERY_BLOCK;
        }
        std::vector<Chunk> result;
        for (int64_t c = 0, i = 0; c < count; c++) {
            const int64_t begin = i;
            while (i < blocks && cost[i + 1] * count <= cost[blocks] * (c + 1)) i++;
            if (begin == i) continue;
            const int64_t first_key = seen[begin].begin / WPE_KEY_BLOCK * WPE_KEY_BLOCK;
            const int64_t end_key = ceil_div(seen[i - 1].end, WPE_KEY_BLOCK) * WPE_KEY_BLOCK;
            // at least one tile: so neither end of the ranges falls from one chunk to the next
            const int64_t end = std::max(end_key, first_key + WPE_KEY_BLOCK);
            result.push_back(
                {begin, i, {first_key, std::min(end, sizes.dk_rows)}, (int64_t)result.size()});
        }
        return result;
    }

    void run_chunk(int64_t b, int64_t kv, const Chunk &chunk, const void *packed, char *key_sums,
                   char *table_sums, char *scratch) const {
        const int64_t first_key = chunk.key_range.begin, rows = chunk.key_range.end - first_key;
        std::memset(key_sums + call.bytes(first_key * sizes.dk_cols), 0,
                    call.bytes(rows * sizes.dk_cols));
        std::memset(key_sums + sums.dk + call.bytes(first_key * sizes.dv_cols), 0,
                    call.bytes(rows * sizes.dv_cols));
        for (int64_t i = chunk.begin; i < chunk.end; i++)
            for (int64_t g = 0; g < call.group; g++) {
                const int64_t h = kv * call.group + g, begin = i * WPE_QUERY_BLOCK;
                const wpe_attention a = call.head(b, h);
                wpe_attention_gradients to{};
                to.out = out.matrix(b, h);
                to.grad_out = grad_out.matrix(b, h);
                to.lse = call.head_row(lse, b, h);
                to.grad_lse = grad_lse ? call.head_row(grad_lse, b, h) : nullptr;
                to.dq = dq.result(b, h);
                if (call.has_q_rel()) to.dr = dr.result(b, h);
                to.sums.dk = key_sums;
                to.sums.dv = key_sums + sums.dk;
                if (p_grad) to.sums.dp = table_sums + (sums.tables > 1 ? g * sums.dp : 0);
                if (bias_grad)
                    to.sums.dbias = bias_sums.at(call.bytes(
                        (h * bias_parts() + b * chunk_count() + chunk.number) * call.bias.rows));
                call.kernels->backward(&a, packed, &to, begin,
                                       std::min(begin + WPE_QUERY_BLOCK, call.queries), scratch);
            }
    }

    // Store the gradients of keys begin..end-1: the sums over the chunks whose ranges hold them.
    void store_keys(int64_t b, int64_t kv, const char *key_sums, const std::vector<Chunk> &chunks,
                    int64_t begin, int64_t end) const {
        int64_t first_chunk = 0, end_chunk, count = (int64_t)chunks.size();
        while (first_chunk < count && chunks[first_chunk].key_range.end <= begin) first_chunk++;
        end_chunk = first_chunk;
        while (end_chunk < count && chunks[end_chunk].key_range.begin < end) end_chunk++;
        const int64_t stride = call.elements(sums.keys_bytes()), rows = end - begin;
        key_sums += first_chunk * sums.keys_bytes();
        call.kernels->store(dk.result(b, kv, begin), call.storage,
                            key_sums + call.bytes(begin * sizes.dk_cols), rows, call.head_size,
                            sizes.dk_cols, end_chunk - first_chunk, stride);
        call.kernels->store(dv.result(b, kv, begin), call.storage,
                            key_sums + sums.dk + call.bytes(begin * sizes.dv_cols), rows,
                            call.value_size, sizes.dv_cols, end_chunk - first_chunk, stride);
    }

    // Store the gradients of key head kv's tables, or of the table that all heads share. They are
    // sums over `parts` buffers, which lie part_bytes apart.
    void store_tables(int64_t kv, const char *table_sums, int64_t parts, int64_t part_bytes) const {
        for (int64_t g = 0; g < sums.tables; g++)
            call.kernels->store(call.table_result(dp, kv * call.group + g), call.storage,
                                table_sums + g * sums.dp, call.table.relative.rows, call.table_size,
                                sizes.dp_cols, parts, call.elements(part_bytes));
    }

    // Store the gradient of the bias: of each head, or summed over all heads.
    void store_bias() const {
        if (!bias_grad) return;
        const int64_t rows = call.bias.rows, results = call.bias_per_head() ? call.heads : 1;
        const int64_t parts = call.heads / results * bias_parts();
        for (int64_t h = 0; h < results; h++)
            call.kernels->store(call.bias_result(dbias, h), call.is_double() ? WPE_F64 : WPE_F32,
                                bias_sums.at(call.bytes(h * parts * rows)), 1, rows, rows, parts,
                                rows);
    }

    // Handle one key head after the other. Its chunks run in parallel.
    void by_chunk(int64_t count) const {
        const Memory key_sums(count, sums.keys_bytes());
        const Memory table_sums(count, sums.table_bytes(), true);
        for (int64_t pair = 0; pair < call.key_head_count(); pair++) {
            const int64_t kv = pair / call.batch, b = pair % call.batch;
            const std::vector<Chunk> parts = chunks(b, count);
            if (call.table_per_head() && b == 0 && pair)
                std::memset(table_sums.at(0), 0, count * sums.table_bytes());
            run_chunks(b, kv, parts, key_sums, table_sums);
            run_tasks(call.tiles(), 0, [&](int64_t t, char *) {
                store_keys(b, kv, key_sums.at(0), parts, t * WPE_KEY_BLOCK,
                           std::min((t + 1) * WPE_KEY_BLOCK, call.keys));
            });
            const bool last =
                call.table_per_head() ? b == call.batch - 1 : pair == call.key_head_count() - 1;
            if (p_grad && last) store_tables(kv, table_sums.at(0), count, sums.table_bytes());
        }
    }

    // Pack the keys and run the chunks. The packed keys are freed before results are stored.
    void run_chunks(int64_t b, int64_t kv, const std::vector<Chunk> &parts, const Memory &key_sums,
                    const Memory &table_sums) const {
        const Memory packed(1, call.bytes(sizes.packed));
        run_tasks(call.tiles(), 0,
                  [&](int64_t t, char *) { call.pack_tile(b, kv, t, packed.at(0), WPE_BACKWARD); });
        run_tasks((int64_t)parts.size(), call.bytes(sizes.workspace),
                  [&](int64_t c, char *scratch) {
                      run_chunk(b, kv, parts[c], packed.at(0), key_sums.at(c * sums.keys_bytes()),
                                table_sums.at(c * sums.table_bytes()), scratch);
                  });
    }

    // Handle bins of key heads in parallel. Each bin has its own sums of the tables.
    void by_key_head() const {
        const int64_t packed_bytes = call.bytes(sizes.packed), keys_bytes = sums.keys_bytes();
        int64_t bins = call.key_head_count();
        if (p_grad && call.table_per_head()) bins = call.key_heads;
        if (p_grad && !call.table_per_head()) {
            // So many bins that their tables need no more memory than q. The sizes are not the
            // padded ones: those depend on the variant, and then the order of sums would, too.
            const int64_t table = std::max<int64_t>(call.table.relative.rows * call.table_size, 1);
            bins =
                std::clamp<int64_t>(call.batch * call.heads * call.queries * call.head_size / table,
                                    1, std::min<int64_t>(bins, 32));
        }
        const Memory table_sums(p_grad ? bins : 0, sums.table_bytes(), true);
        const std::vector<Chunk> all{{0, blocks, {0, sizes.dk_rows}}};
        run_tasks(bins, packed_bytes + keys_bytes + call.bytes(sizes.workspace),
                  [&](int64_t bin, char *scratch) {
                      char *bin_sums = table_sums.at(p_grad ? bin * sums.table_bytes() : 0);
                      const int64_t pairs = call.key_head_count();
                      for (int64_t t = pairs * bin / bins; t < pairs * (bin + 1) / bins; t++) {
                          const int64_t kv = t / call.batch, b = t % call.batch;
                          call.pack_keys(b, kv, scratch, WPE_BACKWARD);
                          run_chunk(b, kv, all[0], scratch, scratch + packed_bytes, bin_sums,
                                    scratch + packed_bytes + keys_bytes);
                          store_keys(b, kv, scratch + packed_bytes, all, 0, call.keys);
                      }
                  });
        if (!p_grad) return;
        const bool per_head = call.table_per_head();
        for (int64_t kv = 0; kv < (per_head ? call.key_heads : 1); kv++)
            store_tables(kv, table_sums.at(kv * sums.table_bytes()), per_head ? 1 : bins,
                         sums.table_bytes());
    }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor out, Tensor lse,
    WPE_ATTENTION_PARAMETERS, bool p_grad, bool bias_grad) {
    WPE_CHECK(!p_grad || p, "p_grad=True needs a table p");
    WPE_CHECK(!bias_grad || bias, "bias_grad=True needs a bias");
    if (p_grad) zones.reset();
    Call call({WPE_ATTENTION_NAMES});
    call.check_gradients(grad_out, grad_lse, out, lse);
    Gradients result{new_like(q),
                     new_like(k),
                     new_like(v),
                     p_grad ? new_like(*p) : new_result(q, {0}),
                     q_rel ? new_like(*q_rel) : new_result(q, {0}),
                     bias_grad ? new_like(*bias) : new_result(q, {0})};
    if (p_grad) torch::stable::zero_(result.dp);
    if (bias_grad) torch::stable::zero_(result.dbias);
    if (call.empty() || call.keys == 0) {
        for (Tensor *t : {&result.dq, &result.dk, &result.dv, &result.dq_rel})
            torch::stable::zero_(*t);
    } else if (call.head_size > 0 || call.value_size > 0 || call.table_size > 0 || bias_grad) {
        lse = dense(lse);  // the kernels read it with stride 1
        if (grad_lse) grad_lse = dense(*grad_lse);
        call.read();
        call.pack_tables(WPE_BACKWARD);
        const Backward backward(call, grad_out, out, lse, grad_lse, result,
                                p_grad && call.table.relative.rows > 0,
                                bias_grad && call.bias.rows > 0);
        // if no query reaches the table, the gradient of q_rel is zero
        if (q_rel && !call.has_q_rel()) torch::stable::zero_(result.dq_rel);
        const int64_t chunks = backward.chunk_count();
        if (chunks > 1)
            backward.by_chunk(chunks);
        else
            backward.by_key_head();
        backward.store_bias();
    }
    return {result.dq, result.dk, result.dv, result.dp, result.dq_rel, result.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(wavepe, m) {
    m.def(
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse,"
        " " WPE_ATTENTION_SCHEMA
        ", bool p_grad=False, bool bias_grad=False)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dp, Tensor dq_rel, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(wavepe, CPU, m) { WPE_IMPL(m, attention_backward); }

}  // namespace wavepe
