// What Python calls for slipstream/kernels/linear.py: argument checks, allocation, then the plain kernels.
#include "bindings_packed.h"
#include "weight_memory.h"

namespace py = pybind11;
using at::Tensor;
using slipstream::check_packed, slipstream::format_of, slipstream::scalar_of;

namespace {

bool is_quantised(int32_t format) { return format == slipstream::Q8_0 || format == slipstream::Q4_1; }

const uint16_t* factor(const std::optional<Tensor>& t, const Tensor& weight, const char* what) {
    TORCH_CHECK(t.has_value(), "a quantised weight needs its ", what);
    TORCH_CHECK(t->scalar_type() == at::kHalf && t->is_contiguous() && t->is_cpu(), what,
                " must be contiguous float16 on the CPU");
    TORCH_CHECK(t->dim() == 2 && t->size(0) == weight.size(0) && t->size(1) == weight.size(1) / slipstream::GROUP, what,
                " must have one value for each group of 32 inputs");
    return reinterpret_cast<const uint16_t*>(t->const_data_ptr());
}

Tensor allocate_packed(int64_t groups, int64_t n, int64_t k, const std::string& format_name) {
    TORCH_CHECK(groups > 0 && n > 0 && k > 0, "an empty weight [", groups, ", ", n, ", ", k, "]");
    const int64_t bytes = groups * slipstream_packed_bytes(format_of(format_name), n, k);
    std::shared_ptr<void> memory = slipstream::weight_memory(static_cast<size_t>(bytes));
    return at::from_blob(memory.get(), {bytes}, [memory](void*) mutable { memory.reset(); }, at::kByte);
}

void pack_into(const Tensor& packed, const Tensor& weight, const std::optional<Tensor>& scale,
               const std::optional<Tensor>& minimum, const std::string& format_name) {
    const int32_t format = format_of(format_name);
    const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kChar, at::kByte};
    TORCH_CHECK(weight.scalar_type() == types[format], format_name, " needs ", types[format], ", got ",
                weight.scalar_type());
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.is_cpu(),
                "the weight must be contiguous [N, K] on the CPU");
    const int64_t n = weight.size(0), k = weight.size(1);
    TORCH_CHECK(!is_quantised(format) || k % slipstream::GROUP == 0, format_name, " needs a multiple of 32 inputs, got ", k);
    check_packed(packed, format, n, k);
    slipstream::PackCall call{};
    call.weight = weight.const_data_ptr();
    if (is_quantised(format)) call.scale = factor(scale, weight, "scale");
    if (format == slipstream::Q4_1) call.minimum = factor(minimum, weight, "minimum");
    call.packed = packed.mutable_data_ptr();
    call.n = n;
    call.k = k;
    call.format = format;
    slipstream_pack(&call);
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::string& format_name, const std::optional<Tensor>& bias,
              int64_t n, int64_t k, at::ScalarType out_dtype) {
    const int32_t format = format_of(format_name);
    TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && x.size(-1) == k, "x must be [..., ", k, "] on the CPU, got ", x.sizes());
    check_packed(packed, format, n, k);
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
    m.def("allocate_packed", &allocate_packed);
    m.def("pack_into", &pack_into, py::call_guard<py::gil_scoped_release>());
    m.def("linear", &linear, py::call_guard<py::gil_scoped_release>());
}
