// What Python calls for slipstream/kernels/linear.py: argument checks, allocation, then the plain kernels.
#include <torch/extension.h>

#include "linear.h"
#include "weight_memory.h"

namespace py = pybind11;
using at::Tensor;

namespace {

int32_t format_of(const std::string& name) {
    const char* names[] = {"float32", "bfloat16", "q8_0", "q4_1"};
    for (int32_t i = 0; i < 4; ++i)
        if (name == names[i]) return i;
    TORCH_CHECK(false, "unknown weight format ", name);
}

int32_t scalar_of(at::ScalarType type, const char* what) {
    if (type == at::kFloat) return slipstream::SCALAR_FLOAT32;
    TORCH_CHECK(type == at::kBFloat16, what, " must be float32 or bfloat16, not ", type);
    return slipstream::SCALAR_BFLOAT16;
}

bool is_quantised(int32_t format) { return format == slipstream::Q8_0 || format == slipstream::Q4_1; }

const uint16_t* factor(const std::optional<Tensor>& t, const Tensor& weight, const char* what) {
    TORCH_CHECK(t.has_value(), "a quantised weight needs its ", what);
    TORCH_CHECK(t->scalar_type() == at::kHalf && t->is_contiguous() && t->is_cpu(), what,
                " must be contiguous float16 on the CPU");
    TORCH_CHECK(t->dim() == 2 && t->size(0) == weight.size(0) && t->size(1) == weight.size(1) / slipstream::GROUP, what,
                " must have one value for each group of 32 inputs");
    return reinterpret_cast<const uint16_t*>(t->const_data_ptr());
}

Tensor pack(const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& minimum,
            const std::string& format_name) {
    const int32_t format = format_of(format_name);
    const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kChar, at::kByte};
    TORCH_CHECK(weight.scalar_type() == types[format], format_name, " needs ", types[format], ", got ",
                weight.scalar_type());
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.is_cpu(),
                "the weight must be contiguous [N, K] on the CPU");
    const int64_t n = weight.size(0), k = weight.size(1);
    TORCH_CHECK(n > 0 && k > 0, "an empty weight [", n, ", ", k, "]");
    TORCH_CHECK(!is_quantised(format) || k % slipstream::GROUP == 0, format_name, " needs a multiple of 32 inputs, got ", k);
    slipstream::PackCall call{};
    call.weight = weight.const_data_ptr();
    if (is_quantised(format)) call.scale = factor(scale, weight, "scale");
    if (format == slipstream::Q4_1) call.minimum = factor(minimum, weight, "minimum");
    const int64_t bytes = slipstream_packed_bytes(format, n, k);
    std::shared_ptr<void> memory = slipstream::weight_memory(static_cast<size_t>(bytes));
    Tensor packed = at::from_blob(memory.get(), {bytes}, [memory](void*) mutable { memory.reset(); }, at::kByte);
    call.packed = memory.get();
    call.n = n;
    call.k = k;
    call.format = format;
    slipstream_pack(&call);
    return packed;
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::string& format_name, const std::optional<Tensor>& bias,
              int64_t n, int64_t k, at::ScalarType out_dtype) {
    const int32_t format = format_of(format_name);
    TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && x.size(-1) == k, "x must be [..., ", k, "] on the CPU, got ", x.sizes());
    TORCH_CHECK(packed.is_cpu() && packed.is_contiguous() && packed.scalar_type() == at::kByte && n > 0 && k > 0 &&
                    packed.numel() == slipstream_packed_bytes(format, n, k),
                "the packed weight is not one of ", format_name, " [", n, ", ", k, "]");
    TORCH_CHECK(reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 64 == 0, "the packed weight is not aligned");
    slipstream::LinearCall call{};
    call.x_type = scalar_of(x.scalar_type(), "x");
    call.y_type = scalar_of(out_dtype, "the output");
    if (bias.has_value()) {
        TORCH_CHECK(bias->is_cpu() && bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == n,
                    "the bias must be contiguous float32 [", n, "] on the CPU");
        call.bias = bias->const_data_ptr<float>();
    }
    const Tensor rows = x.is_contiguous() ? x : x.contiguous();
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = n;
    Tensor y = at::empty(shape, x.options().dtype(out_dtype));
    call.x = rows.const_data_ptr();
    call.packed = packed.const_data_ptr();
    call.y = y.mutable_data_ptr();
    call.rows = rows.numel() / k;
    call.n = n;
    call.k = k;
    call.format = format;
    call.threads = at::get_num_threads();
    slipstream_linear(&call);
    return y;
}

}  // namespace

void register_linear(py::module_& m) {
    m.def("pack", &pack, py::call_guard<py::gil_scoped_release>());
    m.def("linear", &linear, py::call_guard<py::gil_scoped_release>());
}
