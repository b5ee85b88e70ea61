// y = x W^T + b over a packed weight: which thread computes what, and in what order the caches see it.
#include "linear.h"

#include <cstdlib>
#include <memory>

#include "linear_rows.h"
#include "linear_tiles.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace slipstream {
namespace {

constexpr int MAX_TILE_ROWS = 12;

// What differs between the formats: the tiles by row count, and the sizes that they step through.
struct Kernel {
    const Tile* tiles;  // tiles[R - 1] computes R rows
    int max_rows;       // more would spill accumulators out of the 32 vector registers
    int64_t steps, panel_bytes, stride;
};

constexpr Tile FLOAT32_TILES[] = {
    tile_float32<1>, tile_float32<2>, tile_float32<3>, tile_float32<4>,  tile_float32<5>,  tile_float32<6>,
    tile_float32<7>, tile_float32<8>, tile_float32<9>, tile_float32<10>, tile_float32<11>, tile_float32<12>};
constexpr Tile BFLOAT16_TILES[] = {
    tile_bfloat16<1>, tile_bfloat16<2>, tile_bfloat16<3>, tile_bfloat16<4>,  tile_bfloat16<5>,  tile_bfloat16<6>,
    tile_bfloat16<7>, tile_bfloat16<8>, tile_bfloat16<9>, tile_bfloat16<10>, tile_bfloat16<11>, tile_bfloat16<12>};
constexpr Tile Q8_0_TILES[] = {tile_q8_0<1>, tile_q8_0<2>, tile_q8_0<3>, tile_q8_0<4>,
                               tile_q8_0<5>, tile_q8_0<6>, tile_q8_0<7>, tile_q8_0<8>};
constexpr Tile Q4_1_TILES[] = {tile_q4_1<1>, tile_q4_1<2>, tile_q4_1<3>, tile_q4_1<4>,
                               tile_q4_1<5>, tile_q4_1<6>, tile_q4_1<7>, tile_q4_1<8>};

Kernel kernel_of(int32_t format, int64_t k) {
    const int64_t bytes = slipstream_packed_bytes(format, 1, k), stride = row_stride(format, k);
    switch (format) {
        case FLOAT32: return {FLOAT32_TILES, 12, k, bytes, stride};
        case BFLOAT16: return {BFLOAT16_TILES, 12, (k + 1) / 2, bytes, stride};
        case Q8_0: return {Q8_0_TILES, 8, k / GROUP, bytes, stride};
        default: return {Q4_1_TILES, 8, k / GROUP, bytes, stride};
    }
}

// Item i of `parts` nearly equal shares of `total`: where it begins.
int64_t share(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

// Rows of x that stay in the L2 cache while the panels go by.
constexpr int64_t BLOCK_BYTES = 384 * 1024;

// A multiply-add costs well under a nanosecond; waking a thread costs some microseconds.
constexpr int64_t MIN_WORK_PER_THREAD = 64 * 1024;

// The calling thread's scratch for the prepared rows; kept, since fresh pages for every call would cost more.
uint8_t* scratch(size_t bytes) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local size_t capacity = 0;
    if (bytes > capacity) {
        memory.reset();
        capacity = (bytes + bytes / 2 + 63) / 64 * 64;
        memory.reset(std::aligned_alloc(64, capacity));
        if (!memory) std::abort();
    }
    return static_cast<uint8_t*>(memory.get());
}

// What a row of outputs needs on its way out.
struct Output {
    const float* bias;
    int64_t n;
    int32_t type;
};

void store_row(const Output& o, void* row, int64_t n0, float* sums) {
    const int64_t count = o.n - n0 < PANEL ? o.n - n0 : PANEL;
    if (o.bias != nullptr)
        for (int64_t i = 0; i < count; ++i) sums[i] += o.bias[n0 + i];
    const f32x16 low = load<f32x16>(sums), high = load<f32x16>(sums + 16);
    if (o.type == SCALAR_FLOAT32) {
        float* out = static_cast<float*>(row) + n0;
        if (count < PANEL) return void(std::memcpy(out, sums, static_cast<size_t>(4 * count)));
        store(out, low);
        store(out + 16, high);
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(row) + n0;
    // Whole panels go straight out. A copy of a length known only at run time is a call: a fifth of a product of 512 rows
    // and K = 128.
    uint16_t rounded[PANEL], *to = count < PANEL ? rounded : out;
    store(to, to_bfloat16(low));
    store(to + 16, to_bfloat16(high));
    if (count < PANEL) std::memcpy(out, rounded, static_cast<size_t>(2 * count));
}

// One panel of the weight w for the rows [begin, end), in tiles of nearly equal height; y(r) is where row r goes.
template <class RowOf>
void compute_panel(const Output& o, const Kernel& kernel, const uint8_t* w, const uint8_t* rows, int64_t panel,
                   int64_t begin, int64_t end, const RowOf& y) {
    alignas(64) float sums[MAX_TILE_ROWS * PANEL];
    w += panel * kernel.panel_bytes;
    const int64_t tiles = (end - begin + kernel.max_rows - 1) / kernel.max_rows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = begin + share(end - begin, tiles, t), last = begin + share(end - begin, tiles, t + 1);
        kernel.tiles[last - first - 1](w, rows + first * kernel.stride, kernel.stride, kernel.steps, sums);
        for (int64_t r = first; r < last; ++r) store_row(o, y(r), panel * PANEL, sums + (r - first) * PANEL);
    }
}

int64_t scalar_bytes(int32_t type) { return type == SCALAR_BFLOAT16 ? 2 : 4; }

// Rows [begin, end) of x(r) in the form in which the tiles read them.
template <class RowOf>
void prepare(int32_t format, int32_t x_type, int64_t k, const Kernel& kernel, uint8_t* rows, int64_t begin, int64_t end,
             const RowOf& x) {
    const auto one = x_type == SCALAR_BFLOAT16 ? prepare_row<true> : prepare_row<false>;
    for (int64_t r = begin; r < end; ++r) one(format, x(r), k, rows + r * kernel.stride);
}

// Shares (block of rows, panel) pairs out in runs, block by block: each thread reads one contiguous piece of the weight.
void compute(const LinearCall& c, const Kernel& kernel, const uint8_t* rows, int64_t thread, int64_t threads) {
    const Output o{c.bias, c.n, c.y_type};
    const auto y = [&](int64_t r) { return static_cast<uint8_t*>(c.y) + r * c.n * scalar_bytes(c.y_type); };
    const int64_t panels = (c.n + PANEL - 1) / PANEL;
    const int64_t most = BLOCK_BYTES / kernel.stride > kernel.max_rows ? BLOCK_BYTES / kernel.stride : kernel.max_rows;
    const int64_t blocks = (c.rows + most - 1) / most, items = blocks * panels;
    for (int64_t i = share(items, threads, thread); i < share(items, threads, thread + 1); ++i) {
        const int64_t block = i / panels, first = share(c.rows, blocks, block), last = share(c.rows, blocks, block + 1);
        compute_panel(o, kernel, static_cast<const uint8_t*>(c.packed), rows, i % panels, first, last, y);
    }
}

// Reading a panel takes as long as multiplying it with so many rows does, about.
constexpr int64_t READ_COST = 6;

// Each thread takes a run of panels, over all groups, of about equal cost.
void compute_groups(const GroupedCall& c, const Kernel& kernel, const uint8_t* rows, int64_t thread, int64_t threads) {
    const Output o{nullptr, c.n, c.y_type};
    const auto y = [&](int64_t r) { return c.y[r]; };
    const int64_t panels = (c.n + PANEL - 1) / PANEL;
    const auto cost_of = [&](int64_t g) {
        const int64_t count = c.offsets[g + 1] - c.offsets[g];
        return count == 0 ? 0 : READ_COST + count;
    };
    int64_t total = 0, before = 0;
    for (int64_t g = 0; g < c.groups; ++g) total += cost_of(g) * panels;
    const int64_t from = share(total, threads, thread), to = share(total, threads, thread + 1);
    for (int64_t g = 0; g < c.groups; ++g) {
        const int64_t cost = cost_of(g);
        const uint8_t* w = static_cast<const uint8_t*>(c.packed) + g * panels * kernel.panel_bytes;
        for (int64_t p = 0; cost > 0 && p < panels; ++p, before += cost)
            if (before >= from && before < to)
                compute_panel(o, kernel, w, rows, p, c.offsets[g], c.offsets[g + 1], y);
    }
}

// prepare(first row, last row), then, when all rows are prepared, compute(thread, threads).
template <class Prepare, class Compute>
void in_parallel(int64_t rows, int64_t n, int64_t k, int32_t most, const Prepare& prepare, const Compute& compute) {
#ifdef _OPENMP
    const int64_t useful = 1 + rows * n * k / MIN_WORK_PER_THREAD;
    const int threads = static_cast<int>(useful < most ? useful : most);
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
            prepare(share(rows, team, me), share(rows, team, me + 1));
#pragma omp barrier
            compute(me, team);
        }
        return;
    }
