#pragma once
#include <ATen/core/Tensor.h>
#include <map>
#include <string>
#include "device.hpp"

namespace sim {
// The tensor as kernels see it: a CPU tensor over the device's real memory. Only to be read or written by a task of a stream.
at::Tensor inside(const at::Tensor& tensor);
std::map<std::string, int64_t> synchronous_ops();  // operators that made the host wait, and how often
}  // namespace sim
