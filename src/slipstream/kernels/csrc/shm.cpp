// The waiting, the checks and the copies of shm.h.
#include "shm.h"

#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>

#include "ops.h"

namespace slipstream {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto OFFERING = milliseconds(2);       // of the core to others, after spinning
constexpr auto CHECK_EVERY = milliseconds(10);   // that the others live
constexpr auto LONG_IDLE = milliseconds(200);    // after which looks are a millisecond apart, not 50 us
constexpr int LOOKS_A_CLOCK = 32;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<State>::is_always_lock_free);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

const char* name(Collective kind) {
    switch (kind) {
        case Collective::all_reduce: return "all_reduce";
        case Collective::all_reduce_add_rms_norm: return "all_reduce_add_rms_norm";
        case Collective::all_gather: return "all_gather";
        case Collective::broadcast: return "broadcast";
        default: return "barrier";
    }
}

// In these, ranks wait for work: only the end of another rank ends the wait.
bool may_idle(Collective kind) { return kind == Collective::broadcast || kind == Collective::barrier; }

bool is_free(int lock) {
    if (flock(lock, LOCK_SH | LOCK_NB) != 0) return false;
    flock(lock, LOCK_UN);
    return true;
}

}  // namespace

ShmGroup::ShmGroup(int rank, const std::vector<int>& segments, std::vector<int> locks, ShmSettings settings)
    : rank_(rank), locks_(std::move(locks)), settings_(std::move(settings)) {
    const size_t bytes = size_t(segment_bytes(settings_.slot_bytes));
    for (size_t r = 0; r < segments.size(); ++r) {
        const int access = int(r) == rank ? PROT_READ | PROT_WRITE : PROT_READ;
        struct stat file {};
        void* at = MAP_FAILED;
        if (fstat(segments[r], &file) == 0 && size_t(file.st_size) >= bytes)
            at = mmap(nullptr, bytes, access, MAP_SHARED, segments[r], 0);
        if (at == MAP_FAILED) {
            for (char* mapped : segments_) munmap(mapped, bytes);
            throw RankFailure("the shared memory of rank " + std::to_string(r) + " cannot be mapped");
        }
        segments_.push_back(static_cast<char*>(at));
    }
}

ShmGroup::~ShmGroup() {
    for (char* at : segments_) munmap(at, size_t(segment_bytes(settings_.slot_bytes)));
}

void ShmGroup::leave() {
    State running = State::running;
    head(rank_).state.compare_exchange_strong(running, State::left, std::memory_order_release);
}

void ShmGroup::fail(const std::string& line) {
    SegmentHead& own = head(rank_);
    if (own.state.load(std::memory_order_relaxed) == State::running) {
        std::strncpy(own.reason, line.c_str(), sizeof(own.reason) - 1);
        own.state.store(State::failed, std::memory_order_release);
    }
    throw RankFailure(line);
}

std::string ShmGroup::told(const Operation& operation) const {
    std::string line = name(operation.kind);
    if (operation.kind == Collective::barrier) return line;
    return line + " of " + std::to_string(operation.bytes) + " bytes of " + settings_.type_name(operation.type) +
           (operation.width ? " in rows of " + std::to_string(operation.width) : "");
}

void ShmGroup::begin(const Operation& operation) {
    if (head(rank_).state.load(std::memory_order_relaxed) == State::failed) throw RankFailure(head(rank_).reason);
    if (head(rank_).state.load(std::memory_order_relaxed) == State::left)
        throw RankFailure("rank " + std::to_string(rank_) + " has closed its shm backend, before " + told(operation));
}

void ShmGroup::post(const Operation& operation) {
    Post& own = head(rank_).posts[number_ & 1];
    own.operation = operation;
    own.number.store(number_, std::memory_order_release);
}

void ShmGroup::wait_for_all(const Operation& operation) {
    for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        const Post& other = head(r).posts[number_ & 1];
        if (other.number.load(std::memory_order_acquire) != number_) wait_slowly(other, operation);
        if (!(other.operation == operation))
            fail("the ranks disagree: rank " + std::to_string(rank_) + " runs shm " + told(operation) + ", rank " +
                 std::to_string(r) + " " + told(other.operation) + " (operation " + std::to_string(number_) + ")");
    }
}

