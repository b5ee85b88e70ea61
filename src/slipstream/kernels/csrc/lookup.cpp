// Prompt lookup by the Z algorithm (Gusfield 1997, section 1.4) on the text read backwards.
#include <algorithm>
#include <vector>

#include "ops.h"

namespace slipstream {

int64_t lookup(const int64_t* text, int64_t length, int64_t max_suffix, int64_t count, int64_t* draft) {
    const int64_t* last = text + length - 1;
    // common[i]: how many tokens that end i before the last one equal those that end at it. Only the first
    // max_suffix of them are ever looked up, as the search stops at a match of that length.
    static thread_local std::vector<int64_t> common;
    common.assign(std::max<int64_t>(0, std::min(length, max_suffix)), 0);
    int64_t matched = 0, period = 1, box = 0, box_end = 0;  // tokens [box, box_end) back are known to match
    for (int64_t back = 1; matched < max_suffix && back + matched < length; ++back) {
        int64_t n = back < box_end ? std::min(box_end - back, common[back - box]) : 0;
        if (back + n >= box_end) {
            while (n < max_suffix && back + n < length && last[-n] == last[-back - n]) ++n;
            box = back, box_end = back + n;
        }
        if (back < int64_t(common.size())) common[back] = n;
        if (n > matched) matched = n, period = back;
    }
    for (int64_t i = 0; i < count; ++i) draft[i] = length > 0 ? last[1 - period + i % period] : 0;
    return matched;
}

}  // namespace slipstream
