/* relative_bias.cu: the linear map from t = q p^T to the relative term, and its transpose. torch
 * computes q p^T. METHODS 1 and 3 [W][S]. */
#include "device.h"

/* This kernel only copies. So T may be any type of the right size. */
template <typename T>
DEVICE void skew(const wpe_cuda_skew &a) {
    for (int64_t n = thread_index(); n < a.batch * a.queries * a.keys; n += thread_count()) {
        const int64_t row = n / a.keys, j = n - row * a.keys, i = row % a.queries;
        int64_t c = i + a.shift - j;
        if (a.beyond == WPE_EDGE) c = c < 0 ? 0 : c < a.rows ? c : a.rows - 1;
        ((T *)a.out)[n] = c >= 0 && c < a.rows ? ((const T *)a.in)[row * a.rows + c] : T();
    }
}

KERNEL(skew_f32, wpe_cuda_skew) { skew<uint32_t>(a); }
KERNEL(skew_f64, wpe_cuda_skew) { skew<uint64_t>(a); }

/* Each element of t is the sum over the keys that read it. That is one key, and with WPE_EDGE also
 * all keys beyond, if the element lies in the first or last column. */
template <typename T>
DEVICE void unskew(const wpe_cuda_skew &a) {
    for (int64_t n = thread_index(); n < a.batch * a.queries * a.rows; n += thread_count()) {
        const int64_t row = n / a.rows, c = n - row * a.rows, i = row % a.queries;
        const T *skewed = (const T *)a.in + row * a.keys;
        /* the key that reads column c; later keys read earlier columns */
        const int64_t j = i + a.shift - c;
        T sum = j >= 0 && j < a.keys ? skewed[j] : T();
        if (a.beyond == WPE_EDGE && c == 0)
            for (int64_t k = j < -1 ? 0 : j + 1; k < a.keys; k++) sum += skewed[k];
        if (a.beyond == WPE_EDGE && c == a.rows - 1)
            for (int64_t k = 0; k < j && k < a.keys; k++) sum += skewed[k];
        ((T *)a.out)[n] = sum;
    }
}

KERNEL(unskew_f32, wpe_cuda_skew) { unskew<float>(a); }
KERNEL(unskew_f64, wpe_cuda_skew) { unskew<double>(a); }
