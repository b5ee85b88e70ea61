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

Kernel kernel_of(const LinearCall& c) {
    const int64_t bytes = slipstream_packed_bytes(c.format, 1, c.k), stride = row_stride(c.format, c.k);
    switch (c.format) {
        case FLOAT32: return {FLOAT32_TILES, 12, c.k, bytes, stride};
        case BFLOAT16: return {BFLOAT16_TILES, 12, (c.k + 1) / 2, bytes, stride};
        case Q8_0: return {Q8_0_TILES, 8, c.k / GROUP, bytes, stride};
        default: return {Q4_1_TILES, 8, c.k / GROUP, bytes, stride};
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

void store_row(const LinearCall& c, int64_t row, int64_t n0, float* sums) {
    const int64_t count = c.n - n0 < PANEL ? c.n - n0 : PANEL;
    if (c.bias != nullptr)
        for (int64_t i = 0; i < count; ++i) sums[i] += c.bias[n0 + i];
    if (c.y_type == SCALAR_FLOAT32) {
        std::memcpy(static_cast<float*>(c.y) + row * c.n + n0, sums, static_cast<size_t>(4 * count));
        return;
    }
    uint16_t rounded[PANEL];
    store(rounded, to_bfloat16(load<f32x16>(sums)));
    store(rounded + 16, to_bfloat16(load<f32x16>(sums + 16)));
    std::memcpy(static_cast<uint16_t*>(c.y) + row * c.n + n0, rounded, static_cast<size_t>(2 * count));
}

// One panel for the rows [begin, end), in tiles of nearly equal height.
void compute_panel(const LinearCall& c, const Kernel& kernel, const uint8_t* rows, int64_t panel, int64_t begin,
                   int64_t end) {
    alignas(64) float sums[MAX_TILE_ROWS * PANEL];
    const uint8_t* w = static_cast<const uint8_t*>(c.packed) + panel * kernel.panel_bytes;
    const int64_t tiles = (end - begin + kernel.max_rows - 1) / kernel.max_rows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = begin + share(end - begin, tiles, t), last = begin + share(end - begin, tiles, t + 1);
        kernel.tiles[last - first - 1](w, rows + first * kernel.stride, kernel.stride, kernel.steps, sums);
        for (int64_t r = first; r < last; ++r) store_row(c, r, panel * PANEL, sums + (r - first) * PANEL);
    }
}

void prepare(const LinearCall& c, const Kernel& kernel, uint8_t* rows, int64_t begin, int64_t end) {
    const bool is_bfloat16 = c.x_type == SCALAR_BFLOAT16;
    for (int64_t r = begin; r < end; ++r) {
        const uint8_t* x = static_cast<const uint8_t*>(c.x) + r * c.k * (is_bfloat16 ? 2 : 4);
        (is_bfloat16 ? prepare_row<true> : prepare_row<false>)(c.format, x, c.k, rows + r * kernel.stride);
    }
}

// Shares (block of rows, panel) pairs out in runs, block by block: each thread reads one contiguous piece of the weight.
void compute(const LinearCall& c, const Kernel& kernel, const uint8_t* rows, int64_t thread, int64_t threads) {
    const int64_t panels = (c.n + PANEL - 1) / PANEL;
    const int64_t most = BLOCK_BYTES / kernel.stride > kernel.max_rows ? BLOCK_BYTES / kernel.stride : kernel.max_rows;
    const int64_t blocks = (c.rows + most - 1) / most, items = blocks * panels;
    for (int64_t i = share(items, threads, thread); i < share(items, threads, thread + 1); ++i) {
        const int64_t block = i / panels;
        compute_panel(c, kernel, rows, i % panels, share(c.rows, blocks, block), share(c.rows, blocks, block + 1));
    }
}

}  // namespace
}  // namespace slipstream

using namespace slipstream;

void slipstream_linear(const LinearCall* call) {
    const LinearCall& c = *call;
    if (c.rows == 0 || c.n == 0) return;
    const Kernel kernel = kernel_of(c);
    uint8_t* rows = scratch(static_cast<size_t>(c.rows * kernel.stride));
#ifdef _OPENMP
    const int64_t useful = 1 + c.rows * c.n * c.k / MIN_WORK_PER_THREAD;
    const int threads = static_cast<int>(useful < c.threads ? useful : c.threads);
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
            prepare(c, kernel, rows, share(c.rows, team, me), share(c.rows, team, me + 1));
#pragma omp barrier
            compute(c, kernel, rows, me, team);
        }
        return;
    }
#endif
    prepare(c, kernel, rows, 0, c.rows);
    compute(c, kernel, rows, 0, 1);
}
