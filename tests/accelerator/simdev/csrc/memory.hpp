// Memory of the devices, with a caching allocator.
//
// Addresses that are handed out are reserved and unreadable (PROT_NONE): host code that uses one
// ends with a segmentation fault. Kernels use a second mapping; `real` translates.
#pragma once

#include "runtime.hpp"

namespace sim {

struct Block;
Block* allocate(int device, size_t bytes);
void* address_of(const Block* block);
void release(Block* block);
void record_use(const void* address, Queue& other);  // what Tensor.record_stream says

void* real(const void* device_address);
int device_of_address(const void* address);  // -1 for memory of the host

struct Usage {
  int64_t allocated, peak_allocated;  // bytes of blocks in use
  int64_t reserved, peak_reserved;    // with those that the cache keeps
  int64_t total;                      // SIM_MEMORY_MB, 16 GB by default
};
Usage usage(int device);
void reset_peak(int device);
void empty_cache();

}  // namespace sim
