// Sixteen float lanes, in AVX-512 or in plain loops (SLIPSTREAM_PORTABLE forces those): kernels are written once,
// on `Vec`, and so have one order of summation on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    !defined(SLIPSTREAM_PORTABLE)
#define SLIPSTREAM_AVX512 1
#include <immintrin.h>
#endif

namespace slipstream {

constexpr int LANES = 16;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &wide, 4);
    return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {  // to nearest, ties to even, NaN stays NaN: as torch rounds
    uint32_t u;
    std::memcpy(&u, &x, 4);
    y.bits = x != x ? uint16_t(0x7FC0) : uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

#ifdef SLIPSTREAM_AVX512

struct Vec {
    __m512 v;
};

inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec widen(__m256i half) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The first n lanes; the others are 0 and their memory is not touched.
inline Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline __m256i narrow(Vec x) {
    const __m512i u = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(bits);
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline void store(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in `b` is returned, one in `a` is dropped.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_to_int(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec times_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// The first n lanes of a; `other` in the rest.
inline Vec keep(Vec a, int n, float other) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first_lanes(n), a.v)};
}
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float max_of(Vec a) { return _mm512_reduce_max_ps(a.v); }

#else

struct Vec {
    alignas(64) float v[LANES];
};

template <class F>
inline Vec each(const F& f) {
    Vec r;
    for (int i = 0; i < LANES; ++i) r.v[i] = f(i);
    return r;
}

inline Vec splat(float x) {
    return each([&](int) { return x; });
}
inline Vec zero() { return splat(0); }
template <class T>
inline Vec load(const T* p) {
    return each([&](int i) { return to_float(p[i]); });
}
// The first n lanes; the others are 0 and their memory is not touched.
template <class T>
inline Vec load(const T* p, int n) {
    return each([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
}
template <class T>
inline void store(T* p, const Vec& x, int n = LANES) {
    for (int i = 0; i < n; ++i) from_float(x.v[i], p[i]);
}
inline Vec operator+(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// A NaN in `b` is returned, one in `a` is dropped.
inline Vec max(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec round_to_int(const Vec& a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline Vec times_power_of_two(const Vec& a, const Vec& n) {
    return each([&](int i) { return n.v[i] == n.v[i] ? std::ldexp(a.v[i], int(n.v[i])) : n.v[i]; });
}
// The first n lanes of a; `other` in the rest.
inline Vec keep(const Vec& a, int n, float other) {
    return each([&](int i) { return i < n ? a.v[i] : other; });
}
inline float sum(Vec a) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
inline float max_of(const Vec& a) {
    float best = a.v[0];
    for (int i = 1; i < LANES; ++i) best = best > a.v[i] ? best : a.v[i];
    return best;
}

#endif

// e^x with a relative error below 2e-7 (tested); 0 under -104, infinity above 88.8, NaN stays NaN.
inline Vec exp(Vec x) {
    x = min(splat(89.0f), max(splat(-110.0f), x));
    const Vec n = round_to_int(x * splat(1.44269504f));
    Vec r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts: n times the first is exact
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.0f / 5040);  // |r| <= ln(2) / 2: the Taylor series to the 7th power is off by 5e-9
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return times_power_of_two(p, n);
}

}  // namespace slipstream
