/* rope.cu: rotate the pairs of q and k by a table, in one launch. METHODS 2 [R].
 *
 * A thread handles V pairs at one position, in WPE_CUDA_HEADS heads, and reads their cosines and
 * sines once. V = 1 takes any strides. With a larger V, V elements are whole words of 16 bytes. */
#include "device.h"

/* The elements of one head that a thread handles: V from `first` on and V from `second` on. In the
 * half-split layout these are the a and the b of V pairs. In the interleaved layout each are V / 2
 * whole pairs. second < 0: V elements from `first` on are copied. */
struct Chunk {
    int64_t first, second;
};

/* Load the chunk of each head, rotate and store it. All loads come before the first store, so that
 * many accesses are in flight at once. */
template <typename T, int V, typename Rotate>
DEVICE void each_head(const wpe_cuda_rope_tensor &tensor, int64_t b, int64_t position, int64_t head,
                      Chunk at, Rotate rotate) {
    const T *x = (const T *)tensor.x + b * tensor.x_stride[0] + position * tensor.x_stride[2];
    T *out = (T *)tensor.out + b * tensor.out_stride[0] + position * tensor.out_stride[2];
    const bool both = at.second >= 0;
    T e[WPE_CUDA_HEADS][2 * V];
    UNROLL
    for (int h = 0; h < WPE_CUDA_HEADS; h++)
        if (head + h < tensor.heads) {
            const T *from = x + (head + h) * tensor.x_stride[1];
            load<V>(e[h], from + at.first * tensor.x_stride[3]);
            if (both) load<V>(e[h] + V, from + at.second * tensor.x_stride[3]);
        }
    UNROLL
    for (int h = 0; h < WPE_CUDA_HEADS; h++)
        if (head + h < tensor.heads) {
            T *to = out + (head + h) * tensor.out_stride[1];
            if (both) rotate(e[h]);
            store<V>(to + at.first * tensor.out_stride[3], e[h]);
            if (both) store<V>(to + at.second * tensor.out_stride[3], e[h] + V);
        }
}

template <typename T, int V, bool INTERLEAVED>
DEVICE void rope_pairs(const wpe_cuda_rope &a, const wpe_cuda_rope_tensor &tensor, int64_t b,
                       int64_t position, int64_t head, int64_t pair) {
    typedef typename Real<T>::type real;
    real c[V], s[V];
    load<V>(c, (const real *)a.cos + b * a.cos_stride[0] + position * a.cos_stride[1] +
                   pair * a.cos_stride[2]);
    load<V>(s, (const real *)a.sin + b * a.sin_stride[0] + position * a.sin_stride[1] +
                   pair * a.sin_stride[2]);
    Chunk at = {pair, a.pairs + pair};
    if (INTERLEAVED) at = {2 * pair, 2 * pair + V};
    each_head<T, V>(tensor, b, position, head, at, [&](T *e) {
        UNROLL
        for (int v = 0; v < V; v++) {
            T *even = e + (INTERLEAVED ? 2 * v : v), *odd = e + (INTERLEAVED ? 2 * v + 1 : V + v);
            const real x = widened(*even), y = widened(*odd), sine = a.inverse ? -s[v] : s[v];
            narrow(x * c[v] - y * sine, even);
            narrow(y * c[v] + x * sine, odd);
        }
    });
}

template <typename T, int V>
DEVICE void rope_chunk(const wpe_cuda_rope &a, const wpe_cuda_rope_tensor &tensor, int64_t b,
                       int64_t position, int64_t head, int64_t chunk) {
    const int64_t rotated = a.pairs / V;
    if (chunk < rotated && a.interleaved)
        rope_pairs<T, V, true>(a, tensor, b, position, head, chunk * V);
    else if (chunk < rotated)
        rope_pairs<T, V, false>(a, tensor, b, position, head, chunk * V);
    else if (tensor.out != tensor.x) /* in an in-place call the rest is already there */
        each_head<T, V>(tensor, b, position, head, {(chunk + rotated) * V, -1}, [](T *) {});
}

DEVICE int64_t groups_of(const wpe_cuda_rope_tensor &x) {
    return (x.heads + WPE_CUDA_HEADS - 1) / WPE_CUDA_HEADS;
}

/* The grid: x counts the chunks of all positions, y the groups of heads (q's, then k's), z the
 * batch rows. */
template <typename T, int V>
DEVICE void rope(const wpe_cuda_rope &a) {
    const int64_t chunks = (a.head_size - a.pairs) / V, q_groups = groups_of(a.tensors[0]);
    for (int64_t b = blockIdx.z; b < a.batch; b += gridDim.z)
        for (int64_t g = blockIdx.y; g < q_groups + groups_of(a.tensors[1]); g += gridDim.y)
            for (int64_t i = thread_index(); i < a.length * chunks; i += thread_count()) {
                const int64_t head = (g < q_groups ? g : g - q_groups) * WPE_CUDA_HEADS;
                rope_chunk<T, V>(a, a.tensors[g >= q_groups], b, i / chunks, head, i % chunks);
            }
}

#define ROPE(T, name)                                     \
    KERNEL(rope_##name, wpe_cuda_rope) { rope<T, 1>(a); } \
    KERNEL(rope_##name##_wide, wpe_cuda_rope) { rope<T, 16 / sizeof(T)>(a); }
ROPE(f16, f16)
ROPE(bf16, bf16)
ROPE(float, f32)
ROPE(double, f64)
