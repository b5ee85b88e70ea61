// The inner loops of attention.cpp: 16 keys a vector for the scores, 16 elements of a value a vector for the sums.
#pragma once

#include "vec.h"

namespace slipstream {

constexpr int BLOCK = 64;       // keys reduced together; kernels/attention.py has the same figure
constexpr int MAX_QUERIES = 6;  // six queries x four accumulators, and what is shared, fill 32 registers

// A "unit" is 32 bits of a key: one float32, or two neighbouring bfloat16. Transposed keys are [unit][16 keys].
#ifdef SLIPSTREAM_AVX512

inline void transpose_16x16(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // now r[i + c] holds, in each quarter, column c of rows i .. i + 3
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i low_even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);
        const __m512i high_even = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
        t[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xDD);
        t[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

template <class T>
inline void transpose_keys(const T* k, const int64_t* offsets, int64_t units, float* out) {
    for (int64_t u = 0; u < units; u += LANES) {
        const __mmask16 mask = first_lanes(units - u < LANES ? int(units - u) : LANES);
        __m512i r[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j)
            r[j] = _mm512_maskz_loadu_epi32(mask, reinterpret_cast<const char*>(k + offsets[j]) + 4 * u);
        transpose_16x16(r);
        for (int j = 0; j < 16 && u + j < units; ++j) _mm512_storeu_ps(out + (u + j) * LANES, _mm512_castsi512_ps(r[j]));
    }
}

inline Vec query_unit(const float* q, int64_t u) { return splat(q[u]); }
inline Vec query_unit(const bf16* q, int64_t u) {
    int pair;
    std::memcpy(&pair, q + 2 * u, 4);
    return {_mm512_castsi512_ps(_mm512_set1_epi32(pair))};
}
inline Vec add_product(const float*, Vec sum, Vec key, Vec query) { return fma(key, query, sum); }
inline Vec add_product(const bf16*, Vec sum, Vec key, Vec query) {
#ifdef __AVX512BF16__
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)key.v, (__m512bh)query.v)};
#else
    const __m512i high = _mm512_set1_epi32(int(0xFFFF0000u));
    const __m512i k = _mm512_castps_si512(key.v), q = _mm512_castps_si512(query.v);
    const auto low = [](__m512i x) { return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))}; };
    const auto upper = [&](__m512i x) { return Vec{_mm512_castsi512_ps(_mm512_and_si512(x, high))}; };
    return fma(upper(k), upper(q), fma(low(k), low(q), sum));
#endif
}

#else

template <class T>
inline void transpose_keys(const T* k, const int64_t* offsets, int64_t units, float* out) {
    for (int64_t u = 0; u < units; ++u)
        for (int j = 0; j < LANES; ++j)
            std::memcpy(out + u * LANES + j, reinterpret_cast<const char*>(k + offsets[j]) + 4 * u, 4);
}

inline Vec query_unit(const float* q, int64_t u) { return splat(q[u]); }
inline Vec query_unit(const bf16* q, int64_t u) {
    float pair;
    std::memcpy(&pair, q + 2 * u, 4);
    return splat(pair);
}
inline Vec add_product(const float*, const Vec& sum, const Vec& key, const Vec& query) {
    return fma(key, query, sum);
}
inline Vec add_product(const bf16*, const Vec& sum, const Vec& key, const Vec& query) {
    const auto half = [](float pair, int which) {
        bf16 halves[2];
        std::memcpy(halves, &pair, 4);
        return to_float(halves[which]);
    };
    return each([&](int i) {
        const float first = half(key.v[i], 0) * half(query.v[i], 0) + sum.v[i];
        return half(key.v[i], 1) * half(query.v[i], 1) + first;
    });
}

#endif

// scores[q][key] = scale * sum over d, in order, for N queries and G groups of 16 transposed keys.
template <int N, int G, class T>
inline void score_groups(const T* const* q, const float* keys, int64_t units, float scale, float* out, int64_t stride) {
    Vec sum[N][G];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[i][g] = zero();
    for (int64_t u = 0; u < units; ++u) {
        Vec key[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) key[g] = load(keys + (g * units + u) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            const Vec query = query_unit(q[i], u);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sum[i][g] = add_product(q[i], sum[i][g], key[g], query);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) store(out + i * stride + g * LANES, sum[i][g] * splat(scale));
}

template <int N, class T>
inline void score_some(int groups, const T* const* q, const float* keys, int64_t units, float scale, float* out,
                       int64_t stride) {
    if (groups == BLOCK / LANES) return score_groups<N, BLOCK / LANES>(q, keys, units, scale, out, stride);
    for (int g = 0; g < groups; ++g)
        score_groups<N, 1>(q, keys + g * units * LANES, units, scale, out + g * LANES, stride);
}

// Merging a block into a running result: run * by_running + block * by_block.
struct Merge {
    float* run;  // [queries, dim]; null: the block's sums are stored, nothing is merged
    const float *by_running, *by_block;
};

// block[q] (+)= sum over keys, in order, of weights[q][key] * value[key], for N queries, C vectors of elements each.
template <int N, int C, class T>
inline void weigh_columns(const T* v, const int64_t* offsets, int begin, int end, const float* weights, float* block,
                          const Merge& merge, int64_t dim, int lanes) {
    Vec sum[N][C];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[i][c] = begin > 0 ? load(block + i * dim + c * LANES, lanes) : zero();
    for (int j = begin; j < end; ++j) {
        Vec value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
            value[c] = C == 1 ? load(v + offsets[j], lanes) : load(v + offsets[j] + c * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            const Vec weight = splat(weights[i * BLOCK + j]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[i][c] = fma(weight, value[c], sum[i][c]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const int64_t at = i * dim + c * LANES;
            if (!merge.run) {
                store(block + at, sum[i][c], lanes);
                continue;
            }
            const Vec run = load(merge.run + at, lanes) * splat(merge.by_running[i]);
            store(merge.run + at, fma(sum[i][c], splat(merge.by_block[i]), run), lanes);
        }
}

template <int N, class T>
inline void weigh_some(const T* v, const int64_t* offsets, int begin, int end, const float* weights, float* block,
                       Merge merge, int64_t dim) {
    constexpr int C = 4;
    int64_t d = 0;
    const auto at = [&](int64_t i) {
        return Merge{merge.run ? merge.run + i : nullptr, merge.by_running, merge.by_block};
    };
    for (; d + C * LANES <= dim; d += C * LANES)
        weigh_columns<N, C>(v + d, offsets, begin, end, weights, block + d, at(d), dim, LANES);
    for (; d < dim; d += LANES) {
        const int lanes = dim - d < LANES ? int(dim - d) : LANES;
        weigh_columns<N, 1>(v + d, offsets, begin, end, weights, block + d, at(d), dim, lanes);
    }
}

// Calls f(constant) with a constant equal to n, 1 to MAX_QUERIES.
template <class F>
inline void with_constant(int n, const F& f) {
    switch (n) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        default: return f(std::integral_constant<int, 6>());
    }
}

}  // namespace slipstream
