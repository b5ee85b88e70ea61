// Memory for packed weights: one after the other in huge pages.
#pragma once

#include <cstddef>
#include <memory>

namespace slipstream {

// `bytes` aligned to 64, neither zeroed nor shared; freed with the last pointer to its chunk. Throws std::bad_alloc.
std::shared_ptr<void> weight_memory(size_t bytes);

}  // namespace slipstream
