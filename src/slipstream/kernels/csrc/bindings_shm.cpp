// What Python calls for collectives through shared memory: argument checks, allocation, then shm.h.
#include "bindings.h"
#include "ops.h"
#include "shm.h"

namespace py = pybind11;
using at::Tensor;
using slipstream::by_type, slipstream::in, slipstream::out;
using slipstream::check_cpu, slipstream::check_in_place, slipstream::check_same, slipstream::contiguous;
using slipstream::RankFailure, slipstream::ShmGroup;

namespace {

const char* type_name(uint32_t type) {
    return type < uint32_t(at::ScalarType::NumOptions) ? at::toString(at::ScalarType(type)) : "an unknown type";
}

uint32_t number(const Tensor& t) { return uint32_t(t.scalar_type()); }

// Ctrl-C reaches a rank that waits.
void let_python_look() {
    py::gil_scoped_acquire python;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::unique_ptr<ShmGroup> make(int rank, const std::vector<int>& segments, std::vector<int> locks, int64_t slot_bytes,
                               int64_t two_shot_bytes, int64_t spin_us, int64_t patience_ms) {
    TORCH_CHECK(segments.size() == locks.size() && rank >= 0 && size_t(rank) < segments.size() && segments.size() <= 64,
                "a segment and a lock for each of 1 to 64 ranks are needed");
    TORCH_CHECK(slot_bytes > 0 && slot_bytes % 128 == 0, "slot_bytes must be a multiple of 128, not ", slot_bytes);
    return std::make_unique<ShmGroup>(
        rank, segments, std::move(locks),
        slipstream::ShmSettings{slot_bytes, two_shot_bytes, spin_us, patience_ms, &type_name, &let_python_look});
}

void all_reduce(ShmGroup& group, const Tensor& x) {
    check_cpu(x, "x");
    check_in_place(x, "x");
    by_type(x, "x", [&](auto* t) { group.all_reduce(out(x, t), x.numel(), number(x)); });
}

std::optional<Tensor> all_reduce_add_rms_norm(ShmGroup& group, const Tensor& x_any, const Tensor& residual,
                                              const Tensor& weight, double eps) {
    check_cpu(x_any, "x");
    check_same(residual, x_any, "residual");
    check_cpu(weight, "weight");
    check_in_place(residual, "residual");
    check_in_place(weight, "weight");
    TORCH_CHECK(x_any.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x_any.size(-1) && x_any.size(-1) > 0,
                "weight must be [H] for x [..., H], got ", weight.sizes(), " and ", x_any.sizes());
    TORCH_CHECK(residual.sizes() == x_any.sizes(), "residual must be ", x_any.sizes(), ", not ", residual.sizes());
    const Tensor x = contiguous(x_any);
    Tensor y = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    bool is_done = false;
    by_type(x, "x", [&](auto* t) {
        by_type(weight, "weight", [&](auto* w) {
            is_done = group.all_reduce_add_rms_norm(in(x, t), out(residual, t), in(weight, w), out(y, t),
                                                    x.numel() / width, width, float(eps), number(x));
        });
    });
    return is_done ? std::optional<Tensor>(y) : std::nullopt;
}

Tensor all_gather(ShmGroup& group, const Tensor& x_any, int64_t size) {
    check_cpu(x_any, "x");
    TORCH_CHECK(x_any.dim() >= 1, "x must be [..., n]");
    const Tensor x = contiguous(x_any);
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    const int64_t row_bytes = shape.back() * x.element_size();
    shape.back() *= size;
    Tensor y = at::empty(shape, x.options());
    group.all_gather(static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(y.mutable_data_ptr()),
                     row_bytes ? int64_t(x.nbytes()) / row_bytes : 0, row_bytes, number(x));
    return y;
}

void broadcast(ShmGroup& group, const Tensor& x) {
    check_cpu(x, "x");
    check_in_place(x, "x");
    group.broadcast(static_cast<char*>(x.mutable_data_ptr()), int64_t(x.nbytes()), number(x));
}

}  // namespace

void register_shm(py::module_& m) {
    const auto without_gil = py::call_guard<py::gil_scoped_release>();
    py::register_exception<RankFailure>(m, "RankFailure", py::module_::import("slipstream.errors").attr("RankError"));
    m.def("shm_segment_bytes", &ShmGroup::segment_bytes);
    py::class_<ShmGroup>(m, "ShmGroup")
        .def(py::init(&make))
        .def("all_reduce_", &all_reduce, without_gil)
        .def("all_reduce_add_rms_norm_", &all_reduce_add_rms_norm, without_gil)
        .def("all_gather", &all_gather, without_gil)
        .def("broadcast_", &broadcast, without_gil)
        .def("barrier", &ShmGroup::barrier, without_gil)
        .def("leave", &ShmGroup::leave)
        .def("set_two_shot_bytes", &ShmGroup::set_two_shot_bytes);
}
