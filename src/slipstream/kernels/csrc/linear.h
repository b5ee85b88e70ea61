// Products of a few rows with a packed weight: the contract is slipstream/kernels/linear.py.
//
// A packed weight is a run of panels of 32 outputs, each K-major, so that a thread reads one contiguous stream:
//
//   float32   [panel][K][32]
//   bfloat16  [panel][ceil(K / 2)][32][2]
//   q8_0      [panel][K / 32]{ uint8 q + 128 [2][8][16][4], float16 scale [32] }
//   q4_1      [panel][K / 32]{ uint8 two nibbles [2][4][16][4], float16 scale [32], float16 minimum [32] }
//
// In the quantised formats the group's 32 inputs are eight quads, two halves of 16 outputs; a q4_1 byte holds an input
// of quad 2p in its low nibble and the same input of quad 2p + 1 in its high one. Outputs beyond N are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slipstream {

constexpr int64_t PANEL = 32;
constexpr int64_t GROUP = 32;
constexpr int64_t QUANTISED_GROUP = GROUP + 8;  // bytes of 32 quantised inputs of x, see linear_rows.h

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, Q8_0 = 2, Q4_1 = 3 };
enum Scalar : int32_t { SCALAR_FLOAT32 = 0, SCALAR_BFLOAT16 = 1 };

struct PackCall {
    const void* weight;       // [N, K]: float32, bfloat16, int8 or uint8
    const uint16_t* scale;    // float16 [N, K / 32] or null
    const uint16_t* minimum;  // float16 [N, K / 32] or null
    void* packed;             // packed_bytes(format, n, k), aligned to 64
    int64_t n, k;
    int32_t format;
};

struct LinearCall {
    const void* x;       // [rows, K] of x_type
    const void* packed;  // aligned to 64
    const float* bias;   // [N] or null
    void* y;             // [rows, N] of y_type
    int64_t rows, n, k;
    int32_t format, x_type, y_type, threads;
};

// Several weights of one shape, packed one behind the other, each with rows of its own.
struct GroupedCall {
    const void* const* x;    // [rows] pointers to K values of x_type, group by group
    void* const* y;          // [rows] pointers to N values of y_type
    const int64_t* offsets;  // [groups + 1]: the rows of group g are offsets[g] .. offsets[g + 1] - 1
    const void* packed;      // aligned to 64
    int64_t groups, n, k;
    int32_t format, x_type, y_type, threads;
};

}  // namespace slipstream

extern "C" {
int64_t slipstream_packed_bytes(int32_t format, int64_t n, int64_t k);
void slipstream_pack(const slipstream::PackCall* call);
void slipstream_linear(const slipstream::LinearCall* call);
void slipstream_grouped(const slipstream::GroupedCall* call);
}
