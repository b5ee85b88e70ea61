// Argmax, and draws with keyed Gumbel noise: the contract is slipstream/kernels/sampling.py.
//
// The noise is bounded by what 23 bits can say, and a token can only win if its noise exceeds the best sum so far
// less its logit. Both tests are made on integers, so nearly all tokens cost a generator step at most and no logarithm.
#include <algorithm>
#include <cmath>
#include <vector>

#include "nucleus.h"
#include "ops.h"

namespace slipstream {
namespace {

constexpr int64_t CHUNK = 512;
constexpr int64_t PARALLEL_LOGITS = 24 * 1024;  // fewer are faster in one thread
constexpr float LARGEST_NOISE = 16.64f;         // -log(-log(1 - 2^-24))
constexpr int UNIFORM_BITS = 23;

struct Best {
    float value = MINUS_INFINITY;
    int64_t id = -1;  // none: no value was above -infinity
    void take(float other, int64_t other_id) {
        if (other > value) value = other, id = other_id;
    }
};

int64_t first_not_nan(const float* x, int64_t width) {
    for (int64_t i = 0; i < width; ++i)
        if (x[i] == x[i]) return i;
    return 0;
}

// The greatest and, among equals, the first of x[begin, end); NaN is never taken.
Best top(const float* x, int64_t begin, int64_t end) {
    float best = MINUS_INFINITY;
    int64_t where = -1;
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t last = std::min(first + CHUNK, end);
        Vec a = splat(MINUS_INFINITY), b = a, c = a, d = a;
        int64_t i = first;
        for (; i + 4 * LANES <= last; i += 4 * LANES) {
            a = max(load(x + i), a), b = max(load(x + i + 16), b);
            c = max(load(x + i + 32), c), d = max(load(x + i + 48), d);
        }
        for (; i < last; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, last - i));
            a = max(keep(load(x + i, n), n, MINUS_INFINITY), a);
        }
        const float chunk_best = max_of(max(max(a, b), max(c, d)));
        if (chunk_best > best) best = chunk_best, where = first;
    }
    if (where < 0) return {};
    while (x[where] != best) ++where;
    return {best, where};
}

uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Widynski's generator; the top 23 bits of its output for counters position * 2^32 + token.
class Noise {
  public:
    Noise(int64_t seed, int64_t position) : key_(splitmix64(uint64_t(seed)) | 1), start_(uint64_t(position) << 32) {}

#ifdef SLIPSTREAM_AVX512
    __m512i bits(int64_t token) const {  // of 16 tokens
        return _mm512_inserti64x4(_mm512_castsi256_si512(eight(token)), eight(token + 8), 1);
    }

  private:
    __m256i eight(int64_t token) const {
        const __m512i key = _mm512_set1_epi64(int64_t(key_));
        const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i counter = _mm512_add_epi64(_mm512_set1_epi64(int64_t(start_ + uint64_t(token))), lane);
        const __m512i y = _mm512_mullo_epi64(counter, key), z = _mm512_add_epi64(y, key);
        const auto round = [](__m512i x, __m512i plus) {
            return _mm512_rol_epi64(_mm512_add_epi64(_mm512_mullo_epi64(x, x), plus), 32);
        };
        const __m512i x = round(round(round(y, y), z), y);
        const __m512i top = _mm512_add_epi64(_mm512_mullo_epi64(x, x), z);
        return _mm512_cvtepi64_epi32(_mm512_srli_epi64(top, 64 - UNIFORM_BITS));
    }
#else
    uint32_t bits(int64_t token) const {
        const uint64_t y = (start_ + uint64_t(token)) * key_, z = y + key_;
        const auto round = [](uint64_t x, uint64_t plus) {
            x = x * x + plus;
            return (x >> 32) | (x << 32);
        };
        const uint64_t x = round(round(round(y, y), z), y);
        return uint32_t((x * x + z) >> (64 - UNIFORM_BITS));
    }

  private:
#endif
    uint64_t key_, start_;
};

inline float gumbel(uint32_t bits) {
    const float uniform = (float(bits) + 0.5f) * (1.0f / (1 << UNIFORM_BITS));
    return -std::log(-std::log(uniform));
}

// The least bits whose noise can lift `logit` over `best`: g > best - logit, that is u > exp(-exp(logit - best)),
// with a margin for what rounding can add.
uint32_t least_bits(float logit, float best) {
    const double margin = 1e-3 + 1e-6 * std::fabs(best);
    const double uniform = std::exp(-std::exp(double(logit) - double(best) + margin));
    return uniform > 0 ? uint32_t(std::max(0.0, uniform * (1 << UNIFORM_BITS) - 1)) : 0;
}

// Draws among tokens [begin, end) of one row.
class Draw {
  public:
    Draw(const float* logits, float temperature, const LastKept& last, Noise noise)
        : logits_(logits), temperature_(temperature), last_(last), noise_(noise) {}

