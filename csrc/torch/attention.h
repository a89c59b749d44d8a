// attention.h: the checked arguments of an attention call as the kernels take them, and its tasks.
#pragma once

#include <atomic>
#include <cstring>

#include "common.h"

// The arguments of both operators: type, name, and schema. Zones are pairs of tensors.
#define WPE_ATTENTION_ARGUMENTS(FIRST, NEXT)                                \
    FIRST(Tensor, q, "Tensor q")                                            \
    NEXT(Tensor, k, "Tensor k")                                             \
    NEXT(Tensor, v, "Tensor v")                                             \
    NEXT(std::optional<Tensor>, p, "Tensor? p=None")                        \
    NEXT(int64_t, first, "SymInt first=0")                                  \
    NEXT(std::string, beyond, "str beyond=\"zero\"")                        \
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
    NEXT(int64_t, bias_first, "SymInt bias_first=0")                        \
    NEXT(std::string, bias_beyond, "str bias_beyond=\"zero\"")

// Three lists of them: of a schema, of a function's parameters, of their names.
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

// Aligned scratch memory; zero: cleared, and taken from the system only where it is written.
class Memory {
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
    char *first;

  public:
    Memory(int64_t parts, int64_t bytes_each, bool zero = false) {
        const int64_t bytes = std::min(product({parts, bytes_each}), ADDRESS_SPACE) + 128;
        memory.reset(static_cast<char *>(zero ? std::calloc(bytes, 1) : std::malloc(bytes)));
        WPE_CHECK(memory && bytes < ADDRESS_SPACE, running, ": out of memory: attention needs ",
                  parts, " x ", bytes_each, " bytes of scratch");
        first = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
#ifdef WPE_POISON  // the sanitizer build: what is read before it is written is NaN
        if (!zero) std::memset(memory.get(), 0xff, bytes);
#endif
    }
    char *at(int64_t byte) const { return first + byte; }
};

// task(number, scratch) for 0..count-1 on torch's threads, each thread taking the next one.
template <typename Task>
void run_tasks(int64_t count, int64_t needed_bytes, const Task &task) {
    const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
    if (count <= 0) return;
    const int64_t scratch_bytes = ceil_div(needed_bytes, 64) * 64;  // all threads' are aligned
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

// A tensor (B, H, rows, cols) of whose matrices kernels read and write.
struct Heads {
    char *data = nullptr;
    int64_t stride[4] = {0, 0, 0, 0}, item = 0;

    Heads() = default;
    explicit Heads(const Tensor &x)
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

// Head sizes are below: their squares count in the sizes of memory.
constexpr int64_t LARGEST_HEAD = int64_t{1} << 20;

// Which keys a mask over (B|1, n) leaves: a range where it is one, else the mask itself.
struct KeyMask {
    const uint8_t *data = nullptr;
    int64_t stride = 0, first = 0, end = 0;
};

struct AttentionArguments {
#define WPE_MEMBER(type, name, text) type name;
    WPE_ATTENTION_ARGUMENTS(WPE_MEMBER, WPE_MEMBER)
#undef WPE_MEMBER
};

// The arguments of a call, checked; and, once the results have their memory, read and packed.
class Call {
  public:
    explicit Call(AttentionArguments arguments);
    // Requires: not empty(). pack: the table, too, which decode reads as it lies.
    void read(bool pack);

    int64_t batch, heads, key_heads, group, queries, keys, head_size, value_size;
    int storage;
    wpe_relative relative{};  // of the first head; rows 0: no table
    int64_t first_row = 0;    // of p that a query can reach: relative holds rows from it on
    wpe_delta_bias bias{};    // of the first head; rows 0: none
    int64_t first_value = 0;  // of the given bias that a query can reach
    const wpe_attention_kernels *kernels;

    bool empty() const { return !batch || !heads || !queries; }
    int64_t pairs() const { return batch * key_heads; }
    bool is_double() const { return storage == WPE_F64; }
    ScalarType own_type() const { return is_double() ? ScalarType::Double : ScalarType::Float; }
    int64_t bytes(int64_t elements) const { return elements * (is_double() ? 8 : 4); }
    // A bound of the packed bytes of so many rows of a head, each padded.
    int64_t head_bytes(int64_t rows) const {
        return product({rows + 4096, head_size + value_size + 256, 8});
    }
    int64_t elements(int64_t bytes) const { return bytes / (is_double() ? 8 : 4); }
    bool table_per_head() const { return given.p && given.p->dim() == 3; }
    bool bias_per_head() const { return given.bias && given.bias->dim() == 2; }
    bool has_q_rel() const { return given.q_rel && relative.rows > 0; }
    wpe_attention_sizes sizes(wpe_pass pass) const {
        const wpe_attention a = head(0, 0);
        return kernels->sizes(&a, pass);
    }

    // The first row of head (b, h) in data that holds one element a query.
    template <typename Char>
    Char *row(Char *data, int64_t b, int64_t h) const {
        return data + bytes((b * heads + h) * queries);
    }

    wpe_attention head(int64_t b, int64_t h) const;
    // The keys of a key head, or a tile of them: of WPE_KEY_BLOCK keys, the last one shorter.
    void pack_keys(int64_t b, int64_t kv, void *packed, wpe_pass pass) const;
    void pack_tile(int64_t b, int64_t kv, int64_t tile, void *packed, wpe_pass pass) const;
    int64_t tiles() const { return ceil_div(keys, WPE_KEY_BLOCK); }
    // Rows of p of head h as they lie, for one query.
    wpe_matrix table(int64_t h) const;
    // Where the gradient of p of head h goes, in falling delta.
    wpe_matrix_out table_result(const Tensor &dp, int64_t h) const;
    // Where the gradient of the bias of head h goes, in rising delta.
    wpe_matrix_out bias_result(const Tensor &dbias, int64_t h) const;
    void check_gradients(const Tensor &grad_out, const std::optional<Tensor> &grad_lse,
                         const Tensor &out, const Tensor &lse) const;

  private:
    AttentionArguments given;
    Heads q, k, v, r;
    std::vector<double> slope;
    uint64_t seed = 0;
    std::vector<int64_t> offset, run_begin, run_end;
    Tensor segments;  // int64, dense
    bool runs = false;
    std::vector<KeyMask> key_mask;
    std::vector<wpe_relative> tables;  // one, or one a head
    std::vector<wpe_zone> zones;
    std::unique_ptr<Memory> packed;  // of the zones

    bool has_zones() const { return given.zones && !given.zones->empty(); }
    void check_tensors() const;
    void check_bias() const;
    void check_sizes() const;
    void check_options() const;
    void check_seed() const;
    void read_offsets();
    void read_key_mask();
    void read_segments();
    wpe_range reached(int64_t rows, int64_t first, int beyond) const;
    void read_bias();
    void read_tables(bool pack);
    void pack_tables();
    void pack_zones();
};

}  // namespace wavepe