void ShmGroup::wait_slowly(const Post& post, const Operation& operation) {
    const auto start = Clock::now();
    const auto has_come = [&] { return post.number.load(std::memory_order_acquire) == number_; };
    const auto spin = microseconds(settings_.spin_us);
    for (;;) {
        for (int look = 0; look < LOOKS_A_CLOCK; ++look) {
            if (has_come()) return;
            relax();
        }
        if (Clock::now() - start >= spin) break;
    }
    while (Clock::now() - start < spin + OFFERING) {
        sched_yield();
        if (has_come()) return;
    }
    auto next_check = Clock::now();
    for (;;) {
        const auto now = Clock::now();
        if (now >= next_check) {
            const bool is_late = !may_idle(operation.kind) && now - start > milliseconds(settings_.patience_ms);
            check_others(operation, is_late);
            next_check = now + CHECK_EVERY;
        }
        const timespec nap{0, now - start < LONG_IDLE ? 50'000 : 1'000'000};
        nanosleep(&nap, nullptr);
        if (has_come()) return;
    }
}

void ShmGroup::check_others(const Operation& operation, bool is_late) {
    const std::string where = "rank " + std::to_string(rank_) + " waited for it in shm " + told(operation) +
                              " (operation " + std::to_string(number_) + ")";
    for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        const State state = head(r).state.load(std::memory_order_acquire);
        if (state == State::failed) fail(std::string(head(r).reason, strnlen(head(r).reason, sizeof(head(r).reason))));
        if (head(r).posts[number_ & 1].number.load(std::memory_order_acquire) == number_) continue;
        const std::string who = "rank " + std::to_string(r);
        if (state == State::left) fail(who + " has left; " + where);
        if (is_free(locks_[r])) fail(who + " has died; " + where);
        if (is_late)
            fail(who + " did not come within " + std::to_string(settings_.patience_ms / 1000) + " s; " + where);
    }
    settings_.on_idle();
}

template <class T>
void ShmGroup::sum_slots(const T* own, T* out, int64_t first, int64_t count) const {
    const T* parts[64];
    const int ranks = size();
    for (int r = 0; r < ranks; ++r) parts[r] = (r == rank_ ? own : reinterpret_cast<const T*>(slot(r))) + first;
    const auto sum_at = [&](int64_t i) {
        Vec sum = load(parts[0] + i);
        for (int r = 1; r < ranks; ++r) sum = sum + load(parts[r] + i);
        return sum;
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, sum_at(i));
    if (const int rest = int(count - i)) {
        Vec sum = load(parts[0] + i, rest);
        for (int r = 1; r < ranks; ++r) sum = sum + load(parts[r] + i, rest);
        store(out + i, sum, rest);
    }
}

template <class T>
void ShmGroup::all_reduce(T* x, int64_t count, uint32_t type) {
    const int64_t bytes = count * int64_t(sizeof(T));
    const Operation operation{Collective::all_reduce, type, bytes, 0};
    begin(operation);
    const bool in_two = size() > 1 && bytes >= settings_.two_shot_bytes;
    const int64_t chunk = settings_.slot_bytes / int64_t(sizeof(T));
    int64_t done = 0;
    do {
        const int64_t now = std::min(chunk, count - done);
        if (in_two) {
            two_shots(x + done, now, operation);
        } else {
            ++number_;
            std::memcpy(slot(rank_), x + done, size_t(now) * sizeof(T));
            post(operation);
            wait_for_all(operation);
            sum_slots(x + done, x + done, 0, now);
        }
        done += now;
    } while (done < count);
}

