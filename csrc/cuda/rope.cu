/* rope.cu: rotates pairs of q and k by a table, in one launch. METHODS 2 [R].
 *
 * A thread takes V pairs at one position of WPE_CUDA_HEADS heads, and reads their cosines and sines
 * once. V = 1: any strides; else every V elements are whole words of 16 bytes. */
#include "device.h"

/* Where a thread's elements lie in a head: V at `first` and V at `second`, which are the first and
 * the second ones of V pairs, or, interleaved, V / 2 pairs each. No second: V that are copied. */
struct Chunk {
    int64_t first, second;
};

/* Loads for all heads before the first store, so that many accesses are under way at once. */
template <typename T, int V, typename Rotate>
DEVICE void each_head(const wpe_cuda_rope_tensor &of, int64_t b, int64_t position, int64_t head,
                      Chunk at, Rotate rotate) {
    const T *x = (const T *)of.x + b * of.x_stride[0] + position * of.x_stride[2];
    T *out = (T *)of.out + b * of.out_stride[0] + position * of.out_stride[2];
    const bool both = at.second >= 0;
    T e[WPE_CUDA_HEADS][2 * V];
    UNROLL
    for (int h = 0; h < WPE_CUDA_HEADS; h++)
        if (head + h < of.heads) {
            const T *from = x + (head + h) * of.x_stride[1];
            load<V>(e[h], from + at.first * of.x_stride[3]);
            if (both) load<V>(e[h] + V, from + at.second * of.x_stride[3]);
        }
    UNROLL
    for (int h = 0; h < WPE_CUDA_HEADS; h++)
        if (head + h < of.heads) {
            T *to = out + (head + h) * of.out_stride[1];
            if (both) rotate(e[h]);
            store<V>(to + at.first * of.out_stride[3], e[h]);
            if (both) store<V>(to + at.second * of.out_stride[3], e[h] + V);
        }
}

template <typename T, int V, bool INTERLEAVED>
DEVICE void rope_pairs(const wpe_cuda_rope &a, const wpe_cuda_rope_tensor &of, int64_t b,
                       int64_t position, int64_t head, int64_t pair) {
    typedef typename Real<T>::type real;
    real c[V], s[V];
    load<V>(c, (const real *)a.cos + b * a.cos_stride[0] + position * a.cos_stride[1] +
                   pair * a.cos_stride[2]);
    load<V>(s, (const real *)a.sin + b * a.sin_stride[0] + position * a.sin_stride[1] +
                   pair * a.sin_stride[2]);
    Chunk at = {pair, a.pairs + pair};
    if (INTERLEAVED) at = {2 * pair, 2 * pair + V};
    each_head<T, V>(of, b, position, head, at, [&](T *e) {
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
DEVICE void rope_chunk(const wpe_cuda_rope &a, const wpe_cuda_rope_tensor &of, int64_t b,
                       int64_t position, int64_t head, int64_t chunk) {
    const int64_t rotated = a.pairs / V;
    if (chunk < rotated && a.interleaved)
        rope_pairs<T, V, true>(a, of, b, position, head, chunk * V);
    else if (chunk < rotated)
        rope_pairs<T, V, false>(a, of, b, position, head, chunk * V);
    else if (of.out != of.x) /* in place the tail is where it belongs */
        each_head<T, V>(of, b, position, head, {(chunk + rotated) * V, -1}, [](T *) {});
}

DEVICE int64_t groups_of(const wpe_cuda_rope_tensor &x) {
    return (x.heads + WPE_CUDA_HEADS - 1) / WPE_CUDA_HEADS;
}

/* x: chunks of all positions; y: groups of heads, those of q first; z: batch rows. */
template <typename T, int V>
DEVICE void rope(const wpe_cuda_rope &a) {
    const int64_t chunks = (a.head_size - a.pairs) / V, of_q = groups_of(a.of[0]);
    for (int64_t b = blockIdx.z; b < a.batch; b += gridDim.z)
        for (int64_t g = blockIdx.y; g < of_q + groups_of(a.of[1]); g += gridDim.y)
            for (int64_t i = first_thread(); i < a.length * chunks; i += thread_count()) {
                const int64_t head = (g < of_q ? g : g - of_q) * WPE_CUDA_HEADS;
                rope_chunk<T, V>(a, a.of[g >= of_q], b, i / chunks, head, i % chunks);
            }
}

#define ROPE(T, name)                                     \
    KERNEL(rope_##name, wpe_cuda_rope) { rope<T, 1>(a); } \
    KERNEL(rope_##name##_wide, wpe_cuda_rope) { rope<T, 16 / sizeof(T)>(a); }
ROPE(f16, f16)
ROPE(bf16, bf16)
ROPE(float, f32)
ROPE(double, f64)
