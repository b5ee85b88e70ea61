// What Python calls for the other operations: argument checks, allocation, then the plain kernels.
#include "bindings.h"
#include "ops.h"

namespace py = pybind11;
using at::Tensor;
using slipstream::bf16, slipstream::by_type, slipstream::in, slipstream::out;
using slipstream::check_cpu, slipstream::check_in_place, slipstream::check_range, slipstream::check_same;
using slipstream::contiguous, slipstream::index;

namespace {

void check_norm(const Tensor& x, const Tensor& weight) {
    check_cpu(x, "x");
    check_cpu(weight, "weight");
    TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1) && x.size(-1) > 0,
                "weight must be [H] for x [..., H], got ", weight.sizes(), " and ", x.sizes());
    check_in_place(weight, "weight");
}

Tensor rms_norm(const Tensor& x_any, const Tensor& weight, double eps) {
    check_norm(x_any, weight);
    const Tensor x = contiguous(x_any);
    Tensor y = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    by_type(x, "x", [&](auto* t) {
        by_type(weight, "weight", [&](auto* w) {
            slipstream::rms_norm(in(x, t), in(weight, w), out(y, t), x.numel() / width, width, float(eps));
        });
    });
    return y;
}

Tensor add_rms_norm(const Tensor& x_any, const Tensor& residual, const Tensor& weight, double eps) {
    check_norm(x_any, weight);
    check_same(residual, x_any, "residual");
    check_in_place(residual, "residual");
    TORCH_CHECK(residual.sizes() == x_any.sizes(), "residual must be ", x_any.sizes(), ", not ", residual.sizes());
    const Tensor x = contiguous(x_any);
    Tensor y = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    by_type(x, "x", [&](auto* t) {
        by_type(weight, "weight", [&](auto* w) {
            slipstream::add_rms_norm(in(x, t), out(residual, t), in(weight, w), out(y, t), x.numel() / width, width,
                                     float(eps));
        });
    });
    return y;
}

void rms_norm_heads(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, int64_t kv_heads, double eps) {
    check_cpu(qkv, "qkv");
    check_in_place(qkv, "qkv");
    check_in_place(q_norm, "q_norm");
    check_same(k_norm, q_norm, "k_norm");
    check_in_place(k_norm, "k_norm");
    TORCH_CHECK(q_norm.dim() == 1 && q_norm.sizes() == k_norm.sizes() && q_norm.size(0) > 0, "norms must be [D]");
    const int64_t dim = q_norm.size(0), heads = qkv.size(-1) / dim - 2 * kv_heads;
    TORCH_CHECK(kv_heads > 0 && heads > 0 && qkv.size(-1) == (heads + 2 * kv_heads) * dim, "qkv does not hold ", kv_heads,
                " KV heads of ", dim, ": ", qkv.sizes());
    const int64_t rows = qkv.numel() / qkv.size(-1);
    by_type(qkv, "qkv", [&](auto* t) {
        by_type(q_norm, "q_norm", [&](auto* w) {
            slipstream::rms_norm_heads(out(qkv, t), in(q_norm, w), in(k_norm, w), rows, {rows, heads, kv_heads, dim},
                                       float(eps));
        });
    });
}

Tensor swiglu(const Tensor& gate_up_any) {
    check_cpu(gate_up_any, "gate_up");
    TORCH_CHECK(gate_up_any.dim() >= 1 && gate_up_any.size(-1) % 2 == 0 && gate_up_any.size(-1) > 0,
                "gate_up must be [..., 2I], got ", gate_up_any.sizes());
    const Tensor gate_up = contiguous(gate_up_any);
    c10::SmallVector<int64_t, 5> shape(gate_up.sizes().begin(), gate_up.sizes().end());
    const int64_t width = shape.back() /= 2;
    Tensor y = at::empty(shape, gate_up.options());
    by_type(gate_up, "gate_up",
            [&](auto* t) { slipstream::swiglu(in(gate_up, t), out(y, t), y.numel() / width, width); });
    return y;
}

// [rows, Hkv, D], both alike and of x's dtype.
void check_caches(const Tensor& k_cache, const Tensor& v_cache, const Tensor& x) {
    check_same(k_cache, x, "k_cache");
    check_same(v_cache, x, "v_cache");
    check_in_place(k_cache, "k_cache");
    check_in_place(v_cache, "v_cache");
    TORCH_CHECK(k_cache.dim() == 3 && k_cache.sizes() == v_cache.sizes(), "caches must be alike, [rows, Hkv, D], got ",
                k_cache.sizes(), " and ", v_cache.sizes());
    TORCH_CHECK(k_cache.size(1) > 0 && k_cache.size(2) > 0 && k_cache.size(2) % 2 == 0,
                "caches need KV heads and an even head dimension, got ", k_cache.sizes());
}

