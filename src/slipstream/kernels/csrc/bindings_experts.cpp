// What Python calls for kernels/experts.py, kernels/latent.py and linear_heads: argument checks, then the plain kernels.
#include <ATen/MemoryOverlap.h>

#include <vector>

#include "bindings.h"
#include "bindings_packed.h"
#include "ops.h"

namespace py = pybind11;
using at::Tensor;
using slipstream::by_type, slipstream::in, slipstream::out, slipstream::index;

namespace {

slipstream::GroupedCall grouped(const Tensor& packed, const std::string& format_name, int64_t groups, int64_t n, int64_t k) {
    slipstream::GroupedCall call{};
    call.format = slipstream::format_of(format_name);
    slipstream::check_packed(packed, call.format, n, k, groups);
    call.packed = packed.const_data_ptr();
    call.groups = groups;
    call.n = n;
    call.k = k;
    call.threads = at::get_num_threads();
    return call;
}

// Where each row of [..., A, B] begins, in elements, whatever the strides of the leading dimensions.
std::vector<int64_t> row_starts(const Tensor& t) {
    std::vector<int64_t> starts{0};
    for (int64_t d = 0; d < t.dim() - 2; ++d) {
        std::vector<int64_t> longer;
        longer.reserve(starts.size() * t.size(d));
        for (const int64_t start : starts)
            for (int64_t i = 0; i < t.size(d); ++i) longer.push_back(start + i * t.stride(d));
        starts.swap(longer);
    }
    return starts;
}

Tensor heads_output(const Tensor& x, const std::optional<Tensor>& given, int64_t n) {
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = n;
    if (!given.has_value()) return at::empty(shape, x.options());
    slipstream::check_same(*given, x, "out");
    TORCH_CHECK(given->sizes() == at::IntArrayRef(shape) && (n == 1 || given->stride(-1) == 1), "out must be ",
                at::IntArrayRef(shape), " with neighbouring elements, got ", given->sizes());
    at::assert_no_internal_overlap(*given);
    return *given;
}

// x [..., G, K] and y [..., G, N] with any strides but neighbouring elements. y may share x's memory: the product
// takes in all of x before it writes.
Tensor linear_heads(const Tensor& x, const Tensor& packed, const std::string& format_name, int64_t groups, int64_t n,
                    int64_t k, const std::optional<Tensor>& given) {
    TORCH_CHECK(x.is_cpu() && x.dim() >= 2 && x.size(-2) == groups && x.size(-1) == k && (k == 1 || x.stride(-1) == 1),
                "x must be [..., ", groups, ", ", k, "] with neighbouring elements, got ", x.sizes());
    slipstream::GroupedCall call = grouped(packed, format_name, groups, n, k);
    call.x_type = call.y_type = slipstream::scalar_of(x.scalar_type(), "x");
    const Tensor y = heads_output(x, given, n);
    const std::vector<int64_t> x_starts = row_starts(x), y_starts = row_starts(y);
    const int64_t rows = int64_t(x_starts.size()), bytes = x.element_size();
    std::vector<const void*> from(rows * groups);
    std::vector<void*> to(rows * groups);
    std::vector<int64_t> offsets(groups + 1);
    const auto* base = static_cast<const char*>(x.const_data_ptr());
    auto* target = static_cast<char*>(y.mutable_data_ptr());
    for (int64_t g = 0; g < groups; ++g) {
        offsets[g + 1] = (g + 1) * rows;
        for (int64_t r = 0; r < rows; ++r) {
            from[g * rows + r] = base + (x_starts[r] + g * x.stride(-2)) * bytes;
            to[g * rows + r] = target + (y_starts[r] + g * y.stride(-2)) * bytes;
        }
    }
    call.x = from.data();
    call.y = to.data();
    call.offsets = offsets.data();
    slipstream_grouped(&call);
    return y;
}

std::tuple<Tensor, Tensor> route(const Tensor& logits_any, const std::optional<Tensor>& bias_any, int64_t per_token,
                                 bool is_softmax, int64_t groups, int64_t top_groups, bool normalises, double scale) {
    TORCH_CHECK(logits_any.dim() == 2 && logits_any.scalar_type() == at::kFloat && logits_any.is_cpu(),
                "logits must be float32 [R, E] on the CPU, got ", logits_any.sizes());
    const Tensor logits = slipstream::contiguous(logits_any);
    const int64_t rows = logits.size(0), experts = logits.size(1);
    TORCH_CHECK(groups > 0 && experts % groups == 0 && top_groups > 0 && top_groups <= groups && per_token > 0 &&
                    per_token <= experts / groups * top_groups && (groups == 1 || experts / groups >= 2),
                "a row cannot choose ", per_token, " of ", experts, " experts in ", top_groups, " of ", groups, " groups");
    Tensor bias;
    if (bias_any.has_value()) bias = index(*bias_any, {experts}, "bias", at::kFloat);
    Tensor chosen = at::empty({rows, per_token}, logits.options().dtype(at::kLong));
    Tensor weights = at::empty({rows, per_token}, logits.options());
    slipstream::route(logits.const_data_ptr<float>(), bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                      {experts, per_token, groups, top_groups, is_softmax, normalises, float(scale)}, rows,
                      chosen.mutable_data_ptr<int64_t>(), weights.mutable_data_ptr<float>());
    return {chosen, weights};
}

// The rows of a matrix, in the order in which a grouped product takes them.
template <class P>
std::vector<P> row_pointers(char* base, int64_t row_bytes, const std::vector<int64_t>& order, int64_t divisor) {
    std::vector<P> rows(order.size());
    for (size_t i = 0; i < order.size(); ++i) rows[i] = base + order[i] / divisor * row_bytes;
    return rows;
}

Tensor experts(const Tensor& x_any, const Tensor& chosen_any, const Tensor& weights_any, const Tensor& gate_up,
               const Tensor& down, const std::string& format, int64_t count, int64_t width) {
    slipstream::check_cpu(x_any, "x");
    const Tensor x = slipstream::contiguous(x_any);
    const int64_t hidden = x.size(-1), rows = x.numel() / hidden;
    TORCH_CHECK(chosen_any.dim() == 2 && chosen_any.size(0) == rows, "chosen must be [", rows, ", k], got ", chosen_any.sizes());
    const int64_t places = chosen_any.size(1), pairs = rows * places;
    const Tensor chosen = index(chosen_any, {rows, places}, "chosen");
    const Tensor weights = index(weights_any, {rows, places}, "weights", at::kFloat);
    slipstream::check_range(chosen.const_data_ptr<int64_t>(), pairs, count, "chosen");
    std::vector<int64_t> order(pairs), offsets(count + 1), sorted(pairs);
    slipstream::sort_by_expert(chosen.const_data_ptr<int64_t>(), pairs, count, order.data(), offsets.data());
    for (int64_t i = 0; i < pairs; ++i) sorted[i] = i;

    const Tensor both = at::empty({pairs, 2 * width}, x.options()), act = at::empty({pairs, width}, x.options());
    const Tensor outputs = at::empty({pairs, hidden}, x.options().dtype(at::kFloat));
    const auto base = [](const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); };
    const int64_t bytes = x.element_size();

