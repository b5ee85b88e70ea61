// The rows of x in the form that the tiles read: copied, rounded or quantised once, shared by every panel.
//
//   float32   float [K]
//   bfloat16  bfloat16 [K rounded up to even]
//   q8_0      [K / 32]{ int8 [32], float scale, int32 -128 * sum }    (the weights are stored as q + 128)
//   q4_1      [K / 32]{ int8 [32], float scale, float scale * sum }
#pragma once

#include <cfloat>
#include <cmath>

#include "linear.h"
#include "simd.h"

namespace slipstream {

SLIPSTREAM_INLINE int64_t row_bytes(int32_t format, int64_t k) {
    switch (format) {
        case FLOAT32: return k * 4;
        case BFLOAT16: return (k + 1) / 2 * 4;
        default: return k / GROUP * QUANTISED_GROUP;
    }
}

// An odd number of cache lines: rows at a power-of-two distance would share the L1's few ways of one set.
SLIPSTREAM_INLINE int64_t row_stride(int32_t format, int64_t k) {
    return ((row_bytes(format, k) + 63) / 64 | 1) * 64;
}

template <bool FromBfloat16>
SLIPSTREAM_INLINE f32x16 load_x(const void* x, int64_t i) {
    if constexpr (FromBfloat16) return load_bfloat16(static_cast<const uint16_t*>(x) + i);
    return load<f32x16>(static_cast<const float*>(x) + i);
}

template <bool FromBfloat16>
SLIPSTREAM_INLINE float load_x_one(const void* x, int64_t i) {
    if constexpr (FromBfloat16) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(x)[i]) << 16;
        return load<float>(&bits);
    }
    return static_cast<const float*>(x)[i];
}

template <bool FromBfloat16>
void prepare_float32(const void* x, int64_t k, uint8_t* row) {
    float* out = reinterpret_cast<float*>(row);
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) store(out + i, load_x<FromBfloat16>(x, i));
    for (; i < k; ++i) out[i] = load_x_one<FromBfloat16>(x, i);
}

template <bool FromBfloat16>
void prepare_bfloat16(const void* x, int64_t k, uint8_t* row) {
    uint16_t* out = reinterpret_cast<uint16_t*>(row);
    if (k % 2) out[k] = 0;
    if constexpr (FromBfloat16) {
        std::memcpy(out, x, static_cast<size_t>(2 * k));
        return;
    }
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) store(out + i, to_bfloat16(load_x<FromBfloat16>(x, i)));
    for (; i < k; ++i) out[i] = to_bfloat16(broadcast(load_x_one<FromBfloat16>(x, i)))[0];
}

SLIPSTREAM_INLINE uint32_t max_lane(u32x16 v) {
    uint32_t best = 0;
    for (int i = 0; i < 16; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

SLIPSTREAM_INLINE int32_t sum_lanes(i32x16 v) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += v[i];
    return sum;
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

// One group of 32: int8 to `q`; returns the scale and the sum of what was written.
template <bool FromBfloat16>
SLIPSTREAM_INLINE float quantise_group(const void* x, int64_t i, uint8_t* q, int32_t* sum) {
    const f32x16 a = load_x<FromBfloat16>(x, i), b = load_x<FromBfloat16>(x, i + 16);
    // Compared as integers, an infinity is above every number and a NaN above that: neither is lost.
    const u32x16 abs_a = (u32x16)a & 0x7FFFFFFFu, abs_b = (u32x16)b & 0x7FFFFFFFu;
    const uint32_t top = max_lane(abs_a > abs_b ? abs_a : abs_b);
    float scale = load<float>(&top) / 127.0f;
    float inverse = 1.0f / scale;
    const bool is_finite = top < 0x7F800000u;
    if (!is_finite) scale = NAN;  // the whole row's result is NaN, and no other row's
    if (scale < FLT_MIN) scale = 0.0f;  // 1 / scale would overflow
    if (!is_finite || scale == 0.0f) inverse = 0.0f;
    const i32x16 none = {};
    const i32x16 qa = is_finite ? round_to_int(a * inverse) : none, qb = is_finite ? round_to_int(b * inverse) : none;
    store(q, __builtin_convertvector(qa, i8x16));
    store(q + 16, __builtin_convertvector(qb, i8x16));
    *sum = sum_lanes(qa + qb);
    return scale;
}

template <bool FromBfloat16>
void prepare_quantised(const void* x, int64_t k, bool has_minimum, uint8_t* row) {
    for (int64_t i = 0; i < k; i += GROUP, row += QUANTISED_GROUP) {
        int32_t sum;
        const float scale = quantise_group<FromBfloat16>(x, i, row, &sum);
        store(row + GROUP, scale);
        if (has_minimum)
            store(row + GROUP + 4, scale * static_cast<float>(sum));
        else
            store(row + GROUP + 4, -128 * sum);
    }
}

template <bool FromBfloat16>
void prepare_row(int32_t format, const void* x, int64_t k, uint8_t* row) {
    switch (format) {
        case FLOAT32: return prepare_float32<FromBfloat16>(x, k, row);
        case BFLOAT16: return prepare_bfloat16<FromBfloat16>(x, k, row);
        default: return prepare_quantised<FromBfloat16>(x, k, format == Q4_1, row);
    }
}

}  // namespace slipstream
