// The CPU kernels apart from the linear ones, on raw pointers. Contracts: the references in slipstream/kernels/*.py.
// Arguments were checked by the bindings; nothing here can fail.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <atomic>
#include <cstdint>

#include "vec.h"

namespace slipstream {

// Rows [rows, width], contiguous. T is float or bf16, W the weight's type.
template <class T, class W>
void rms_norm(const T* x, const W* weight, T* y, int64_t rows, int64_t width, float eps);
template <class T, class W>
void add_rms_norm(const T* x, T* residual, const W* weight, T* y, int64_t rows, int64_t width, float eps);
template <class T>
void swiglu(const T* gate_up, T* y, int64_t rows, int64_t width);

struct RopeShape {
    int64_t rows, heads, kv_heads, dim;
};
// qkv [rows, (heads + 2 kv_heads) * dim]: q's and k's heads are normed in place.
template <class T, class W>
void rms_norm_heads(T* qkv, const W* q_norm, const W* k_norm, int64_t rows, RopeShape shape, float eps);
template <class T>
void rope_kv_write(const T* qkv, const float* cos, const float* sin, const int64_t* positions,
                   const int64_t* kv_rows, T* q, T* k_cache, T* v_cache, RopeShape shape);

// q: the first rotated element of a row's first head; kv: a latent of `rank`, then its rotated key. Strides in elements.
template <class T>
struct LatentRows {
    T* q;
    const T* kv;
    int64_t q_batch, q_row, q_head, kv_batch, kv_row;
    int64_t batch, rows, heads, rank, rotated;
};
template <class T, class W>
void latent_rope_write(const LatentRows<T>& x, const W* norm, float eps, const float* cos, const float* sin,
                       const int64_t* positions, const int64_t* kv_rows, T* cache);

struct AttentionShape {
    int64_t batch, rows, heads, kv_heads, dim;
    int64_t table_width, ancestors_width;
};
struct AttentionIndex {
    const int64_t* table;      // [S, table_width]
    const int64_t* slots;      // [batch]
    const int64_t* prefix;     // [batch]
    const int64_t* depth;      // [batch, rows], null for a chain
    const int64_t* ancestors;  // [batch, rows, ancestors_width], null for a chain
};
template <class T>
void attention(const T* q, const T* k_cache, const T* v_cache, T* out, const AttentionIndex& index,
               const AttentionShape& shape, float scale);

struct Routing {
    int64_t experts, per_token, groups, top_groups;
    bool is_softmax, normalises;
    float scale;
};
// logits [rows, experts], bias [experts] or null -> chosen and weights [rows, per_token].
void route(const float* logits, const float* bias, const Routing& routing, int64_t rows, int64_t* chosen,
           float* weights);
// The rows of every expert together: `order` holds (row * per_token + place), `offsets` [experts + 1].
void sort_by_expert(const int64_t* chosen, int64_t pairs, int64_t experts, int64_t* order, int64_t* offsets);
// y [rows, width]: the sum over places, in their order, of outputs [rows, places, width] times weights [rows, places].
template <class T>
void weighted_sum(const float* outputs, const float* weights, T* y, int64_t rows, int64_t places, int64_t width);

void argmax(const float* logits, int64_t* ids, int64_t rows, int64_t width);

struct SampleSettings {
    const float* temperature;
    const int64_t* top_k;
    const float* top_p;
    const int64_t* seed;
    const int64_t* position;
};
void sample(const float* logits, const SampleSettings& settings, int64_t* ids, int64_t rows, int64_t width);

// One request: the text's length and the longest suffix; returns the length matched, 0 for none.
int64_t lookup(const int64_t* text, int64_t length, int64_t max_suffix, int64_t count, int64_t* draft);

#ifdef _OPENMP
inline int usable_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
#else
inline int usable_threads() { return 1; }
#endif

// Calls f(item) for every item; threads take the next free one, so that a busy core does not hold the others up.
template <class F>
void parallel_items(int64_t items, int threads, const F& f) {
    if (threads > items) threads = int(items);
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) f(item);
        return;
    }
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    for (int64_t item = next++; item < items; item = next++) f(item);
}

}  // namespace slipstream