    Best run(int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += CHUNK) {
            const int n = int(std::min(CHUNK, end - first));
            const float highest = scale(first, n);
            if (!(highest + LARGEST_NOISE + 1e-3f * (1 + std::fabs(highest)) >= best_.value)) continue;
            if (highest > MINUS_INFINITY) examine(first, n, least_bits(highest, best_.value));
        }
        return best_;
    }

  private:
    // scaled_ = logits / temperature, -infinity for what is not kept and for NaN; returns the greatest.
    float scale(int64_t first, int n) {
        Vec highest = splat(MINUS_INFINITY);
        for (int i = 0; i < n; i += LANES) {
            const int lanes = std::min(LANES, n - i);
            const Vec x = kept(scaled(load(logits_ + first + i, lanes), temperature_), first + i);
            const Vec own = keep(x, lanes, MINUS_INFINITY);
            store(scaled_ + i, own);
            highest = max(own, highest);
        }
        return max_of(highest);
    }
    Vec kept(Vec x, int64_t token) const {
        if (last_.value == MINUS_INFINITY) return x;
        if (max_of(x) < last_.value) return splat(MINUS_INFINITY);
        float v[LANES];
        store(v, x);
        for (int i = 0; i < LANES; ++i)
            if (!(v[i] > last_.value || (v[i] == last_.value && token + i <= last_.id))) v[i] = MINUS_INFINITY;
        return load(v);
    }
    void examine(int64_t first, int n, uint32_t least) {
#ifdef SLIPSTREAM_AVX512
        for (int i = 0; i < n; i += LANES) {
            const __m512i bits = noise_.bits(first + i);
            unsigned able = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(int(least)));
            if (n - i < LANES) able &= (1u << (n - i)) - 1;
            if (!able) continue;
            alignas(64) uint32_t each[LANES];
            _mm512_store_si512(each, bits);
            for (; able; able &= able - 1) {
                const int lane = __builtin_ctz(able);
                best_.take(scaled_[i + lane] + gumbel(each[lane]), first + i + lane);
            }
        }
#else
        for (int i = 0; i < n; ++i) {
            const uint32_t bits = noise_.bits(first + i);
            if (bits >= least) best_.take(scaled_[i] + gumbel(bits), first + i);
        }
#endif
    }

    const float* logits_;
    float temperature_;
    LastKept last_;
    Noise noise_;
    Best best_;
    alignas(64) float scaled_[CHUNK];
};

Best draw(const float* logits, const SampleSettings& s, int64_t row, const LastKept& last, int64_t begin, int64_t end) {
    if (!(s.temperature[row] > 0)) return top(logits, begin, end);
    return Draw(logits, s.temperature[row], last, Noise(s.seed[row], s.position[row])).run(begin, end);
}

// Calls f(row, begin, end) -> Best for parts of every row, and writes the id of the best of each row.
template <class F>
void best_of_rows(const float* logits, int64_t* ids, int64_t rows, int64_t width, const F& f) {
    const int threads = rows * width < PARALLEL_LOGITS ? 1 : usable_threads();
    const int64_t parts = threads == 1 || rows % threads == 0 ? 1 : std::min<int64_t>(threads, 16);
    const int64_t step = ((width + parts - 1) / parts + LANES - 1) / LANES * LANES;
    std::vector<Best> best(rows * parts);
    parallel_items(rows * parts, threads, [&](int64_t i) {
        const int64_t row = i / parts, begin = std::min(i % parts * step, width);
        best[i] = f(row, begin, std::min(begin + step, width));
    });
    for (int64_t row = 0; row < rows; ++row) {
        Best all;
        for (int64_t i = row * parts; i < (row + 1) * parts; ++i) all.take(best[i].value, best[i].id);
        ids[row] = all.id >= 0 ? all.id : first_not_nan(logits + row * width, width);
    }
}

}  // namespace

void argmax(const float* logits, int64_t* ids, int64_t rows, int64_t width) {
    best_of_rows(logits, ids, rows, width, [&](int64_t row, int64_t begin, int64_t end) {
        return top(logits + row * width, begin, end);
    });
}

void sample(const float* logits, const SampleSettings& s, int64_t* ids, int64_t rows, int64_t width) {
    std::vector<LastKept> last(rows);
    const auto is_filtered = [&](int64_t row) {
        return s.temperature[row] > 0 && ((s.top_k[row] > 0 && s.top_k[row] < width) || !(s.top_p[row] >= 1));
    };
    int64_t filtered = 0;
    for (int64_t row = 0; row < rows; ++row) filtered += is_filtered(row);
    if (filtered > 0)
        parallel_items(rows, filtered * width < PARALLEL_LOGITS ? 1 : usable_threads(), [&](int64_t row) {
            if (!is_filtered(row)) return;
            const float highest = top(logits + row * width, 0, width).value;
            last[row] = last_kept(logits + row * width, width, highest, s.temperature[row], s.top_k[row], s.top_p[row]);
        });
    best_of_rows(logits, ids, rows, width, [&](int64_t row, int64_t begin, int64_t end) {
        return draw(logits + row * width, s, row, last[row], begin, end);
    });
}

}  // namespace slipstream
