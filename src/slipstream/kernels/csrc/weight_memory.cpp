// A pass reads every weight once, front to back; in pages of 4 KB the page walks cost a third of the memory's bandwidth
// (measured with one thread on Zen 4: 24 GB/s, against 34 in pages of 2 MB). Most weights of a small model are smaller
// than such a page, so they are put one behind the other in larger chunks.
#include "weight_memory.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace slipstream {
namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t CHUNK = 16 * HUGE_PAGE;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Only pages that are written to become memory: what a chunk leaves unused costs addresses alone. Straight from the
// system: weights between the temporaries of loading would keep malloc from giving those back (half a gigabyte at 1 GB).
std::shared_ptr<uint8_t> make_chunk(size_t bytes) {
#ifdef __linux__
    const size_t room = bytes + HUGE_PAGE;
    void* whole = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) throw std::bad_alloc();
    uint8_t* p = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(whole), HUGE_PAGE));
    madvise(p, bytes, MADV_HUGEPAGE);  // where it is refused, small pages serve
    return {p, [whole, room](uint8_t*) { munmap(whole, room); }};
#else
    void* p = std::aligned_alloc(HUGE_PAGE, bytes);
    if (p == nullptr) throw std::bad_alloc();
    return {static_cast<uint8_t*>(p), std::free};
#endif
}

}  // namespace

std::shared_ptr<void> weight_memory(size_t bytes) {
    static std::mutex mutex;
    static std::shared_ptr<uint8_t> chunk;
    static size_t used = CHUNK;
    bytes = round_up(bytes, 64);
    if (bytes > CHUNK / 4) return make_chunk(round_up(bytes, HUGE_PAGE));
    const std::lock_guard<std::mutex> lock(mutex);
    if (used + bytes > CHUNK) {
        chunk = make_chunk(CHUNK);
        used = 0;
    }
    uint8_t* p = chunk.get() + used;
    used += bytes;
    return {chunk, p};
}

}  // namespace slipstream
