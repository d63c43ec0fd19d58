// Operators that a device has to have itself: memory, views, copies, and those that the CPU does
// not have under the same name. All others are in fallback.cpp.
#include "ops.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

Tensor inside(const Tensor& tensor) {
  auto* address = static_cast<char*>(real(tensor.storage().data()));
  if (address) address += tensor.storage_offset() * tensor.element_size();
  auto view = at::from_blob(address, tensor.sizes(), tensor.strides(),
                            tensor.options().device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

Tensor as_meta(const Tensor& tensor) {
  if (!on_sim(tensor) && tensor.dim() == 0) return tensor;  // its value may decide about shapes
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

Tensor empty_like_meta(const Tensor& meta, int device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_at(device)));
}

namespace {

// -- memory and views -----------------------------------------------------------------------------

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(const std::optional<at::Device>& device) {
  return device && device->has_index() ? *device : device_at(current_device());
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(at::kPrivateUse1), kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, c10::GetAllocator(at::kPrivateUse1), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

void grow(const Tensor& self) {
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && needed > self.storage().nbytes()) resize_bytes(self.storage(), needed);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  grow(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

void record_stream(Tensor& self, at::Stream stream) {
  record_use(self.storage().data(), queue_of(stream));
}

// -- copies ---------------------------------------------------------------------------------------

Mark put_copy(Queue& stream, const Tensor& read, const Tensor& write) {
  return stream.put("copy_", [read, write] {
    const KernelScope scope;
    write.copy_(read.expand(write.sizes()));
  });
}

void copy_between_devices(const Tensor& source, const Tensor& to) {
  Queue& stream = current_queue(to.device().index());
  Queue& from = current_queue(source.device().index());
  stream.wait_for(from.now());
  from.wait_for(put_copy(stream, inside(source), inside(to)));
}

void copy_from_host(const Tensor& source, const Tensor& to, bool non_blocking) {
  const bool pinned = source.is_pinned();
  count_bytes(true, pinned, source.nbytes());
  // Pageable memory is staged before the call returns.
  const Tensor read = non_blocking && !pinned ? source.clone() : source.detach();
  const Mark done = put_copy(current_queue(to.device().index()), read, inside(to));
  if (non_blocking) return;
  done.wait_on_host("copy from host");
  raise_pending_error();
}

void copy_to_host(const Tensor& source, const Tensor& to, bool non_blocking) {
  const bool pinned = to.is_pinned();
  count_bytes(false, pinned, to.nbytes());
  const Mark done =
      put_copy(current_queue(source.device().index()), inside(source), to.detach());
  if (non_blocking && pinned) return;
  done.wait_on_host("copy to host");
  raise_pending_error();
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (!on_sim(source))
    copy_from_host(source, to, non_blocking);
  else if (!on_sim(to))
    copy_to_host(source, to, non_blocking);
  else
    copy_between_devices(source, to);  // or within one, where its stream need not wait
  return to;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  at::Scalar value;
  const auto view = inside(self);
  const Mark done = current_queue(self.device().index()).put("item", [&] {
    const KernelScope scope;
    value = view.item();
  });
  count_bytes(false, false, self.element_size());
  done.wait_on_host("item");
  raise_pending_error();
  return value;
}

// -- operators that the CPU has under another name, or not at all ---------------------------------

MaybeTensor if_defined(const MaybeTensor& tensor, Tensor (*change)(const Tensor&)) {
  return tensor && tensor->defined() ? MaybeTensor(change(*tensor)) : std::nullopt;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const Tensor meta =
      at::convolution(as_meta(input), as_meta(weight), if_defined(bias, as_meta), stride, padding,
                      dilation, transposed, output_padding, groups);
  const Tensor result = empty_like_meta(meta, input.device().index());
  current_queue(input.device().index())
      .put("convolution", [x = inside(input), w = inside(weight), b = if_defined(bias, inside),
                           y = inside(result), stride = stride.vec(), padding = padding.vec(),
                           dilation = dilation.vec(), output_padding = output_padding.vec(),
                           transposed, groups] {
        const KernelScope scope;
        y.copy_(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding,
                                groups));
      });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  std::array<Tensor, 3> results, targets;
  if (mask[0]) results[0] = at::empty_like(input);
  if (mask[1]) results[1] = at::empty_like(weight);
  if (mask[2]) results[2] = at::empty(bias_sizes, weight.options());
  for (size_t i = 0; i < 3; ++i)
    if (mask[i]) targets[i] = inside(results[i]);
  current_queue(input.device().index())
      .put("convolution_backward",
           [g = inside(grad), x = inside(input), w = inside(weight), bias_sizes, targets,
            stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
            output_padding = output_padding.vec(), transposed, groups, mask] {
             const KernelScope scope;
             const auto [gx, gw, gb] = at::convolution_backward(
                 g, x, w, at::OptionalIntArrayRef(bias_sizes), stride, padding, dilation,
                 transposed, output_padding, groups, mask);
             if (mask[0]) targets[0].copy_(gx);
             if (mask[1]) targets[1].copy_(gw);
             if (mask[2]) targets[2].copy_(gb);
           });
  return {results[0], results[1], results[2]};
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, mask_options)};
  Tensor mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// Torch uses these cells on every device but the CPU; as plain formulas they have derivatives too.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const Tensor cy = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * cy.tanh(), cy, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  const auto input = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hidden = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor reset = (input[0] + hidden[0]).sigmoid();
  const Tensor update = (input[1] + hidden[1]).sigmoid();
  const Tensor candidate = (input[2] + reset * hidden[2]).tanh();
  return {(hx - candidate) * update + candidate, candidate};
}

int64_t attention_by_math(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double,
                          bool, std::optional<double>, bool) {
  return 0;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", attention_by_math);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

// copy_from reads conjugate and negative views itself; resolving one would copy it, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_DTYPE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

}  // namespace sim
