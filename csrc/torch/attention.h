// attention.h: the arguments of an attention call, checked and in the form of the kernels; and how
// its tasks run on threads.
#pragma once

#include <atomic>
#include <cstring>

#include "common.h"
#include "decoding.h"

// The arguments of both operators: type, name in C++, and schema. zones holds two tensors for each
// zone: its coefficients and its basis.
#define WPE_ATTENTION_ARGUMENTS(FIRST, NEXT)                                \
    FIRST(Tensor, q, "Tensor q")                                            \
    NEXT(Tensor, k, "Tensor k")                                             \
    NEXT(Tensor, v, "Tensor v")                                             \
    NEXT(std::optional<Tensor>, p, "Tensor? p=None")                        \
    NEXT(int64_t, first_delta, "SymInt first=0")                            \
    NEXT(String, beyond, "str beyond=\"zero\"")                             \
    NEXT(std::optional<Tensor>, q_rel, "Tensor? q_rel=None")                \
    NEXT(std::optional<Tensor>, slopes, "Tensor? slopes=None")              \
    NEXT(bool, causal, "bool causal=True")                                  \
    NEXT(std::optional<int64_t>, window, "SymInt? window=None")             \
    NEXT(std::optional<double>, softcap, "float? softcap=None")             \
    NEXT(std::optional<double>, scale, "float? scale=None")                 \
    NEXT(std::optional<Tensor>, offset, "Tensor? offset=None")              \
    NEXT(std::optional<Tensor>, key_mask, "Tensor? key_mask=None")          \
    NEXT(std::optional<Tensor>, segments, "Tensor? segments=None")          \
    NEXT(std::optional<Tensor>, mask, "Tensor? mask=None")                  \
    NEXT(double, dropout_p, "float dropout_p=0.0")                          \
    NEXT(std::optional<Tensor>, seed, "Tensor? seed=None")                  \
    NEXT(std::optional<std::vector<Tensor>>, zones, "Tensor[]? zones=None") \
    NEXT(std::optional<Tensor>, bias, "Tensor? bias=None")                  \
    NEXT(int64_t, bias_first_delta, "SymInt bias_first=0")                  \
    NEXT(String, bias_beyond, "str bias_beyond=\"zero\"")                   \
    NEXT(std::optional<Tensor>, sinks, "Tensor? sinks=None")

// Three lists of the arguments: for a schema, for the parameters of a function, for a call.
#define WPE_TEXT(type, name, text)           text
#define WPE_NEXT_TEXT(type, name, text)      ", " text
#define WPE_PARAMETER(type, name, text)      type name
#define WPE_NEXT_PARAMETER(type, name, text) , type name
#define WPE_NAME(type, name, text)           name
#define WPE_NEXT_NAME(type, name, text)      , name
#define WPE_ATTENTION_SCHEMA                 WPE_ATTENTION_ARGUMENTS(WPE_TEXT, WPE_NEXT_TEXT)
#define WPE_ATTENTION_PARAMETERS WPE_ATTENTION_ARGUMENTS(WPE_PARAMETER, WPE_NEXT_PARAMETER)
#define WPE_ATTENTION_NAMES      WPE_ATTENTION_ARGUMENTS(WPE_NAME, WPE_NEXT_NAME)

namespace wavepe {

// Scratch memory for `parts` parts, aligned to 64 bytes. With zero=true it is cleared, and the
// system provides a page only when something is written to it.
class Memory {
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
    char *start;

  public:
    Memory(int64_t parts, int64_t bytes_each, bool zero = false) {
        const int64_t bytes = std::min(product({parts, bytes_each}), ADDRESS_SPACE) + 128;
        memory.reset(static_cast<char *>(zero ? std::calloc(bytes, 1) : std::malloc(bytes)));
        WPE_CHECK(memory && bytes < ADDRESS_SPACE, current_operator,
                  ": out of memory: attention needs ", parts, " x ", bytes_each,
                  " bytes of scratch");
        start = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
#ifdef WPE_POISON  // sanitizer build: memory that is read before it is written holds NaN
        if (!zero) std::memset(memory.get(), 0xff, bytes);
#endif
    }
    char *at(int64_t byte) const { return start + byte; }
};

// Run task(number, scratch) for the numbers 0..count-1 on torch's threads. A thread that is done
// takes the next number. scratch holds needed_bytes, aligned to 64 bytes.
template <typename Task>
void run_tasks(int64_t count, int64_t needed_bytes, const Task &task) {
    const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
    if (count <= 0) return;
    const int64_t scratch_bytes = ceil_div(needed_bytes, 64) * 64;
    const Memory scratch(threads, scratch_bytes);
    if (threads == 1) {
        for (int64_t t = 0; t < count; t++) task(t, scratch.at(0));
        return;
    }
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
        for (int64_t t; (t = next.fetch_add(1)) < count;)
            task(t, scratch.at(begin * scratch_bytes));
    });
}

