// The device as torch knows it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "memory.hpp"

namespace sim {

c10::Device device_at(int index);
Queue& queue_of(const c10::Stream& stream);
c10::Stream stream_of(const Queue& queue);

const at::Generator& default_generator(int device);
uint64_t next_kernel_seed(const at::Generator& generator);

void resize_bytes(const c10::Storage& storage, size_t bytes);

}  // namespace sim
