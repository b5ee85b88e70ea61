// Collectives between processes of one machine, through memory that all have mapped: each rank writes its own segment
// and reads the others'. Every operation has a number; a rank posts "operation n, my data lie in my slot n mod 2" and
// waits until all have posted n. A rank that posts n + 1 has done with all data of n, and nobody posts n + 2 before all
// have posted n + 1: so the two slots are never written while somebody still reads them, and no second barrier is needed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "vec.h"

namespace slipstream {

// A rank has died, left, failed, disagrees or does not answer; what() is one line that says which one and where.
struct RankFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Collective : uint32_t { all_reduce, all_reduce_add_rms_norm, all_gather, broadcast, barrier };

// What all ranks must agree on, compared with every post. `type` is torch's number of the element type.
struct Operation {
    Collective kind;
    uint32_t type;
    int64_t bytes, width;
    bool operator==(const Operation&) const = default;
};

// Two cache lines, since processors fetch them in pairs: the number and what comes with it arrive together.
struct alignas(128) Post {
    std::atomic<uint64_t> number;
    Operation operation;
};

enum class State : uint32_t { running, left, failed };

// The head of a rank's segment; two slots follow it.
struct SegmentHead {
    Post posts[2];
    alignas(128) std::atomic<State> state;
    char reason[512];  // why it failed
};

struct ShmSettings {
    int64_t slot_bytes;      // a multiple of 128
    int64_t two_shot_bytes;  // messages from this size on are summed in parts, a part a rank
    int64_t spin_us;         // then the core is offered to others, then the rank sleeps between looks
    int64_t patience_ms;     // for a rank that lives but does not come to a reduction
    const char* (*type_name)(uint32_t);
    std::function<void()> on_idle;  // called while sleeping; may throw
};

class ShmGroup {
  public:
    // segments: a descriptor a rank, the own one writable. locks: the file whose flock a rank holds while it lives, -1
    // for the own one. Both may be closed by the caller when this object does not need them: segments after this, locks
    // after its end.
    ShmGroup(int rank, const std::vector<int>& segments, std::vector<int> locks, ShmSettings settings);
    ~ShmGroup();
    ShmGroup(const ShmGroup&) = delete;
    ShmGroup& operator=(const ShmGroup&) = delete;

    static int64_t segment_bytes(int64_t slot_bytes) { return int64_t(sizeof(SegmentHead)) + 2 * slot_bytes; }

    // x [count], summed in place in float32 in rank order, rounded once.
    template <class T>
    void all_reduce(T* x, int64_t count, uint32_t type);
    // x, residual, y [rows, width]: add_rms_norm (ops.h) of the sum, which is not kept. False, and nothing done, where
    // a row does not fit into a slot or the message is one for two shots.
    template <class T, class W>
    bool all_reduce_add_rms_norm(const T* x, T* residual, const W* weight, T* y, int64_t rows, int64_t width, float eps,
                                 uint32_t type);
    // x [rows, row_bytes] -> y [rows, size, row_bytes].
    void all_gather(const char* x, char* y, int64_t rows, int64_t row_bytes, uint32_t type);
    void broadcast(char* x, int64_t bytes, uint32_t type);
    void barrier();
    // Tells the others that no more operations will come.
    void leave();
    void set_two_shot_bytes(int64_t bytes) { settings_.two_shot_bytes = bytes; }

  private:
    int size() const { return int(segments_.size()); }
    SegmentHead& head(int rank) const { return *reinterpret_cast<SegmentHead*>(segments_[rank]); }
    char* slot(int rank) const {
        return segments_[rank] + sizeof(SegmentHead) + (number_ & 1) * settings_.slot_bytes;
    }
    void begin(const Operation& operation);
    void post(const Operation& operation);
    void wait_for_all(const Operation& operation);
    void wait_slowly(const Post& post, const Operation& operation);
    void check_others(const Operation& operation, bool is_late);
    template <class T>
    void sum_slots(const T* own, T* out, int64_t first, int64_t count) const;
    template <class T>
    void two_shots(T* x, int64_t count, const Operation& operation);
    std::string told(const Operation& operation) const;
    [[noreturn]] void fail(const std::string& line);

    int rank_;
    std::vector<char*> segments_;
    std::vector<int> locks_;
    ShmSettings settings_;
    uint64_t number_ = 0;  // of the operation (for long messages: of its part) that runs or ran last
};

}  // namespace slipstream