inline void check_same_dtype(const Tensor &q, const char *name, const Tensor &x) {
    check_cpu(name, x);
    WPE_CHECK(x.scalar_type() == q.scalar_type(), "q and ", name, " must have one dtype, got ",
              name_of(q.scalar_type()), " and ", name_of(x.scalar_type()));
}

// The matrices of a tensor (B, H, rows, cols): one for each head of each batch element.
struct HeadMatrices {
    char *data = nullptr;
    int64_t stride[4] = {0, 0, 0, 0}, item = 0;

    HeadMatrices() = default;
    explicit HeadMatrices(const Tensor &x)
        : data(static_cast<char *>(const_cast<void *>(x.const_data_ptr()))),
          item(item_size(x.scalar_type())) {
        const auto strides = x.strides();
        std::copy(strides.begin(), strides.end(), stride);
    }
    wpe_matrix matrix(int64_t b, int64_t h) const {
        return {data + (b * stride[0] + h * stride[1]) * item, stride[2], stride[3]};
    }
    wpe_matrix_out result(int64_t b, int64_t h, int64_t row = 0) const {
        return {data + (b * stride[0] + h * stride[1] + row * stride[2]) * item, stride[2],
                stride[3]};
    }
};

// Head sizes must be below this number, because sizes of memory contain their squares.
constexpr int64_t LARGEST_HEAD = int64_t{1} << 20;

// The keys that one row of a key mask leaves: a range of keys, and the mask itself (data) if the
// range does not say it all.
struct KeyMask {
    const uint8_t *data = nullptr;
    int64_t stride = 0, first_key = 0, end_key = 0;
};

struct AttentionArguments {
#define WPE_MEMBER(type, name, text) type name;
    WPE_ATTENTION_ARGUMENTS(WPE_MEMBER, WPE_MEMBER)
#undef WPE_MEMBER
};

// The arguments of a call. The constructor checks them. read() reads them; it runs after the
// results have been allocated.
class Call {
  public:
    // With paged=true k and v are pages of keys: (blocks, Hk, page, d) and (blocks, Hk, page, dv).
    explicit Call(AttentionArguments arguments, bool paged = false);
    // Requires: not empty().
    void read();
    // Set the most queries and keys of a request, for a call whose row holds several requests.
    void set_longest(int64_t most_queries, int64_t most_keys);

    int64_t batch, heads, key_heads, group, queries, keys, head_size, value_size;
    int64_t table_size;  // columns of p
    int storage;
    wpe_table table{};        // the rows of p that a query can reach; rows 0: no table
    int64_t first_row = 0;    // the first of them
    wpe_delta_bias bias{};    // the bias of head 0; rows 0: no bias
    int64_t first_value = 0;  // the first value of the bias that a query can reach
    const wpe_attention_kernels *kernels;

    bool empty() const { return !batch || !heads || !queries; }
    int64_t key_head_count() const { return batch * key_heads; }
    bool is_double() const { return storage == WPE_F64; }
    ScalarType compute_type() const { return is_double() ? ScalarType::Double : ScalarType::Float; }
    int64_t bytes(int64_t elements) const { return elements * (is_double() ? 8 : 4); }
    // Return an upper bound of the bytes that `rows` packed rows of a head need, with padding.
    int64_t head_bytes(int64_t rows) const {
        return product({rows + 4096, head_size + value_size + table_size + 256, 8});
    }
    int64_t elements(int64_t bytes) const { return bytes / (is_double() ? 8 : 4); }
    bool table_per_head() const { return given.p && given.p->dim() == 3; }
    bool bias_per_head() const { return given.bias && given.bias->dim() == 2; }
    // Return whether a call with these keys reads the zones of p, and not p itself.
    bool reads_zones(int64_t keys) const;
    bool has_q_rel() const { return given.q_rel && table.relative.rows > 0; }
    wpe_attention_sizes sizes(wpe_pass pass) const {
        const wpe_attention a = head(0, 0);
        return kernels->sizes(&a, pass);
    }

