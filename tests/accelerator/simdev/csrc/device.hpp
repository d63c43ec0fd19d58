#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include "runtime.hpp"

namespace sim {
Queue& queue_of(const c10::Stream& stream);
c10::Stream as_stream(const Queue& queue);
const at::Generator& default_generator(int device);
uint64_t next_kernel_seed(const at::Generator& generator);
void resize_bytes(const c10::Storage& storage, size_t bytes);
}  // namespace sim
