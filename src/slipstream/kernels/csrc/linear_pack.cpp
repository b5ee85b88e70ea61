// Weights [N, K] into panels of 32 outputs; the layouts are in linear.h.
#include <cstring>

#include "linear.h"

namespace slipstream {
namespace {

int64_t panel_bytes(int32_t format, int64_t k) {
    switch (format) {
        case FLOAT32: return k * PANEL * 4;
        case BFLOAT16: return (k + 1) / 2 * PANEL * 4;
        case Q8_0: return k / GROUP * (GROUP * PANEL + 2 * PANEL);
        default: return k / GROUP * (GROUP * PANEL / 2 + 4 * PANEL);
    }
}

void pack_float32(const PackCall& c, int64_t n0, int64_t count, float* panel) {
    for (int64_t i = 0; i < count; ++i) {
        const float* row = static_cast<const float*>(c.weight) + (n0 + i) * c.k;
        for (int64_t k = 0; k < c.k; ++k) panel[k * PANEL + i] = row[k];
    }
}

void pack_bfloat16(const PackCall& c, int64_t n0, int64_t count, uint16_t* panel) {
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t* row = static_cast<const uint16_t*>(c.weight) + (n0 + i) * c.k;
        for (int64_t k = 0; k < c.k; ++k) panel[(k / 2) * PANEL * 2 + i * 2 + k % 2] = row[k];
    }
}

void pack_q8_0(const PackCall& c, int64_t n0, int64_t count, uint8_t* panel) {
    const int64_t groups = c.k / GROUP, stride = panel_bytes(Q8_0, GROUP);
    for (int64_t g = 0; g < groups; ++g) {
        uint8_t* block = panel + g * stride;
        std::memset(block, 128, GROUP * PANEL);
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* q = static_cast<const uint8_t*>(c.weight) + (n0 + i) * c.k + g * GROUP;
            uint8_t* half = block + (i / 16) * 512 + (i % 16) * 4;
            for (int64_t j = 0; j < GROUP; ++j) half[(j / 4) * 64 + j % 4] = q[j] ^ 0x80;
            std::memcpy(block + GROUP * PANEL + 2 * i, c.scale + (n0 + i) * groups + g, 2);
        }
    }
}

void pack_q4_1(const PackCall& c, int64_t n0, int64_t count, uint8_t* panel) {
    const int64_t groups = c.k / GROUP, stride = panel_bytes(Q4_1, GROUP);
    for (int64_t g = 0; g < groups; ++g) {
        uint8_t* block = panel + g * stride;
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* q = static_cast<const uint8_t*>(c.weight) + (n0 + i) * c.k + g * GROUP;
            uint8_t* half = block + (i / 16) * 256 + (i % 16) * 4;
            for (int64_t j = 0; j < GROUP; ++j)
                half[(j / 8) * 64 + j % 4] |= static_cast<uint8_t>((q[j] & 15) << (j / 4 % 2 * 4));
            uint8_t* factors = block + GROUP * PANEL / 2;
            std::memcpy(factors + 2 * i, c.scale + (n0 + i) * groups + g, 2);
            std::memcpy(factors + 2 * PANEL + 2 * i, c.minimum + (n0 + i) * groups + g, 2);
        }
    }
}

}  // namespace
}  // namespace slipstream

using namespace slipstream;

int64_t slipstream_packed_bytes(int32_t format, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * panel_bytes(format, k);
}

void slipstream_pack(const PackCall* call) {
    const PackCall& c = *call;
    const int64_t panels = (c.n + PANEL - 1) / PANEL, bytes = panel_bytes(c.format, c.k);
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* panel = static_cast<uint8_t*>(c.packed) + p * bytes;
        std::memset(panel, 0, static_cast<size_t>(bytes));
        const int64_t n0 = p * PANEL, count = c.n - n0 < PANEL ? c.n - n0 : PANEL;
        switch (c.format) {
            case FLOAT32: pack_float32(c, n0, count, reinterpret_cast<float*>(panel)); break;
            case BFLOAT16: pack_bfloat16(c, n0, count, reinterpret_cast<uint16_t*>(panel)); break;
            case Q8_0: pack_q8_0(c, n0, count, panel); break;
            default: pack_q4_1(c, n0, count, panel);
        }
    }
}
