// C entry points, for tests alone, to the kernels compiled without AVX-512 (-DSLIPSTREAM_PORTABLE).
#include "ops.h"

using namespace slipstream;

template <class T>
static void attend(const void* q, const void* k, const void* v, void* out, const int64_t* const* indices,
                   const int64_t* shape, float scale) {
    const AttentionIndex index{indices[0], indices[1], indices[2], indices[3], indices[4]};
    attention(static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out), index,
              AttentionShape{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]}, scale);
}

extern "C" {
void portable_attention(int is_bf16, const void* q, const void* k, const void* v, void* out,
                        const int64_t* const* indices, const int64_t* shape, float scale) {
    (is_bf16 ? attend<bf16> : attend<float>)(q, k, v, out, indices, shape, scale);
}
void portable_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
    rms_norm(x, weight, y, rows, width, eps);
}
void portable_swiglu(const float* x, float* y, int64_t rows, int64_t width) { swiglu(x, y, rows, width); }
void portable_rope(const float* qkv, const float* cos, const float* sin, const int64_t* positions,
                   const int64_t* kv_rows, float* q, float* k, float* v, int64_t rows, int64_t heads, int64_t kv_heads,
                   int64_t dim) {
    rope_kv_write(qkv, cos, sin, positions, kv_rows, q, k, v, {rows, heads, kv_heads, dim});
}
// sizes: rows, experts, per token, groups, top groups.
void portable_route(const float* logits, const float* bias, const int64_t* sizes, int is_softmax, float scale,
                    int64_t* chosen, float* weights) {
    route(logits, bias, {sizes[1], sizes[2], sizes[3], sizes[4], is_softmax != 0, true, scale}, sizes[0], chosen, weights);
}
void portable_weighted_sum(const float* outputs, const float* weights, float* y, int64_t rows, int64_t places,
                           int64_t width) {
    weighted_sum(outputs, weights, y, rows, places, width);
}
void portable_sort(const int64_t* chosen, int64_t pairs, int64_t experts, int64_t* order, int64_t* offsets) {
    sort_by_expert(chosen, pairs, experts, order, offsets);
}
// shape: batch, rows, heads, rank, rotated, width of a head of q; all contiguous.
void portable_latent(float* q, const float* kv, const float* norm, float eps, const float* cos, const float* sin,
                     const int64_t* positions, const int64_t* kv_rows, float* cache, const int64_t* shape) {
    const int64_t rows = shape[1], heads = shape[2], rank = shape[3], rotated = shape[4], head = shape[5];
    const LatentRows<float> x{q + head - rotated, kv,    rows * heads * head, heads * head, head, rows * (rank + rotated),
                              rank + rotated,     shape[0], rows,             heads,        rank, rotated};
    latent_rope_write(x, norm, eps, cos, sin, positions, kv_rows, cache);
}
void portable_argmax(const float* logits, int64_t* ids, int64_t rows, int64_t width) {
    argmax(logits, ids, rows, width);
}
void portable_sample(const float* logits, const float* temperature, const int64_t* top_k, const float* top_p,
                     const int64_t* seed, const int64_t* position, int64_t* ids, int64_t rows, int64_t width) {
    sample(logits, {temperature, top_k, top_p, seed, position}, ids, rows, width);
}
}
