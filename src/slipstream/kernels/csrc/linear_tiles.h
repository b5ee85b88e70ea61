// The inner kernels: R rows times one panel of 32 outputs, all of K, the sums left in `out` [R][32].
//
// Every output has one accumulator lane that goes through k upwards: its bits depend on its row and weights alone,
// whatever R is and whoever computes the rest.
#pragma once

#include "linear.h"
#include "simd.h"

namespace slipstream {

// `x` points at the first prepared row; the next is `stride` bytes on. `steps`: K, pairs of K, or groups of 32.
using Tile = void (*)(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t steps, float* out);

// From four rows on, a step is so many instructions that the core cannot look ahead to the next loads by itself, and the
// hardware's prefetcher stays too near. Measured with 8 rows from memory on Zen 4: 8 KB ahead into the L2 hides the
// memory behind the arithmetic completely (1.25 to 1.5 times as fast), 4 KB or into the L1 does not; with one row any
// prefetch is useless or harmful. Panels follow each other, so running ahead of one's end fetches the next.
constexpr int64_t PREFETCH_BYTES = 8192;

template <int R>
SLIPSTREAM_INLINE void prefetch(const uint8_t* w) {
    if constexpr (R >= 4) __builtin_prefetch(w + PREFETCH_BYTES, 0, 2);
}

// The compiler would keep x's broadcasts of the first half for the second, in registers that it does not have.
SLIPSTREAM_INLINE void forget_loads() { asm volatile("" ::: "memory"); }

template <int R>
SLIPSTREAM_INLINE void store_tile(const f32x16 (&acc)[R][2], float* out) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        store(out + r * PANEL, acc[r][0]);
        store(out + r * PANEL + 16, acc[r][1]);
    }
}

template <int R>
void tile_float32(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t steps, float* out) {
    f32x16 acc[R][2] = {};
    for (int64_t k = 0; k < steps; ++k, w += 128) {
        prefetch<R>(w);
        prefetch<R>(w + 64);
        const f32x16 w0 = load<f32x16>(w), w1 = load<f32x16>(w + 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const f32x16 xv = broadcast(load<float>(x + r * stride + 4 * k));
            acc[r][0] = multiply_add(w0, xv, acc[r][0]);
            acc[r][1] = multiply_add(w1, xv, acc[r][1]);
        }
    }
    store_tile<R>(acc, out);
}

template <int R>
void tile_bfloat16(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t steps, float* out) {
    f32x16 acc[R][2] = {};
    for (int64_t k = 0; k < steps; ++k, w += 128) {
        prefetch<R>(w);
        prefetch<R>(w + 64);
        const u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const uint32_t xv = load<uint32_t>(x + r * stride + 4 * k);
            acc[r][0] = dot_bfloat16(acc[r][0], w0, xv);
            acc[r][1] = dot_bfloat16(acc[r][1], w1, xv);
        }
    }
    store_tile<R>(acc, out);
}

template <int R>
void tile_q8_0(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t steps, float* out) {
    f32x16 acc[R][2] = {};
    for (int64_t g = 0; g < steps; ++g, w += 1088, x += QUANTISED_GROUP) {
        prefetch<R>(w + 1024);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            forget_loads();
            i32x16 dot[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) dot[r] = broadcast(load<int32_t>(x + r * stride + GROUP + 4));
#pragma GCC unroll 8
            for (int quad = 0; quad < 8; ++quad) {
                prefetch<R>(w + h * 512 + quad * 64);
                const u32x16 wv = load<u32x16>(w + h * 512 + quad * 64);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
                    dot[r] = dot_bytes(dot[r], wv, load<uint32_t>(x + r * stride + quad * 4));
            }
            const f32x16 w_scale = load_float16(w + 1024 + h * 32);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const f32x16 scale = w_scale * broadcast(load<float>(x + r * stride + GROUP));
                acc[r][h] = multiply_add(to_float(dot[r]), scale, acc[r][h]);
            }
        }
    }
    store_tile<R>(acc, out);
}

template <int R>
void tile_q4_1(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t steps, float* out) {
    f32x16 acc[R][2] = {};
    for (int64_t g = 0; g < steps; ++g, w += 640, x += QUANTISED_GROUP) {
        prefetch<R>(w + 512);
        prefetch<R>(w + 576);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            forget_loads();
            i32x16 dot[R] = {};
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                prefetch<R>(w + h * 256 + pair * 64);
                const u32x16 both = load<u32x16>(w + h * 256 + pair * 64);
                const u32x16 low = both & 0x0F0F0F0Fu, high = (both >> 4) & 0x0F0F0F0Fu;
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const uint8_t* at = x + r * stride + pair * 8;
                    dot[r] = dot_bytes(dot[r], low, load<uint32_t>(at));
                    dot[r] = dot_bytes(dot[r], high, load<uint32_t>(at + 4));
                }
            }
            const f32x16 w_scale = load_float16(w + 512 + h * 32), minimum = load_float16(w + 576 + h * 32);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const f32x16 scale = w_scale * broadcast(load<float>(x + r * stride + GROUP));
                const f32x16 sum = broadcast(load<float>(x + r * stride + GROUP + 4));
                acc[r][h] = multiply_add(to_float(dot[r]), scale, acc[r][h]);
                acc[r][h] = multiply_add(minimum, sum, acc[r][h]);
            }
        }
    }
    store_tile<R>(acc, out);
}

}  // namespace slipstream
