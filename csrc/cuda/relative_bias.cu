/* relative_bias.cu: the linear map from t = q p^T to the relative term, and its transpose. torch
 * computes q p^T. METHODS 1 and 3 [W][S]. */
#include "device.h"

/* Write every row of the output, V elements at a time. V = 1 takes any row; with a larger V, V
 * elements are a word of 16 bytes, and rows of the output are whole words.
 * Shifts and masks give the place of a thread, because a division of 64 bits takes as long as the
 * copy of a word. This kernel only copies, so T may be any type of the right size. */
template <typename T, int V>
DEVICE void skew(const wpe_cuda_skew &a) {
    const int64_t words = a.to / V, lanes = (int64_t)1 << a.lanes;
    for (int64_t b = blockIdx.y; b < a.batch; b += gridDim.y)
        for (int64_t n = thread_index(); n < a.queries << a.lanes; n += thread_count()) {
            const int64_t i = n >> a.lanes, row = b * a.queries + i;
            const T *in = (const T *)a.in + row * a.from;
            T *out = (T *)a.out + row * a.to;
            for (int64_t word = n & (lanes - 1); word < words; word += lanes) {
                T e[V];
                UNROLL
                for (int v = 0; v < V; v++) {
                    int64_t c = i + a.shift - word * V - v;
                    if (a.beyond == WPE_EDGE) c = c < 0 ? 0 : c < a.from ? c : a.from - 1;
                    e[v] = c >= 0 && c < a.from ? in[c] : T();
                }
                store<V>(out + word * V, e);
            }
        }
}

#define SKEW(T, name)                                     \
    KERNEL(skew_##name, wpe_cuda_skew) { skew<T, 1>(a); } \
    KERNEL(skew_##name##_wide, wpe_cuda_skew) { skew<T, 16 / sizeof(T)>(a); }
SKEW(uint32_t, f32)
SKEW(uint64_t, f64)

/* With WPE_EDGE the first and the last element of a row of t are each read by all keys beyond, too.
 * WPE_CUDA_LANES neighbouring threads sum a row of skewed, each every WPE_CUDA_LANES-th key. Then a
 * thread adds the parts in order. So there are no atomics, and the order is always the same. */
template <typename T>
DEVICE void unskew_parts(const wpe_cuda_skew &a) {
    for (int64_t b = blockIdx.y; b < a.batch; b += gridDim.y)
        for (int64_t n = thread_index(); n < a.queries * WPE_CUDA_LANES; n += thread_count()) {
            const int64_t i = n / WPE_CUDA_LANES, lane = n % WPE_CUDA_LANES;
            const int64_t row = b * a.queries + i, of_first = i + a.shift;
            const int64_t of_last = of_first - (a.to - 1);
            const T *skewed = (const T *)a.in + row * a.from;
            T first = T(), last = T();
            for (int64_t k = lane; k < a.from; k += WPE_CUDA_LANES) {
                if (k > of_first) first += skewed[k];
                if (k < of_last) last += skewed[k];
            }
            T *parts = (T *)a.parts + 2 * (row * WPE_CUDA_LANES + lane);
            parts[0] = first;
            parts[1] = last;
        }
}

template <typename T>
DEVICE void unskew_edges(const wpe_cuda_skew &a) {
    for (int64_t b = blockIdx.y; b < a.batch; b += gridDim.y)
        for (int64_t i = thread_index(); i < a.queries; i += thread_count()) {
            const int64_t row = b * a.queries + i;
            const T *parts = (const T *)a.parts + 2 * row * WPE_CUDA_LANES;
            T *t = (T *)a.out + row * a.to, first = T(), last = T();
            UNROLL
            for (int lane = 0; lane < WPE_CUDA_LANES; lane++) {
                first += parts[2 * lane];
                last += parts[2 * lane + 1];
            }
            t[0] += first;
            t[a.to - 1] += last; /* which may be the same element */
        }
}

KERNEL(unskew_parts_f32, wpe_cuda_skew) { unskew_parts<float>(a); }
KERNEL(unskew_parts_f64, wpe_cuda_skew) { unskew_parts<double>(a); }
KERNEL(unskew_edges_f32, wpe_cuda_skew) { unskew_edges<float>(a); }
KERNEL(unskew_edges_f64, wpe_cuda_skew) { unskew_edges<double>(a); }
