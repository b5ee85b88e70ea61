// Sixteen lanes of float or int32, and the few operations on them that the kernels need.
//
// GCC's and clang's vector extensions carry whatever has no special instruction; the compiler lowers them to AVX2, NEON
// or SSE where there is no AVX-512. With SLIPSTREAM_PORTABLE defined no intrinsic is used at all: tests build it so.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(SLIPSTREAM_PORTABLE)
#define SLIPSTREAM_AVX512 1
#include <immintrin.h>
#endif

namespace slipstream {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define SLIPSTREAM_INLINE inline __attribute__((always_inline))

template <typename T>
SLIPSTREAM_INLINE T load(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

template <typename T>
SLIPSTREAM_INLINE void store(void* p, const T& v) {
    std::memcpy(p, &v, sizeof(T));
}

SLIPSTREAM_INLINE i32x16 broadcast(int32_t x) { return i32x16{} + x; }
// Through the bits: 0.0f + x is an addition that no compiler may leave out (x could be -0.0f).
SLIPSTREAM_INLINE f32x16 broadcast(float x) { return (f32x16)broadcast(load<int32_t>(&x)); }

SLIPSTREAM_INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#ifdef SLIPSTREAM_AVX512
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// acc + w[2i] * x[0] + w[2i + 1] * x[1] in every lane; w and x are pairs of bfloat16, the first in the low half.
SLIPSTREAM_INLINE f32x16 dot_bfloat16(f32x16 acc, u32x16 w, uint32_t x) {
#if defined(SLIPSTREAM_AVX512) && defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    const f32x16 low = (f32x16)(w << 16), high = (f32x16)(w & 0xFFFF0000u);
    acc = multiply_add(low, broadcast(load<float>(&(const uint32_t&)(x << 16))), acc);
    return multiply_add(high, broadcast(load<float>(&(const uint32_t&)(x & 0xFFFF0000u))), acc);
#endif
}

// acc + the dot of four unsigned bytes of w with four signed bytes of x in every lane; exact.
SLIPSTREAM_INLINE i32x16 dot_bytes(i32x16 acc, u32x16 w, uint32_t x) {
#if defined(SLIPSTREAM_AVX512) && defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)x));
#else
    for (int b = 0; b < 4; ++b)
        acc += (i32x16)((w >> (8 * b)) & 0xFFu) * (int32_t)(int8_t)(x >> (8 * b));
    return acc;
#endif
}

SLIPSTREAM_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// Sixteen float16 at p; exact for every finite value, subnormal ones included.
SLIPSTREAM_INLINE f32x16 load_float16(const void* p) {
#ifdef SLIPSTREAM_AVX512
    return (f32x16)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)load<u16x16>(p));  // unmasked, g++ 12 warns
#else
    const u32x16 h = __builtin_convertvector(load<u16x16>(p), u32x16);
    const f32x16 magnitude = (f32x16)((h & 0x7FFFu) << 13) * 0x1p112f;  // the exponent's bias: 127 - 15
    return (f32x16)((u32x16)magnitude | ((h & 0x8000u) << 16));
#endif
}

SLIPSTREAM_INLINE f32x16 load_bfloat16(const void* p) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

// To bfloat16, to nearest, ties to even; a NaN stays one.
SLIPSTREAM_INLINE u16x16 to_bfloat16(f32x16 v) {
    const u32x16 bits = (u32x16)v;
    const u32x16 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const u32x16 is_nan = (u32x16)(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7FC0u & is_nan), u16x16);
}

// The nearest whole number, ties to even, for |v| < 2^22.
SLIPSTREAM_INLINE i32x16 round_to_int(f32x16 v) {
    const f32x16 magic = broadcast(0x1.8p23f);
    return (i32x16)(v + magic) - (i32x16)magic;
}

}  // namespace slipstream
