// RMSNorm, SwiGLU and the rotary embedding with the KV write: one pass over each row.
#include "ops.h"

namespace slipstream {
namespace {

// Below this many elements one thread is faster: a parallel region costs a few microseconds.
constexpr int64_t PARALLEL_ELEMENTS = 32 * 1024;

// f(first row, last row) on as many threads as the elements pay for.
template <class F>
void over_rows(int64_t rows, int64_t width, const F& f) {
    const int threads = rows * width < PARALLEL_ELEMENTS ? 1 : usable_threads();
    if (threads <= 1) return f(int64_t(0), rows);
    const int64_t chunk = (rows + 4 * threads - 1) / (4 * threads);
    parallel_items((rows + chunk - 1) / chunk, threads, [&](int64_t i) {
        f(i * chunk, (i + 1) * chunk < rows ? (i + 1) * chunk : rows);
    });
}

// f(offset, lanes) for each 16 elements of a row, the last ones with fewer lanes.
template <class F>
inline void over_lanes(int64_t width, const F& f) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) f(i, LANES);
    if (i < width) f(i, int(width - i));
}

template <class T>
inline Vec load_some(const T* p, int n) {
    return n == LANES ? load(p) : load(p, n);
}
template <class T>
inline void store_some(T* p, Vec x, int n) {
    n == LANES ? store(p, x) : store(p, x, n);
}

// Four running sums, then a tree: an order that the width alone decides.
template <class T>
float sum_of_squares(const T* x, int64_t width) {
    Vec a = zero(), b = zero(), c = zero(), d = zero();
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        const Vec p = load(x + i), q = load(x + i + 16), r = load(x + i + 32), s = load(x + i + 48);
        a = fma(p, p, a);
        b = fma(q, q, b);
        c = fma(r, r, c);
        d = fma(s, s, d);
    }
    over_lanes(width - i, [&](int64_t j, int n) {
        const Vec p = load_some(x + i + j, n);
        a = fma(p, p, a);
    });
    return sum((a + b) + (c + d));
}

template <class T, class W>
inline void norm_row(const T* x, const W* weight, T* y, int64_t width, float eps) {
    const Vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps));
    over_lanes(width, [&](int64_t i, int n) {
        store_some(y + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
    });
}

template <class T>
inline void rotate_head(const T* x, const float* cos, const float* sin, T* y, int64_t half) {
    over_lanes(half, [&](int64_t i, int n) {
        const Vec low = load_some(x + i, n), high = load_some(x + half + i, n);
        const Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(y + i, low * c - high * s, n);
        store_some(y + half + i, high * c + low * s, n);
    });
}

}  // namespace

template <class T, class W>
void rms_norm(const T* x, const W* weight, T* y, int64_t rows, int64_t width, float eps) {
    over_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) norm_row(x + r * width, weight, y + r * width, width, eps);
    });
}

template <class T, class W>
void add_rms_norm(const T* x, T* residual, const W* weight, T* y, int64_t rows, int64_t width, float eps) {
    over_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            T* sum_row = residual + r * width;
            over_lanes(width, [&](int64_t i, int n) {
                const Vec added = load_some(sum_row + i, n) + load_some(x + r * width + i, n);
                store_some(sum_row + i, added, n);
            });
            norm_row(sum_row, weight, y + r * width, width, eps);
        }
    });
}

template <class T, class W>
void rms_norm_heads(T* qkv, const W* q_norm, const W* k_norm, int64_t rows, RopeShape shape, float eps) {
    const int64_t dim = shape.dim, width = (shape.heads + 2 * shape.kv_heads) * dim;
    over_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
                T* head = qkv + r * width + h * dim;
                norm_row(head, h < shape.heads ? q_norm : k_norm, head, dim, eps);
            }
    });
}

template <class T>
void swiglu(const T* gate_up, T* y, int64_t rows, int64_t width) {
    over_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* gate = gate_up + r * 2 * width;
            over_lanes(width, [&](int64_t i, int n) {
                const Vec g = load_some(gate + i, n), up = load_some(gate + width + i, n);
                const Vec silu = g / (splat(1.0f) + exp(zero() - g));
                store_some(y + r * width + i, silu * up, n);
            });
        }
    });
}

template <class T>
void rope_kv_write(const T* qkv, const float* cos, const float* sin, const int64_t* positions,
                   const int64_t* kv_rows, T* q, T* k_cache, T* v_cache, RopeShape shape) {
    const int64_t dim = shape.dim, half = dim / 2;
    const int64_t q_width = shape.heads * dim, kv_width = shape.kv_heads * dim;
    over_rows(shape.rows, q_width + 2 * kv_width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const T* row = qkv + r * (q_width + 2 * kv_width);
            const float *c = cos + positions[r] * half, *s = sin + positions[r] * half;
            T* k = k_cache + kv_rows[r] * kv_width;
            for (int64_t h = 0; h < q_width; h += dim) rotate_head(row + h, c, s, q + r * q_width + h, half);
            for (int64_t h = 0; h < kv_width; h += dim) rotate_head(row + q_width + h, c, s, k + h, half);
            std::memcpy(v_cache + kv_rows[r] * kv_width, row + q_width + kv_width, kv_width * sizeof(T));
        }
    });
}

template <class T, class W>
void latent_rope_write(const LatentRows<T>& x, const W* norm, float eps, const float* cos, const float* sin,
                       const int64_t* positions, const int64_t* kv_rows, T* cache) {
    const int64_t half = x.rotated / 2, width = x.rank + x.rotated;
    over_rows(x.batch * x.rows, width + x.heads * x.rotated, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const int64_t b = r / x.rows, t = r % x.rows;
            const float *c = cos + positions[r] * half, *s = sin + positions[r] * half;
            for (int64_t h = 0; h < x.heads; ++h) {
                T* head = x.q + b * x.q_batch + t * x.q_row + h * x.q_head;
                rotate_head(head, c, s, head, half);
            }
            const T* kv = x.kv + b * x.kv_batch + t * x.kv_row;
            T* at = cache + kv_rows[r] * width;
            norm_row(kv, norm, at, x.rank, eps);
            rotate_head(kv + x.rank, c, s, at + x.rank, half);
        }
    });
}

#define NORMS(T, W)                                                                  \
    template void rms_norm(const T*, const W*, T*, int64_t, int64_t, float);          \
    template void add_rms_norm(const T*, T*, const W*, T*, int64_t, int64_t, float); \
    template void rms_norm_heads(T*, const W*, const W*, int64_t, RopeShape, float); \
    template void latent_rope_write(const LatentRows<T>&, const W*, float, const float*, const float*, const int64_t*, \
                                    const int64_t*, T*);
NORMS(float, float)
NORMS(float, bf16)
NORMS(bf16, float)
NORMS(bf16, bf16)
#define OTHERS(T)                                                                                       \
    template void swiglu(const T*, T*, int64_t, int64_t);                                                \
    template void rope_kv_write(const T*, const float*, const float*, const int64_t*, const int64_t*, T*, \
                                T*, T*, RopeShape);
OTHERS(float)
OTHERS(bf16)

}  // namespace slipstream