    slipstream::GroupedCall up = grouped(gate_up, format, count, 2 * width, hidden);
    up.x_type = up.y_type = slipstream::scalar_of(x.scalar_type(), "x");
    const auto x_rows = row_pointers<const void*>(base(x), hidden * bytes, order, places);
    const auto both_rows = row_pointers<void*>(base(both), 2 * width * bytes, sorted, 1);
    up.x = x_rows.data();
    up.y = both_rows.data();
    up.offsets = offsets.data();
    slipstream_grouped(&up);
    by_type(x, "x", [&](auto* t) { slipstream::swiglu(in(both, t), out(act, t), pairs, width); });

    slipstream::GroupedCall back = grouped(down, format, count, hidden, width);
    back.x_type = up.x_type;
    back.y_type = slipstream::SCALAR_FLOAT32;
    const auto act_rows = row_pointers<const void*>(base(act), width * bytes, sorted, 1);
    const auto output_rows = row_pointers<void*>(base(outputs), hidden * 4, order, 1);
    back.x = act_rows.data();
    back.y = output_rows.data();
    back.offsets = offsets.data();
    slipstream_grouped(&back);

    Tensor y = at::empty(x.sizes(), x.options());
    by_type(x, "x", [&](auto* t) {
        slipstream::weighted_sum(outputs.const_data_ptr<float>(), weights.const_data_ptr<float>(), out(y, t), rows, places,
                                 hidden);
    });
    return y;
}

