// Attention over a table of cache rows: the contract is slipstream/kernels/attention.py.
//
// Keys go in blocks of 64. Each block gives a row its maximum m, its sum l and its weighted values; blocks are merged
// in key order by the same few operations whoever computed them. So the blocks of one row can be spread over threads
// (few rows), or kept in one (many rows), without a bit changing.
//
// Scores: 16 keys are transposed so that a lane is a key; a lane sums over d in order and knows nothing of its
// neighbours, so a key's score has the same bits wherever its cache row lies and whoever else is in the block.
#include <algorithm>
#include <vector>

#include "attention_lanes.h"
#include "ops.h"

namespace slipstream {
namespace {

constexpr int TILE = 24;  // query vectors (rows x heads of a group) that share one read of K and V
// Multiply-adds below which one thread is faster.
constexpr int64_t PARALLEL_WORK = 300 * 1000;

struct Scratch {
    std::vector<float> memory;
    float* take(size_t floats) {
        if (memory.size() < floats + LANES) memory.resize(floats + LANES);
        const auto at = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<float*>((at + 63) & ~uintptr_t(63));
    }
};

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class T>
struct Problem {
    const T *q, *k, *v;
    T* out;
    AttentionIndex index;
    AttentionShape shape;
    float scale;

    int64_t group() const { return shape.heads / shape.kv_heads; }
    int64_t tile_rows() const { return std::max<int64_t>(1, TILE / group()); }
    int64_t tile_queries() const { return std::min(tile_rows(), shape.rows) * group(); }
    int64_t tiles() const { return (shape.rows + tile_rows() - 1) / tile_rows(); }
    int64_t items() const { return shape.batch * shape.kv_heads * tiles(); }
    int64_t keys_of(int64_t b, int64_t t) const {
        return index.prefix[b] + (index.depth ? index.depth[b * shape.rows + t] : t) + 1;
    }
};

// One tile of rows of one request and one KV head. Query i is head i % group of row i / group.
template <class T>
struct Tile {
    const Problem<T>& p;
    int64_t b, kv_head, first_row, rows, group, queries, dim, prefix;
    int64_t longest;     // keys of the row that has most
    int64_t common_end;  // keys before this index are seen by every row
    int64_t shared_end;  // keys before this index are the same for every row that sees them
    int64_t nodes;       // tree rows among which all ancestors are
    const int64_t* table;

    Tile(const Problem<T>& problem, int64_t item) : p(problem), longest(0) {
        const AttentionShape& s = p.shape;
        kv_head = item % s.kv_heads;
        first_row = item / s.kv_heads % p.tiles() * p.tile_rows();
        b = item / s.kv_heads / p.tiles();
        rows = std::min(p.tile_rows(), s.rows - first_row);
        group = p.group(), queries = rows * group, dim = s.dim;
        prefix = p.index.prefix[b];
        table = p.index.table + p.index.slots[b] * s.table_width;
        for (int64_t r = 0; r < rows; ++r) longest = std::max(longest, keys(r));
        common_end = p.index.depth ? prefix : keys(0);
        shared_end = p.index.depth ? prefix : longest;
        nodes = 0;
        for (int64_t r = 0; p.index.depth && r < rows; ++r)
            nodes = std::max(nodes, *std::max_element(path(r), path(r) + keys(r) - prefix) + 1);
    }
    int64_t keys(int64_t r) const { return p.keys_of(b, first_row + r); }
    int64_t blocks() const { return (longest + BLOCK - 1) / BLOCK; }
    int64_t offset(int64_t index) const { return (table[index] * p.shape.kv_heads + kv_head) * dim; }
    int64_t element(int64_t i) const {  // of query i, in q and in the output
        return ((b * p.shape.rows + first_row + i / group) * p.shape.heads + kv_head * group + i % group) * dim;
    }
    const int64_t* path(int64_t r) const {
        return p.index.ancestors + (b * p.shape.rows + first_row + r) * p.shape.ancestors_width;
    }
};

// Maximum, sum and weighted values of the queries of a tile: of all blocks so far, or of one block.
struct Partial {
    float *m, *l, *acc;
    Partial(float* at, int64_t queries)
        : m(at), l(at + round_up(queries, LANES)), acc(at + 2 * round_up(queries, LANES)) {}
    static int64_t floats(int64_t queries, int64_t dim) {
        return 2 * round_up(queries, LANES) + round_up(queries * dim, LANES);
    }
    void clear(int64_t queries, int64_t dim) const {
        std::fill(m, l, MINUS_INFINITY);
        std::fill(l, acc + queries * dim, 0.0f);
    }
};

// Where a thread keeps what it computes for one block.
struct Workspace {
    int64_t nodes;  // stride of node_scores
    float *transposed, *values, *scores, *node_scores, *by_running, *by_block;

