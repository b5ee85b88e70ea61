// Top-k and top-p without sorting a vocabulary: the last token that they keep.
#pragma once

#include "vec.h"

namespace slipstream {

// Kept are the tokens with a greater scaled logit, and those with an equal one and no greater id.
struct LastKept {
    float value = MINUS_INFINITY;
    int64_t id = 0;
};

// logits / temperature as every pass computes it: NaN becomes -infinity, and -0 becomes 0, its equal.
inline Vec scaled(Vec logits, float temperature) {
    return max(logits / splat(temperature), splat(MINUS_INFINITY)) + zero();
}

// `highest` is the greatest logit, NaN left out; top_k <= 0 keeps all, top_p >= 1 keeps all.
LastKept last_kept(const float* logits, int64_t width, float highest, float temperature, int64_t top_k, float top_p);

}  // namespace slipstream