void latent_rope_write(const Tensor& q, const Tensor& kv, const Tensor& norm, double eps, const Tensor& cos,
                       const Tensor& sin, const Tensor& positions_any, const Tensor& kv_rows_any, const Tensor& cache) {
    slipstream::check_same(kv, q, "kv");
    slipstream::check_same(cache, q, "cache");
    slipstream::check_in_place(cache, "cache");
    slipstream::check_in_place(norm, "norm");
    TORCH_CHECK(q.dim() == 4 && kv.dim() == 3 && q.size(0) == kv.size(0) && q.size(1) == kv.size(1) && norm.dim() == 1,
                "q must be [B, T, H, N + D] and kv [B, T, L + D], got ", q.sizes(), " and ", kv.sizes());
    const int64_t batch = q.size(0), rows = q.size(1), rank = norm.size(0), rotated = kv.size(2) - rank;
    TORCH_CHECK(q.stride(3) == 1 && kv.stride(2) == 1, "q and kv must be rows with neighbouring elements");
    at::assert_no_internal_overlap(q);
    TORCH_CHECK(rotated > 0 && rotated % 2 == 0 && rotated <= q.size(3), "kv holds ", rotated, " rotated elements");
    TORCH_CHECK(cache.dim() == 3 && cache.size(1) == 1 && cache.size(2) == rank + rotated, "cache must be [rows, 1, ",
                rank + rotated, "], got ", cache.sizes());
    index(cos, {cos.size(0), rotated / 2}, "cos", at::kFloat);
    index(sin, cos.sizes(), "sin", at::kFloat);
    slipstream::check_in_place(cos, "cos");
    slipstream::check_in_place(sin, "sin");
    const Tensor positions = index(positions_any, {batch, rows}, "positions");
    const Tensor kv_rows = index(kv_rows_any, {batch, rows}, "kv_rows");
    slipstream::check_range(positions.const_data_ptr<int64_t>(), batch * rows, cos.size(0), "positions");
    slipstream::check_range(kv_rows.const_data_ptr<int64_t>(), batch * rows, cache.size(0), "kv_rows");
    by_type(q, "q", [&](auto* t) {
        by_type(norm, "norm", [&](auto* w) {
            using T = std::remove_pointer_t<decltype(t)>;
            const slipstream::LatentRows<T> x{out(q, t) + q.size(3) - rotated, in(kv, t), q.stride(0), q.stride(1),
                                              q.stride(2), kv.stride(0), kv.stride(1), batch, rows, q.size(2), rank, rotated};
            slipstream::latent_rope_write(x, in(norm, w), float(eps), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
                                          positions.const_data_ptr<int64_t>(), kv_rows.const_data_ptr<int64_t>(), out(cache, t));
        });
    });
}

}  // namespace

void register_experts(py::module_& m) {
    const auto without_gil = py::call_guard<py::gil_scoped_release>();
    m.def("linear_heads", &linear_heads, without_gil);
    m.def("route", &route, without_gil);
    m.def("experts", &experts, without_gil);
    m.def("latent_rope_write", &latent_rope_write, without_gil);
}