Tensor rope_kv_write(const Tensor& qkv_any, const Tensor& cos, const Tensor& sin, const Tensor& positions_any,
                     const Tensor& kv_rows_any, const Tensor& k_cache, const Tensor& v_cache) {
    check_cpu(qkv_any, "qkv");
    check_caches(k_cache, v_cache, qkv_any);
    TORCH_CHECK(qkv_any.dim() == 3, "qkv must be [B, T, (H + 2 Hkv) D], got ", qkv_any.sizes());
    const int64_t batch = qkv_any.size(0), rows = qkv_any.size(1), kv_heads = k_cache.size(1), dim = k_cache.size(2);
    const int64_t heads = qkv_any.size(2) / dim - 2 * kv_heads;
    TORCH_CHECK(heads > 0 && qkv_any.size(2) == (heads + 2 * kv_heads) * dim, "qkv does not hold ", kv_heads,
                " KV heads of ", dim, ": ", qkv_any.sizes());
    const Tensor positions = index(positions_any, {batch, rows}, "positions");
    const Tensor kv_rows = index(kv_rows_any, {batch, rows}, "kv_rows");
    index(cos, {cos.size(0), dim / 2}, "cos", at::kFloat);
    index(sin, cos.sizes(), "sin", at::kFloat);
    check_in_place(cos, "cos");
    check_in_place(sin, "sin");
    const int64_t* position = positions.const_data_ptr<int64_t>();
    const int64_t* kv_row = kv_rows.const_data_ptr<int64_t>();
    check_range(position, batch * rows, cos.size(0), "positions");
    check_range(kv_row, batch * rows, k_cache.size(0), "kv_rows");
    const Tensor qkv = contiguous(qkv_any);
    Tensor q = at::empty({batch, rows, heads, dim}, qkv.options());
    by_type(qkv, "qkv", [&](auto* t) {
        slipstream::rope_kv_write(in(qkv, t), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), position, kv_row,
                                  out(q, t), out(k_cache, t), out(v_cache, t), {batch * rows, heads, kv_heads, dim});
    });
    return q;
}

// Every index that the kernel will follow leads into the caches.
void check_indices(const slipstream::AttentionIndex& at, const slipstream::AttentionShape& s, int64_t slots,
                   int64_t table_columns, int64_t cache_rows) {
    check_range(at.slots, s.batch, slots, "slots");
    check_range(at.prefix, s.batch, table_columns, "prefix");
    if (at.depth) check_range(at.depth, s.batch * s.rows, s.ancestors_width, "depth");
    for (int64_t b = 0; b < s.batch; ++b) {
        int64_t keys = at.prefix[b] + s.rows;  // a chain's; a tree's end with the last row that is an ancestor
        if (at.depth) {
            int64_t nodes = 0;
            for (int64_t t = b * s.rows; t < (b + 1) * s.rows; ++t) {
                const int64_t *path = at.ancestors + t * s.ancestors_width, *end = path + at.depth[t] + 1;
                check_range(path, end - path, s.rows, "ancestors");
                nodes = std::max(nodes, *std::max_element(path, end) + 1);
            }
            keys = at.prefix[b] + nodes;
        }
        TORCH_CHECK(keys <= table_columns, "the table has ", table_columns, " columns, request ", b, " needs ", keys);
        check_range(at.table + at.slots[b] * s.table_width, keys, cache_rows, "table");
    }
}

Tensor attention(const Tensor& q_any, const Tensor& k_cache, const Tensor& v_cache, const Tensor& table,
                 const Tensor& slots_any, const Tensor& prefix_any, const std::optional<Tensor>& depth_any,
                 const std::optional<Tensor>& ancestors_any, double scale) {
    check_cpu(q_any, "q");
    check_caches(k_cache, v_cache, q_any);
    TORCH_CHECK(q_any.dim() == 4 && q_any.size(3) == k_cache.size(2) && q_any.size(2) % k_cache.size(1) == 0,
                "q must be [B, T, H, D] with H a multiple of the KV heads, got ", q_any.sizes(), " for caches ",
                k_cache.sizes());
    TORCH_CHECK(depth_any.has_value() == ancestors_any.has_value(), "depth and ancestors come together");
    TORCH_CHECK(table.dim() == 2 && table.stride(1) == 1, "table must be [S, P] with neighbouring columns");
    index(table.select(0, 0), {table.size(1)}, "table");
    const Tensor q = contiguous(q_any);
    slipstream::AttentionShape shape{q.size(0), q.size(1), q.size(2), k_cache.size(1), q.size(3), table.stride(0), 0};
    const Tensor slots = index(slots_any, {shape.batch}, "slots");
    const Tensor prefix = index(prefix_any, {shape.batch}, "prefix");
    slipstream::AttentionIndex at{table.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                                  prefix.const_data_ptr<int64_t>(), nullptr, nullptr};
    Tensor depth, ancestors;
    if (depth_any.has_value()) {
        TORCH_CHECK(ancestors_any->dim() == 3, "ancestors must be [B, T, A], got ", ancestors_any->sizes());
        shape.ancestors_width = ancestors_any->size(2);
        depth = index(*depth_any, {shape.batch, shape.rows}, "depth");
        ancestors = index(*ancestors_any, {shape.batch, shape.rows, shape.ancestors_width}, "ancestors");
        at.depth = depth.const_data_ptr<int64_t>();
        at.ancestors = ancestors.const_data_ptr<int64_t>();
    }
    check_indices(at, shape, table.size(0), table.size(1), k_cache.size(0));
    Tensor y = at::empty(q.sizes(), q.options());
    if (q.numel() == 0) return y;
    by_type(q, "q", [&](auto* t) {
        slipstream::attention(in(q, t), in(k_cache, t), in(v_cache, t), out(y, t), at, shape, float(scale));
    });
    return y;
}

