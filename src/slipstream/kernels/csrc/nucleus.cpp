// Tokens are counted and weighed in buckets of scaled logit below the greatest one. Whole buckets are kept or dropped
// by their totals; only the bucket where k or p is reached is looked into, by a quickselect on (logit, id).
#include "nucleus.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace slipstream {
namespace {

constexpr int BUCKETS = 161;  // an eighth of a nat each; the last holds all that is 20 or more below the greatest
constexpr float PER_NAT = 8;

struct Item {
    uint64_t key;  // ascending: greater logit first, then lower id
    double weight;
};

uint64_t key_of(float x, int64_t id) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;  // ascending with x
    return uint64_t(~u) << 32 | uint64_t(id);
}

LastKept kept_of(uint64_t key) {
    uint32_t u = ~uint32_t(key >> 32);
    u = u & 0x80000000u ? u & 0x7FFFFFFFu : ~u;
    LastKept last;
    std::memcpy(&last.value, &u, 4);
    last.id = int64_t(uint32_t(key));
    return last;
}

// The last item of the shortest prefix, in the order of keys, whose measures added to `before` reach `target`.
template <class F>
Item select(Item* first, Item* end, double before, double target, const F& measure) {
    while (end - first > 32) {
        uint64_t a = first->key, b = first[(end - first) / 2].key, c = end[-1].key;
        const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));  // neither least nor alone
        Item* middle = std::partition(first, end, [&](const Item& item) { return item.key < pivot; });
        double left = 0;
        for (Item* item = first; item < middle; ++item) left += measure(*item);
        if (before + left >= target) {
            end = middle;
        } else {
            before += left;
            first = middle;
        }
    }
    std::sort(first, end, [](const Item& a, const Item& b) { return a.key < b.key; });
    for (; first + 1 < end; ++first) {
        before += measure(*first);
        if (before >= target) break;
    }
    return *first;
}

class Ranking {
  public:
    Ranking(const float* logits, int64_t width, float highest, float temperature)
        : logits_(logits), width_(width), temperature_(temperature) {
        highest_ = scaled(splat(highest), temperature);
        weigh();
    }
    bool is_finite() const {
        float top[LANES];
        store(top, highest_);
        return std::isfinite(top[0]);
    }

    void keep_top_k(int64_t k) {
        int64_t before = 0;
        int b = 0;
        while (before + count_[b] < k) before += count_[b++];
        gather(b);
        const Item last = select(items(), items_end(), double(before), double(k), [](const Item&) { return 1.0; });
        items_.erase(std::remove_if(items_.begin(), items_.end(), [&](const Item& i) { return i.key > last.key; }),
                     items_.end());
        mass_[b] = 0;
        for (const Item& item : items_) mass_[b] += item.weight;
        std::fill(mass_ + b + 1, mass_ + BUCKETS, 0.0);
        last_ = kept_of(last.key), last_bucket_ = b;
    }

    void keep_top_p(double p) {
        double total = 0, before = 0;
        for (int b = 0; b <= last_bucket_; ++b) total += mass_[b];
        const double target = p > 0 ? p * total : 0;  // also for NaN: the first token alone
        int b = 0;
        while (b < last_bucket_ && !(count_[b] > 0 && before + mass_[b] >= target)) before += mass_[b++];
        if (gathered_ != b) gather(b);
        if (items_.empty()) return;  // only by rounding, at the very end: all are kept
        last_ = kept_of(select(items(), items_end(), before, target, [](const Item& i) { return i.weight; }).key);
    }

    LastKept last() const { return last_; }

  private:
    Vec scaled_at(int64_t i, int lanes) const { return scaled(load(logits_ + i, lanes), temperature_); }
    Vec bucket_of(Vec x) const { return min((highest_ - x) * splat(PER_NAT), splat(float(BUCKETS - 1))); }

    void weigh() {
        std::fill(count_, count_ + BUCKETS, 0);
        std::fill(mass_, mass_ + BUCKETS, 0.0);
        Vec far = zero();
        int64_t far_count = 0;
        for (int64_t i = 0; i < width_; i += LANES) {
            const int lanes = int(std::min<int64_t>(LANES, width_ - i));
            const Vec x = scaled_at(i, lanes), bucket = bucket_of(x), weight = exp(x - highest_);
            if (lanes == LANES && max_of(zero() - bucket) == float(1 - BUCKETS)) {
                far = far + weight, far_count += LANES;
                continue;
            }
            float buckets[LANES], weights[LANES];
            store(buckets, bucket), store(weights, weight);
            for (int j = 0; j < lanes; ++j) {
                ++count_[int(buckets[j])];
                mass_[int(buckets[j])] += weights[j];
            }
        }
        count_[BUCKETS - 1] += far_count;
        mass_[BUCKETS - 1] += sum(far);
    }

    void gather(int b) {
        items_.clear();
        float top[LANES];
        store(top, highest_);
        for (int64_t i = 0; i < width_; i += LANES) {
            const int lanes = int(std::min<int64_t>(LANES, width_ - i));
            const Vec x = scaled_at(i, lanes), bucket = bucket_of(x);
            if (max_of(keep(bucket, lanes, -1.0f)) < float(b)) continue;
            float buckets[LANES], values[LANES];
            store(buckets, bucket), store(values, x);
            for (int j = 0; j < lanes; ++j)
                if (int(buckets[j]) == b)
                    items_.push_back({key_of(values[j], i + j), std::exp(double(values[j]) - double(top[0]))});
        }
        gathered_ = b;
    }

    Item* items() { return items_.data(); }
    Item* items_end() { return items_.data() + items_.size(); }

    const float* logits_;
    int64_t width_;
    float temperature_;
    Vec highest_;
    int64_t count_[BUCKETS];
    double mass_[BUCKETS];
    std::vector<Item> items_;
    int gathered_ = -1, last_bucket_ = BUCKETS - 1;
    LastKept last_;
};

}  // namespace

LastKept last_kept(const float* logits, int64_t width, float highest, float temperature, int64_t top_k, float top_p) {
    Ranking ranking(logits, width, highest, temperature);
    if (!ranking.is_finite()) return {};  // the greatest wins whatever is kept
    if (top_k > 0 && top_k < width) ranking.keep_top_k(top_k);
    if (!(top_p >= 1)) ranking.keep_top_p(double(top_p));
    return ranking.last();
}

}  // namespace slipstream
