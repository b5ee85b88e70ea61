// Checks of packed weights that the bindings share.
#pragma once

#include <torch/extension.h>

#include "linear.h"

namespace slipstream {

inline int32_t format_of(const std::string& name) {
    const char* names[] = {"float32", "bfloat16", "q8_0", "q4_1"};
    for (int32_t i = 0; i < 4; ++i)
        if (name == names[i]) return i;
    TORCH_CHECK(false, "unknown weight format ", name);
}

inline int32_t scalar_of(at::ScalarType type, const char* what) {
    if (type == at::kFloat) return SCALAR_FLOAT32;
    TORCH_CHECK(type == at::kBFloat16, what, " must be float32 or bfloat16, not ", type);
    return SCALAR_BFLOAT16;
}

// One or `groups` weights [n, k], packed one behind the other.
inline void check_packed(const at::Tensor& packed, int32_t format, int64_t n, int64_t k, int64_t groups = 1) {
    TORCH_CHECK(packed.is_cpu() && packed.is_contiguous() && packed.scalar_type() == at::kByte && n > 0 && k > 0 &&
                    packed.numel() == groups * slipstream_packed_bytes(format, n, k),
                "the packed weight is not one of ", groups, " x [", n, ", ", k, "]");
    TORCH_CHECK(reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 64 == 0, "the packed weight is not aligned");
}

}  // namespace slipstream