    // Return where head (b, h) begins in data with one element per query.
    template <typename Char>
    Char *head_row(Char *data, int64_t b, int64_t h) const {
        return data + bytes((b * heads + h) * queries);
    }

    // Return a head; its table is not packed unless pack_tables has run.
    wpe_attention head(int64_t b, int64_t h) const;
    // Pack all keys of a key head, or one tile of WPE_KEY_BLOCK keys. The last tile may be shorter.
    void pack_keys(int64_t b, int64_t kv, void *packed, wpe_pass pass) const;
    void pack_tile(int64_t b, int64_t kv, int64_t tile, void *packed, wpe_pass pass) const;
    int64_t tiles() const { return ceil_div(keys, WPE_KEY_BLOCK); }
    // Pack the tables of all heads.
    void pack_tables(wpe_pass pass);
    // Return where the table of head h begins, in bytes after that of head 0.
    int64_t table_shift(int64_t h) const {
        return table_per_head() ? h * given.p->stride(0) * q.item : 0;
    }
    // Return the rows of dp that get the gradient of head h's table, in falling delta.
    wpe_matrix_out table_result(const Tensor &dp, int64_t h) const;
    // Return the elements of dbias that get the gradient of head h's bias, in rising delta.
    wpe_matrix_out bias_result(const Tensor &dbias, int64_t h) const;
    // Check that the call leaves out what means nothing for one request of several.
    void check_ragged() const;
    void check_gradients(const Tensor &grad_out, const std::optional<Tensor> &grad_lse,
                         const Tensor &out, const Tensor &lse) const;

  private:
    AttentionArguments given;
    bool paged;
    HeadMatrices q, k, v, r;
    std::vector<double> slope, sink;
    uint64_t seed = 0;
    std::vector<int64_t> offset, run_begin, run_end;
    Tensor segments;    // int64, dense
    bool runs = false;  // each segment is one run of keys
    std::vector<KeyMask> key_mask;
    // The zones of `table`, and where each one is. A table without zones is one.
    std::vector<wpe_zone> zones, packed_zones;
    std::vector<wpe_zone_source> sources;
    std::vector<wpe_relative> tables;  // packed: one, or one for each head
    std::shared_ptr<Memory> packed;    // the memory of the tables

    bool has_zones() const { return given.zones && !given.zones->empty(); }
    void check_tensors() const;
    void check_bias() const;
    void check_sinks() const;
    void check_sizes() const;
    void check_options() const;
    void check_seed() const;
    void read_offsets();
    void read_key_mask();
    void read_segments();
    wpe_range reached(int64_t rows, int64_t first_delta, int beyond) const;
    void read_bias();
    void check_zones(int64_t rows) const;
    void read_table();
};

// Compute one part of the keys of the key heads begin..end-1, of `pairs` key heads. The task that
// completes a key head merges its parts: done[pair] counts them. result(head) returns where a query
// head's results go.
template <typename Result>
void decode_part(const wpe_decoding &d, int64_t part, int64_t begin, int64_t end, int64_t pairs,
                 char *sums, std::atomic<int64_t> *done, char *scratch, const Result &result) {
    const int64_t head_bytes = d.head_sums * d.item, part_sums = pairs * d.group * d.head_sums;
    wpe_decode_heads(&d, part, begin * d.group, end * d.group,
                     sums + part * part_sums * d.item + begin * d.group * head_bytes, scratch);
    for (int64_t pair = begin; pair < end; pair++) {
        if (done[pair].fetch_add(1) + 1 < d.parts) continue;
        for (int64_t head = pair * d.group; head < (pair + 1) * d.group; head++) {
            int64_t shift;
            const wpe_attention a = d.head(d.call, head, &shift);
            const auto [out, lse] = result(head);
            d.kernels->merge(&a, sums + head * head_bytes, d.parts, part_sums, out, lse);
        }
    }
}

}  // namespace wavepe