// Each rank sums one part, and all read the parts from each other.
template <class T>
void ShmGroup::two_shots(T* x, int64_t count, const Operation& operation) {
    constexpr int64_t LINE = 128 / int64_t(sizeof(T));
    const int64_t part = (count + size() * LINE - 1) / (size() * LINE) * LINE;
    const auto first = [&](int r) { return std::min(count, r * part); };
    ++number_;
    std::memcpy(slot(rank_), x, size_t(count) * sizeof(T));
    post(operation);
    wait_for_all(operation);
    const int64_t own_first = first(rank_), own_count = first(rank_ + 1) - own_first;
    sum_slots(x, x + own_first, own_first, own_count);
    ++number_;
    std::memcpy(slot(rank_), x + own_first, size_t(own_count) * sizeof(T));
    post(operation);
    wait_for_all(operation);
    for (int r = 0; r < size(); ++r)
        if (r != rank_) std::memcpy(x + first(r), slot(r), size_t(first(r + 1) - first(r)) * sizeof(T));
}

template <class T, class W>
bool ShmGroup::all_reduce_add_rms_norm(const T* x, T* residual, const W* weight, T* y, int64_t rows, int64_t width,
                                       float eps, uint32_t type) {
    const int64_t row_bytes = width * int64_t(sizeof(T)), chunk = settings_.slot_bytes / row_bytes;
    if (chunk == 0 || (size() > 1 && rows * row_bytes >= settings_.two_shot_bytes)) return false;
    const Operation operation{Collective::all_reduce_add_rms_norm, type, rows * row_bytes, width};
    begin(operation);
    thread_local std::vector<T> sum;
    sum.resize(size_t(width));
    int64_t done = 0;
    do {
        const int64_t now = std::min(chunk, rows - done);
        ++number_;
        std::memcpy(slot(rank_), x + done * width, size_t(now * row_bytes));
        post(operation);
        wait_for_all(operation);
        for (int64_t r = 0; r < now; ++r) {
            const int64_t at = (done + r) * width;
            sum_slots(x + done * width, sum.data(), r * width, width);
            add_rms_norm(sum.data(), residual + at, weight, y + at, 1, width, eps);
        }
        done += now;
    } while (done < rows);
    return true;
}

void ShmGroup::all_gather(const char* x, char* y, int64_t rows, int64_t row_bytes, uint32_t type) {
    const int64_t bytes = rows * row_bytes;
    const Operation operation{Collective::all_gather, type, bytes, row_bytes};
    begin(operation);
    // Bytes first to first + count of x, into their places among the others' rows.
    const auto place = [&](const char* from, int rank, int64_t first, int64_t count) {
        while (count > 0) {
            const int64_t row = first / row_bytes, within = first % row_bytes;
            const int64_t now = std::min(count, row_bytes - within);
            std::memcpy(y + (row * size() + rank) * row_bytes + within, from, size_t(now));
            from += now;
            first += now;
            count -= now;
        }
    };
    int64_t done = 0;
    do {
        const int64_t now = std::min(settings_.slot_bytes, bytes - done);
        ++number_;
        std::memcpy(slot(rank_), x + done, size_t(now));
        post(operation);
        place(x + done, rank_, done, now);
        wait_for_all(operation);
        for (int r = 0; r < size(); ++r)
            if (r != rank_) place(slot(r), r, done, now);
        done += now;
    } while (done < bytes);
}

void ShmGroup::broadcast(char* x, int64_t bytes, uint32_t type) {
    const Operation operation{Collective::broadcast, type, bytes, 0};
    begin(operation);
    int64_t done = 0;
    do {
        const int64_t now = std::min(settings_.slot_bytes, bytes - done);
        ++number_;
        if (rank_ == 0) std::memcpy(slot(0), x + done, size_t(now));
        post(operation);
        wait_for_all(operation);
        if (rank_ != 0) std::memcpy(x + done, slot(0), size_t(now));
        done += now;
    } while (done < bytes);
}

void ShmGroup::barrier() {
    const Operation operation{Collective::barrier, 0, 0, 0};
    begin(operation);
    ++number_;
    post(operation);
    wait_for_all(operation);
}

template void ShmGroup::all_reduce(float*, int64_t, uint32_t);
template void ShmGroup::all_reduce(bf16*, int64_t, uint32_t);
#define FUSED(T, W)                                                                                               \
    template bool ShmGroup::all_reduce_add_rms_norm(const T*, T*, const W*, T*, int64_t, int64_t, float, uint32_t);
FUSED(float, float)
FUSED(float, bf16)
FUSED(bf16, float)
FUSED(bf16, bf16)

}  // namespace slipstream
