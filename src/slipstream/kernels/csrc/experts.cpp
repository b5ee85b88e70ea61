// A mixture of experts, apart from its products: contracts in slipstream/kernels/experts.py.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "ops.h"

namespace slipstream {
namespace {

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Scores of one row in place: whole vectors only, so that an expert's score does not depend on where it stands.
void score(float* x, int64_t experts, bool is_softmax) {
    const int64_t width = padded(experts);
    if (!is_softmax) {
        for (int64_t i = 0; i < width; i += LANES) store(x + i, splat(1.0f) / (splat(1.0f) + exp(zero() - load(x + i))));
        return;
    }
    Vec top = splat(MINUS_INFINITY), total = zero();
    for (int64_t i = 0; i < width; i += LANES) top = max(top, load(x + i));
    const Vec most = splat(max_of(top));
    for (int64_t i = 0; i < width; i += LANES) {
        const Vec e = exp(load(x + i) - most);
        store(x + i, e);
        total = total + e;
    }
    const Vec all = splat(sum(total));
    for (int64_t i = 0; i < width; i += LANES) store(x + i, load(x + i) / all);
}

// A float as an integer in the same order, NaN below every number: so some index always comes, and finding the highest
// is a loop that the compiler turns into vectors: routing takes a third of the time of comparing floats, NaN in mind.
constexpr int32_t TAKEN = std::numeric_limits<int32_t>::min();
inline int32_t key_of(float x) {
    if (x != x) return TAKEN + 1;
    x += 0.0f;  // -0 is no lower than 0
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// The index of the highest key, the lower one in a tie; it is not found again.
int64_t take_best(int32_t* keys, int64_t count) {
    int32_t most = TAKEN;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, keys[i]);
    int64_t best = 0;
    while (keys[best] != most) ++best;
    keys[best] = TAKEN;
    return best;
}

// One row after the other, in the same working memory.
struct Router {
    explicit Router(const Routing& r)
        : routing(r), scores(padded(r.experts)), choice(r.experts), keys(r.experts), group(r.experts / r.groups), sums(r.groups) {}

    void row(const float* logits, const float* bias, int64_t* chosen, float* weights) {
        const int64_t experts = routing.experts, k = routing.per_token;
        std::fill(scores.begin(), scores.end(), MINUS_INFINITY);
        std::copy(logits, logits + experts, scores.begin());
        score(scores.data(), experts, routing.is_softmax);
        for (int64_t e = 0; e < experts; ++e) choice[e] = bias ? scores[e] + bias[e] : scores[e];
        for (int64_t e = 0; e < experts; ++e) keys[e] = key_of(choice[e]);
        if (routing.groups > 1) keep_groups();
        float total = 0;
        for (int64_t i = 0; i < k; ++i) {
            chosen[i] = take_best(keys.data(), experts);
            weights[i] = scores[chosen[i]];
            total += weights[i];
        }
        for (int64_t i = 0; i < k; ++i)
            weights[i] = (routing.normalises ? weights[i] / (total + 1e-20f) : weights[i]) * routing.scale;
    }

   private:
    // Takes the experts of all but the best groups out of the choice.
    void keep_groups() {
        const int64_t size = routing.experts / routing.groups;
        for (int64_t g = 0; g < routing.groups; ++g) {
            std::copy(keys.begin() + g * size, keys.begin() + (g + 1) * size, group.begin());
            const float first = choice[g * size + take_best(group.data(), size)];
            sums[g] = key_of(first + choice[g * size + take_best(group.data(), size)]);
        }
        for (int64_t i = 0; i < routing.top_groups; ++i) take_best(sums.data(), routing.groups);
        for (int64_t g = 0; g < routing.groups; ++g)
            if (sums[g] != TAKEN) std::fill_n(keys.begin() + g * size, size, TAKEN);
    }

    const Routing& routing;
    std::vector<float> scores, choice;
    std::vector<int32_t> keys, group, sums;
};

}  // namespace

void route(const float* logits, const float* bias, const Routing& routing, int64_t rows, int64_t* chosen,
           float* weights) {
    // On one thread: 512 rows take a hundredth of what their experts do, and a thread that has no core just now holds up
    // the others for milliseconds.
    Router router(routing);
    for (int64_t r = 0; r < rows; ++r)
        router.row(logits + r * routing.experts, bias, chosen + r * routing.per_token, weights + r * routing.per_token);
}

void sort_by_expert(const int64_t* chosen, int64_t pairs, int64_t experts, int64_t* order, int64_t* offsets) {
    std::fill(offsets, offsets + experts + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) ++offsets[chosen[i] + 1];
    for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
    std::vector<int64_t> next(offsets, offsets + experts);
    for (int64_t i = 0; i < pairs; ++i) order[next[chosen[i]]++] = i;
}

template <class T>
void weighted_sum(const float* outputs, const float* weights, T* y, int64_t rows, int64_t places, int64_t width) {
    const int threads = rows * places * width < 64 * 1024 ? 1 : usable_threads();
    parallel_items(rows, threads, [&](int64_t r) {
        for (int64_t i = 0; i < width; i += LANES) {
            const int lanes = int(std::min<int64_t>(LANES, width - i));
            Vec total = zero();
            for (int64_t p = 0; p < places; ++p) {
                const float* from = outputs + (r * places + p) * width + i;
                total = total + load(from, lanes) * splat(weights[r * places + p]);
            }
            store(y + r * width + i, total, lanes);
        }
    });
}

template void weighted_sum(const float*, const float*, float*, int64_t, int64_t, int64_t);
template void weighted_sum(const float*, const float*, bf16*, int64_t, int64_t, int64_t);

}  // namespace slipstream
