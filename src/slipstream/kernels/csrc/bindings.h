// Checks and conversions that the bindings share.
#pragma once

#include <torch/extension.h>

#include <algorithm>

#include "vec.h"

namespace slipstream {

using at::Tensor;

// Calls f with a null pointer of the element type.
template <class F>
void by_type(const Tensor& t, const char* what, const F& f) {
    if (t.scalar_type() == at::kFloat) return f(static_cast<float*>(nullptr));
    TORCH_CHECK(t.scalar_type() == at::kBFloat16, what, " must be float32 or bfloat16, not ", t.scalar_type());
    f(static_cast<bf16*>(nullptr));
}

template <class T>
const T* in(const Tensor& t, const T*) {
    return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t, const T*) {
    return static_cast<T*>(t.mutable_data_ptr());
}

inline void check_cpu(const Tensor& t, const char* what) { TORCH_CHECK(t.is_cpu(), what, " must be on the CPU"); }

inline void check_same(const Tensor& t, const Tensor& like, const char* what) {
    check_cpu(t, what);
    TORCH_CHECK(t.scalar_type() == like.scalar_type(), what, " is ", t.scalar_type(), ", expected ", like.scalar_type());
}

inline void check_in_place(const Tensor& t, const char* what) {
    TORCH_CHECK(t.is_contiguous(), what, " is written or read in place and must be contiguous");
}

// An index tensor, contiguous, of one shape.
inline Tensor index(const Tensor& t, at::IntArrayRef shape, const char* what, at::ScalarType type = at::kLong) {
    check_cpu(t, what);
    TORCH_CHECK(t.scalar_type() == type, what, " must be ", type, ", not ", t.scalar_type());
    TORCH_CHECK(t.sizes() == shape, what, " must be ", shape, ", not ", t.sizes());
    return t.is_contiguous() ? t : t.contiguous();
}

inline void check_range(const int64_t* values, int64_t count, int64_t limit, const char* what) {
    uint64_t greatest = 0;  // negative values wrap to the greatest of all
    for (int64_t i = 0; i < count; ++i) greatest = std::max(greatest, uint64_t(values[i]));
    TORCH_CHECK(count == 0 || greatest < uint64_t(limit), what, " out of range: ", int64_t(greatest), " of ", limit);
}

inline Tensor contiguous(const Tensor& t) { return t.is_contiguous() ? t : t.contiguous(); }

}  // namespace slipstream
