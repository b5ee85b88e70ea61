// A mixture of experts, apart from its products: contracts in slipstream/kernels/experts.py.
#include <algorithm>
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

// The highest value not taken yet, the lower index in a tie; NaN is lower than anything, so some index always comes.
int64_t take_best(const float* values, std::vector<char>& taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!taken[i] && (best < 0 || values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])))
            best = i;
    taken[best] = 1;
    return best;
}

// Takes the experts of all but the best groups out of the choice.
void keep_groups(const float* choice, const Routing& routing, std::vector<char>& taken) {
    const int64_t size = routing.experts / routing.groups;
    std::vector<float> sums(routing.groups);
    for (int64_t g = 0; g < routing.groups; ++g) {
        const float* group = choice + g * size;
        std::vector<char> seen(size, 0);
        const float first = group[take_best(group, seen, size)];
        sums[g] = first + group[take_best(group, seen, size)];
    }
    std::vector<char> kept(routing.groups, 0);
    for (int64_t i = 0; i < routing.top_groups; ++i) take_best(sums.data(), kept, routing.groups);
    for (int64_t e = 0; e < routing.experts; ++e) taken[e] = !kept[e / size];
}

}  // namespace

void route(const float* logits, const float* bias, const Routing& routing, int64_t rows, int64_t* chosen,
           float* weights) {
    const int64_t experts = routing.experts, k = routing.per_token;
    std::vector<float> scores(padded(experts)), choice(experts);
    std::vector<char> taken(experts);
    for (int64_t r = 0; r < rows; ++r, chosen += k, weights += k) {
        std::fill(scores.begin(), scores.end(), MINUS_INFINITY);
        std::copy(logits + r * experts, logits + (r + 1) * experts, scores.begin());
        score(scores.data(), experts, routing.is_softmax);
        for (int64_t e = 0; e < experts; ++e) choice[e] = bias ? scores[e] + bias[e] : scores[e];
        std::fill(taken.begin(), taken.end(), 0);
        if (routing.groups > 1) keep_groups(choice.data(), routing, taken);
        float total = 0;
        for (int64_t i = 0; i < k; ++i) {
            chosen[i] = take_best(choice.data(), taken, experts);
            weights[i] = scores[chosen[i]];
            total += weights[i];
        }
        for (int64_t i = 0; i < k; ++i)
            weights[i] = (routing.normalises ? weights[i] / (total + 1e-20f) : weights[i]) * routing.scale;
    }
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