Tensor check_logits(const Tensor& logits) {
    check_cpu(logits, "logits");
    TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.size(1) > 0,
                "logits must be float32 [R, V], got ", logits.scalar_type(), " ", logits.sizes());
    return contiguous(logits);
}

Tensor argmax(const Tensor& logits_any) {
    const Tensor logits = check_logits(logits_any);
    Tensor ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
    slipstream::argmax(logits.const_data_ptr<float>(), ids.mutable_data_ptr<int64_t>(), logits.size(0), logits.size(1));
    return ids;
}

Tensor sample(const Tensor& logits_any, const Tensor& temperature_any, const Tensor& top_k_any, const Tensor& top_p_any,
              const Tensor& seed_any, const Tensor& position_any) {
    const Tensor logits = check_logits(logits_any);
    const int64_t rows = logits.size(0);
    const Tensor temperature = index(temperature_any, {rows}, "temperature", at::kFloat);
    const Tensor top_k = index(top_k_any, {rows}, "top_k"), top_p = index(top_p_any, {rows}, "top_p", at::kFloat);
    const Tensor seed = index(seed_any, {rows}, "seed"), position = index(position_any, {rows}, "position");
    Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
    const slipstream::SampleSettings settings{temperature.const_data_ptr<float>(), top_k.const_data_ptr<int64_t>(),
                                              top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(),
                                              position.const_data_ptr<int64_t>()};
    slipstream::sample(logits.const_data_ptr<float>(), settings, ids.mutable_data_ptr<int64_t>(), rows, logits.size(1));
    return ids;
}

std::tuple<Tensor, Tensor> lookup(const Tensor& tokens, const Tensor& slots_any, const Tensor& lengths_any,
                                  int64_t max_suffix, int64_t count) {
    check_cpu(tokens, "tokens");
    TORCH_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong && tokens.stride(1) == 1,
                "tokens must be int64 [S, P] with neighbouring columns");
    TORCH_CHECK(max_suffix >= 0 && count >= 0, "max_suffix and count must not be negative");
    const int64_t batch = slots_any.numel();
    const Tensor slots = index(slots_any, {batch}, "slots"), lengths = index(lengths_any, {batch}, "lengths");
    const int64_t *slot = slots.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
    check_range(slot, batch, tokens.size(0), "slots");
    check_range(length, batch, tokens.size(1) + 1, "lengths");
    Tensor draft = at::empty({batch, count}, tokens.options());
    Tensor matched = at::empty({batch}, tokens.options());
    for (int64_t b = 0; b < batch; ++b)
        matched.mutable_data_ptr<int64_t>()[b] =
            slipstream::lookup(tokens.const_data_ptr<int64_t>() + slot[b] * tokens.stride(0), length[b], max_suffix,
                               count, draft.mutable_data_ptr<int64_t>() + b * count);
    return {draft, matched};
}

}  // namespace

void register_ops(py::module_& m) {
    const auto without_gil = py::call_guard<py::gil_scoped_release>();
    m.def("rms_norm", &rms_norm, without_gil);
    m.def("add_rms_norm_", &add_rms_norm, without_gil);
    m.def("rms_norm_heads_", &rms_norm_heads, without_gil);
    m.def("swiglu", &swiglu, without_gil);
    m.def("rope_kv_write", &rope_kv_write, without_gil);
    m.def("attention", &attention, without_gil);
    m.def("argmax", &argmax, without_gil);
    m.def("sample", &sample, without_gil);
    m.def("lookup", &lookup, without_gil);
}
