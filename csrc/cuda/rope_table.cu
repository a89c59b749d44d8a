/* rope_table.cu: cos and sin of position * inv_freq, with the same formulas as on the CPU. METHODS
 * 2 [R]. */
#include "device.h"

template <typename T>
DEVICE void rope_table(const wpe_cuda_rope_table &a) {
    const int64_t pairs = a.end - a.begin;
    for (int64_t i = thread_index(); i < a.rows * pairs; i += thread_count()) {
        const int64_t row = i / pairs, pair = a.begin + i % pairs, to = row * a.pairs + pair;
        const double position = (double)a.positions[row * a.axes + a.axis], f = a.inv_freq[pair];
        double hi = (float)position * (float)f, lo = 0, s, c;
        if (!a.hf) exact_product(position, f, &hi, &lo);
        sincos_sum(hi, lo, &s, &c);
        round_once(c * a.factor, (T *)a.cos + to);
        round_once(s * a.factor, (T *)a.sin + to);
    }
}

KERNEL(rope_table_f16, wpe_cuda_rope_table) { rope_table<f16>(a); }
KERNEL(rope_table_bf16, wpe_cuda_rope_table) { rope_table<bf16>(a); }
KERNEL(rope_table_f32, wpe_cuda_rope_table) { rope_table<float>(a); }
KERNEL(rope_table_f64, wpe_cuda_rope_table) { rope_table<double>(a); }
