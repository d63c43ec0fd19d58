#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "device.hpp"

namespace sim {

// The tensor as kernels see it: a CPU tensor over the device's real memory. Only tasks of a stream
// may read or write it.
at::Tensor inside(const at::Tensor& tensor);

bool on_sim(const at::Tensor& tensor);
at::Tensor as_meta(const at::Tensor& tensor);
at::Tensor empty_like_meta(const at::Tensor& meta, int device);

// Kernels run on a worker, without autograd, modes or autocast of the caller.
struct KernelScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
};

}  // namespace sim