#endif
    prepare(int64_t(0), rows);
    compute(int64_t(0), int64_t(1));
}

}  // namespace
}  // namespace slipstream

using namespace slipstream;

void slipstream_linear(const LinearCall* call) {
    const LinearCall& c = *call;
    if (c.rows == 0 || c.n == 0) return;
    const Kernel kernel = kernel_of(c.format, c.k);
    uint8_t* rows = scratch(static_cast<size_t>(c.rows * kernel.stride));
    const auto x = [&](int64_t r) { return static_cast<const uint8_t*>(c.x) + r * c.k * scalar_bytes(c.x_type); };
    in_parallel(
        c.rows, c.n, c.k, c.threads,
        [&](int64_t begin, int64_t end) { prepare(c.format, c.x_type, c.k, kernel, rows, begin, end, x); },
        [&](int64_t me, int64_t team) { compute(c, kernel, rows, me, team); });
}

void slipstream_grouped(const GroupedCall* call) {
    const GroupedCall& c = *call;
    const int64_t count = c.offsets[c.groups];
    if (count == 0 || c.n == 0) return;
    const Kernel kernel = kernel_of(c.format, c.k);
    uint8_t* rows = scratch(static_cast<size_t>(count * kernel.stride));
    const auto x = [&](int64_t r) { return static_cast<const uint8_t*>(c.x[r]); };
    in_parallel(
        count, c.n, c.k, c.threads,
        [&](int64_t begin, int64_t end) { prepare(c.format, c.x_type, c.k, kernel, rows, begin, end, x); },
        [&](int64_t me, int64_t team) { compute_groups(c, kernel, rows, me, team); });
}
