// attention.h: the checked arguments of an attention call as the kernels take them, and its tasks.
#pragma once

#include <atomic>
#include <cstring>

#include "common.h"

// Of both operators, in the schema; zones are pairs of tensors.
#define WPE_ATTENTION_ARGUMENTS                                                            \
    "Tensor q, Tensor k, Tensor v, Tensor? p=None, SymInt first=0, str beyond=\"zero\","   \
    " Tensor? q_rel=None, Tensor? slopes=None, bool causal=True, SymInt? window=None,"     \
    " float? softcap=None, float? scale=None, Tensor? offset=None, Tensor? key_mask=None," \
    " Tensor? segments=None, Tensor? mask=None, float dropout_p=0.0, Tensor? seed=None,"   \
    " Tensor[]? zones=None"

namespace wavepe {

// Aligned scratch memory; zero: cleared, and taken from the system only where it is written.
class Memory {
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
    char *first;

  public:
    explicit Memory(int64_t bytes, bool zero = false) {
        const int64_t padded = bytes + 128;
        memory.reset(static_cast<char *>(zero ? std::calloc(padded, 1) : std::malloc(padded)));
        WPE_CHECK(memory, "out of memory: attention needs ", bytes, " bytes of scratch");
        first = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
#ifdef WPE_POISON  // the sanitizer build: what is read before it is written is NaN
        if (!zero) std::memset(memory.get(), 0xff, padded);
#endif
    }
    char *at(int64_t byte) const { return first + byte; }
};

// task(number, scratch) for 0..count-1 on torch's threads, each thread taking the next one.
template <typename Task>
void run_tasks(int64_t count, int64_t scratch_bytes, const Task &task) {
    const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
    if (count <= 0) return;
    const Memory scratch(threads * scratch_bytes);
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

// Which keys a mask over (B|1, n) leaves: a range where it is one, else the mask itself.
struct KeyMask {
    const uint8_t *data = nullptr;
    int64_t stride = 0, first = 0, end = 0;
};

struct AttentionArguments {
    Tensor q, k, v;
    std::optional<Tensor> p;
    int64_t first;
    std::string beyond;
    std::optional<Tensor> q_rel, slopes;
    bool causal;
    std::optional<int64_t> window;
    std::optional<double> softcap, scale;
    std::optional<Tensor> offset, key_mask, segments, mask;
    double dropout_p;
    std::optional<Tensor> seed;
    std::vector<Tensor> zones;
};

// The arguments of a call, checked and packed.
class Call {
  public:
    // pack: the table, too, which decode reads as it lies.
    Call(AttentionArguments arguments, bool pack);

    int64_t batch, heads, key_heads, group, queries, keys, head_size, value_size;
    int storage;
    wpe_relative relative{};  // of the first head; rows 0: no table
    int64_t first_row = 0;    // of p that a query can reach: relative holds rows from it on
    const wpe_attention_kernels *kernels;

    int64_t pairs() const { return batch * key_heads; }
    bool is_double() const { return storage == WPE_F64; }
    ScalarType own_type() const { return is_double() ? ScalarType::Double : ScalarType::Float; }
    int64_t bytes(int64_t elements) const { return elements * (is_double() ? 8 : 4); }
    int64_t elements(int64_t bytes) const { return bytes / (is_double() ? 8 : 4); }
    bool table_per_head() const { return given.p && given.p->dim() == 3; }
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
    void check_gradients(const Tensor &grad_out, const std::optional<Tensor> &grad_lse,
                         const Tensor &out, const Tensor &lse) const;

  private:
    AttentionArguments given;
    Heads q, k, v, r;
    std::vector<double> slope;
    uint64_t seed = 0;
    std::vector<int64_t> offset, segment, run_begin, run_end;
    std::vector<KeyMask> key_mask;
    std::vector<wpe_relative> tables;  // one, or one a head
    std::vector<wpe_zone> zones;
    std::unique_ptr<Memory> packed;

    void check_tensors() const;
    void check_options() const;
    void read_offsets();
    void read_key_mask();
    void read_segments();
    void pack_tables(bool pack);
    void pack_zones();
};

}  // namespace wavepe