    template <class T>
    Workspace(Scratch& scratch, const Problem<T>& p) {
        const int64_t queries = p.tile_queries(), padded = round_up(queries, LANES);
        nodes = p.index.depth ? round_up(p.shape.rows, LANES) : 0;
        const int64_t block = round_up(BLOCK * p.shape.dim, LANES);
        transposed = scratch.take(2 * block + queries * (BLOCK + nodes) + 2 * padded);
        values = transposed + block, scores = values + block;
        node_scores = scores + queries * BLOCK;
        by_running = node_scores + queries * nodes, by_block = by_running + padded;
    }
};

// Asks for rows of a cache ahead of their use: a long context comes from a cache that the cores share, or from memory.
template <class T>
inline void prefetch_rows(const T* rows, const int64_t* offsets, int count, int64_t dim) {
    for (int j = 0; j < count; ++j)
        for (int64_t byte = 0; byte < dim * int64_t(sizeof(T)); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(rows + offsets[j]) + byte);
}

// Scores of `count` keys (at most 64) of all queries into out[query * stride + key]. Keys past `count`, up to a
// multiple of 16, repeat the last one: nothing that a row does not own is read.
template <class T>
void score_keys(const Tile<T>& tile, int64_t* offsets, int count, float* transposed, float* out, int64_t stride) {
    const int groups = (count + LANES - 1) / LANES;
    for (int j = count; j < groups * LANES; ++j) offsets[j] = offsets[count - 1];
    const int64_t units = tile.dim * int64_t(sizeof(T)) / 4;
    for (int g = 0; g < groups; ++g)
        transpose_keys(tile.p.k, offsets + g * LANES, units, transposed + g * LANES * units);
    for (int64_t first = 0; first < tile.queries; first += MAX_QUERIES) {
        const int n = int(std::min<int64_t>(MAX_QUERIES, tile.queries - first));
        const T* q[MAX_QUERIES];
        for (int i = 0; i < n; ++i) q[i] = tile.p.q + tile.element(first + i);
        with_constant(n, [&](auto N) {
            score_some<N.value>(groups, q, transposed, units, tile.p.scale, out + first * stride, stride);
        });
    }
}

// Scores of the tile's queries in the block at `start`: each row's own keys, in its own order.
template <class T>
void score_block(const Tile<T>& tile, int64_t start, int64_t* offsets, const Workspace& work) {
    const int shared = int(std::clamp<int64_t>(tile.shared_end - start, 0, BLOCK));
    if (shared > 0) score_keys(tile, offsets, shared, work.transposed, work.scores, BLOCK);
    if (shared == BLOCK || !tile.p.index.depth) return;
    // The tree: every node's key against every query, then each row picks those of its ancestors.
    int64_t node_offsets[BLOCK];
    for (int64_t first = 0; first < tile.nodes; first += BLOCK) {
        const int count = int(std::min<int64_t>(BLOCK, tile.nodes - first));
        for (int j = 0; j < count; ++j) node_offsets[j] = tile.offset(tile.prefix + first + j);
        score_keys(tile, node_offsets, count, work.transposed, work.node_scores + first, work.nodes);
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
        const int64_t* path = tile.path(r) + (start - tile.prefix);
        const int end = int(std::min<int64_t>(tile.keys(r) - start, BLOCK));
        for (int64_t i = r * tile.group; i < (r + 1) * tile.group; ++i)
            for (int j = shared; j < end; ++j)
                work.scores[i * BLOCK + j] = work.node_scores[i * work.nodes + path[j]];
    }
}

// Scores -> weights in place, with their maximum and sum; only the first `keys` are looked at.
inline void soften(float* scores, int keys, float& m, float& l) {
    Vec part[BLOCK / LANES], top = splat(MINUS_INFINITY);
    for (int g = 0; g < BLOCK / LANES; ++g) {
        part[g] = keep(load(scores + g * LANES), std::clamp(keys - g * LANES, 0, LANES), MINUS_INFINITY);
        top = max(top, part[g]);
    }
    m = max_of(top);
    for (int g = 0; g < BLOCK / LANES; ++g) {
        part[g] = keep(exp(part[g] - splat(m)), std::clamp(keys - g * LANES, 0, LANES), 0.0f);
        store(scores + g * LANES, part[g]);
    }
    l = sum((part[0] + part[1]) + (part[2] + part[3]));
}

// Merges the maxima and sums of a block into the running ones, and says what to multiply the weighted values by.
// Queries with no key in the block keep what they have; their factors are not used.
void merge_sums(const Partial& run, const Partial& block, const Workspace& work, const int* keys, int64_t queries) {
    for (int64_t i = 0; i < queries; i += LANES) {
        const Vec m = load(run.m + i), m_block = load(block.m + i), m_next = max(m, m_block);
        const Vec by_running = exp(m - m_next), by_block = exp(m_block - m_next);
        store(work.by_running + i, by_running);
        store(work.by_block + i, by_block);
        float l_next[LANES], m_all[LANES];
        store(l_next, fma(load(block.l + i), by_block, load(run.l + i) * by_running));
        store(m_all, m_next);
        for (int j = 0; j < LANES && i + j < queries; ++j) {
            if (keys[i + j] <= 0) continue;
            run.m[i + j] = m_all[j];
            run.l[i + j] = l_next[j];
        }
    }
}

inline Merge merge_at(const Workspace& work, float* run, int64_t query, int64_t dim) {
    return {run ? run + query * dim : nullptr, work.by_running + query, work.by_block + query};
}

template <class T>
void weigh(const Tile<T>& tile, const T* v, const int64_t* offsets, int begin, int end, int64_t query, int64_t count,
           const Workspace& work, float* block, float* run) {
    for (int64_t last = query + count; query < last; query += MAX_QUERIES)
        with_constant(int(std::min<int64_t>(MAX_QUERIES, last - query)), [&](auto N) {
            weigh_some<N.value>(v, offsets, begin, end, work.scores + query * BLOCK, block + query * tile.dim,
                                merge_at(work, run, query, tile.dim), tile.dim);
        });
}

// The weighted values of a block: those of keys that all rows see are read once for six queries, the others row by
// row. They end in `block`, or merged into `run` unless that is null.
template <class T>
void weigh_block(const Tile<T>& tile, int64_t start, const int64_t* offsets, const int* keys, const Workspace& work,
                 float* block, float* run) {
    const int common = int(std::clamp<int64_t>(tile.common_end - start, 0, BLOCK));
    bool is_all = common > 0;
    for (int64_t i = 0; i < tile.queries; ++i) is_all &= keys[i] == common;
    if (common > 0) weigh(tile, tile.p.v, offsets, 0, common, 0, tile.queries, work, block, is_all ? run : nullptr);
    if (is_all) return;
    int64_t own[BLOCK];
    std::copy(offsets, offsets + common, own);
    for (int64_t r = 0; r < tile.rows; ++r) {
        const int64_t i = r * tile.group;
        if (keys[i] <= 0) continue;
        for (int j = common; j < keys[i]; ++j)
            own[j] = tile.p.index.depth ? tile.offset(tile.prefix + tile.path(r)[start + j - tile.prefix]) : offsets[j];
        weigh(tile, tile.p.v, own, common, keys[i], i, tile.group, work, block, run);
    }
}

// One block of one tile: into `block` alone, or merged into `run`.
template <class T>
void attend_block(const Tile<T>& tile, int64_t start, const Workspace& work, const Partial& block, const Partial* run,
                  int* keys) {
    int64_t offsets[BLOCK];
    const int shared = int(std::clamp<int64_t>(tile.shared_end - start, 0, BLOCK));
    for (int j = 0; j < shared; ++j) offsets[j] = tile.offset(start + j);
    prefetch_rows(tile.p.k, offsets, shared, tile.dim);
    prefetch_rows(tile.p.v, offsets, shared, tile.dim);
    score_block(tile, start, offsets, work);
    for (int64_t i = 0; i < tile.queries; ++i) {
        keys[i] = int(std::clamp<int64_t>(tile.keys(i / tile.group) - start, 0, BLOCK));
        if (keys[i] > 0) soften(work.scores + i * BLOCK, keys[i], block.m[i], block.l[i]);
    }
    if (run) merge_sums(*run, block, work, keys, tile.queries);
    weigh_block(tile, start, offsets, keys, work, block.acc, run ? run->acc : nullptr);
}

template <class T>
void write_rows(const Tile<T>& tile, const Partial& run) {
    for (int64_t i = 0; i < tile.queries; ++i) {
        const Vec total = splat(run.l[i]);
        T* out = tile.p.out + tile.element(i);
        const float* acc = run.acc + i * tile.dim;
        for (int64_t d = 0; d < tile.dim; d += LANES) {
            const int lanes = int(std::min<int64_t>(LANES, tile.dim - d));
            store(out + d, load(acc + d, lanes) / total, lanes);
        }
    }
}

thread_local Scratch scratch_work, scratch_run, scratch_blocks;

// Many tiles: each thread takes whole ones, the longest first.
template <class T>
void by_tile(const Problem<T>& p, int threads) {
    parallel_items(p.items(), threads, [&](int64_t item) {
        const Tile<T> tile(p, p.items() - 1 - item);
        const Workspace work(scratch_work, p);
        const int64_t floats = Partial::floats(tile.queries, tile.dim);
        float* memory = scratch_run.take(2 * floats);
        const Partial run(memory, tile.queries), block(memory + floats, tile.queries);
        run.clear(tile.queries, tile.dim);
        std::vector<int> keys(tile.queries);
        for (int64_t n = 0; n < tile.blocks(); ++n) attend_block(tile, n * BLOCK, work, block, &run, keys.data());
        write_rows(tile, run);
    });
}

// Merges the blocks of a tile, in order, by the very operations that `attend_block` uses.
template <class T>
void merge_blocks(const Tile<T>& tile, float* blocks, int64_t floats) {
    const Workspace work(scratch_work, tile.p);
    const Partial run(scratch_run.take(floats), tile.queries);
    run.clear(tile.queries, tile.dim);
    std::vector<int> keys(tile.queries);
    for (int64_t n = 0; n < tile.blocks(); ++n) {
        const Partial block(blocks + n * floats, tile.queries);
        for (int64_t i = 0; i < tile.queries; ++i) keys[i] = int(tile.keys(i / tile.group) - n * BLOCK);
        merge_sums(run, block, work, keys.data(), tile.queries);
        for (int64_t i = 0; i < tile.queries; ++i) {
            if (keys[i] <= 0) continue;
            const Vec by_running = splat(work.by_running[i]), by_block = splat(work.by_block[i]);
            for (int64_t d = 0; d < tile.dim; d += LANES) {
                const int lanes = int(std::min<int64_t>(LANES, tile.dim - d));
                float* at = run.acc + i * tile.dim + d;
                const Vec sum = load(block.acc + i * tile.dim + d, lanes);
                store(at, fma(sum, by_block, load(at, lanes) * by_running), lanes);
            }
        }
    }
    write_rows(tile, run);
}

// Few tiles: their blocks are spread over the threads, and who finishes a tile's last block merges them.
template <class T>
void by_block(const Problem<T>& p, int threads) {
    const int64_t items = p.items(), floats = Partial::floats(p.tile_queries(), p.shape.dim);
    std::vector<int64_t> first_block(items + 1, 0);
    for (int64_t i = 0; i < items; ++i) first_block[i + 1] = first_block[i] + Tile<T>(p, i).blocks();
    float* memory = scratch_blocks.take(first_block[items] * floats);
    std::vector<std::atomic<int64_t>> left(items);
    for (int64_t i = 0; i < items; ++i) left[i] = first_block[i + 1] - first_block[i];
    parallel_items(first_block[items], threads, [&](int64_t unit) {
        const int64_t item = std::upper_bound(first_block.begin(), first_block.end(), unit) - first_block.begin() - 1;
        const Tile<T> tile(p, item);
        const Workspace work(scratch_work, p);
        std::vector<int> keys(tile.queries);
        const Partial block(memory + unit * floats, tile.queries);
        attend_block<T>(tile, (unit - first_block[item]) * BLOCK, work, block, nullptr, keys.data());
        if (left[item].fetch_sub(1, std::memory_order_acq_rel) == 1)
            merge_blocks(tile, memory + first_block[item] * floats, floats);
    });
}

}  // namespace

template <class T>
void attention(const T* q, const T* k_cache, const T* v_cache, T* out, const AttentionIndex& index,
               const AttentionShape& shape, float scale) {
    const Problem<T> p{q, k_cache, v_cache, out, index, shape, scale};
    int64_t keys = 0;
    for (int64_t b = 0; b < shape.batch; ++b)
        for (int64_t t = 0; t < shape.rows; ++t) keys += p.keys_of(b, t);
    const int threads = keys * shape.heads * shape.dim < PARALLEL_WORK ? 1 : usable_threads();
    if (threads == 1 || p.items() >= 4 * threads)
        by_tile(p, threads);
    else
        by_block(p, threads);
}

template void attention(const float*, const float*, const float*, float*, const AttentionIndex&,
                        const AttentionShape&, float);
template void attention(const bf16*, const bf16*, const bf16*, bf16*, const AttentionIndex&, const AttentionShape&,
                        float);

}  // namespace slipstream
