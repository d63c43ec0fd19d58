// Operators. A few are written here (memory, views, copies); all others take the boxed fallback: the shapes of the results
// come from the operator's meta kernel at once, the values from its CPU kernel later, on the stream.
#include "ops.hpp"
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using torch::jit::Stack;

std::mutex g_sync_mutex;
std::map<std::string, int64_t> g_sync_ops;

bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Applies a function to every tensor of an argument, whatever it is packed in.
c10::IValue map_tensors(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorList().vec())
      changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return changed;
  }
  return value;
}

Tensor to_meta(const Tensor& tensor) {
  if (!on_sim(tensor) && tensor.dim() == 0) return tensor;  // a number: its value may decide about shapes
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Kernels run on a worker without autograd, modes or autocast of the caller.
struct KernelScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
};

bool takes_host_indices(const std::string& name) {  // operators of CUDA that accept index tensors of the host
  return name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_" || name == "aten::index_put";
}

int device_of_call(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  int device = -1;
  std::optional<Tensor> foreign;
  for (const auto& argument : arguments)
    map_tensors(argument, [&](const Tensor& tensor) {
      if (on_sim(tensor)) {
        TORCH_CHECK(device < 0 || device == tensor.device().index() || tensor.dim() == 0,
                    "Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and ",
                    tensor.device(), "! (", schema.name(), ")");
        if (device < 0) device = tensor.device().index();
      } else if (tensor.dim() > 0) {
        foreign = tensor;
      }
      return tensor;
    });
  TORCH_CHECK(!foreign || device < 0 || takes_host_indices(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and ",
              foreign->device(), "! (", schema.name(), ")");
  for (const auto& argument : arguments)
    if (device < 0 && argument.isDevice() && argument.toDevice().is_privateuseone()) device = argument.toDevice().index();
  return device < 0 ? current_device() : device;
}

// The arguments as the CPU kernel gets them, fixed now: addresses, numbers of the host, the seed of a random operator.
Stack host_arguments(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, int device) {
  Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    bool is_generator = schema.arguments()[i].type()->str().find("Generator") != std::string::npos;
    if (argument.isDevice())
      stack.emplace_back(c10::Device(at::kCPU));
    else if (is_generator)
      stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>(
          next_kernel_seed(argument.isNone() ? default_generator(device) : argument.toGenerator())));
    else
      stack.push_back(map_tensors(argument, [](const Tensor& tensor) {
        if (on_sim(tensor)) return inside(tensor);
        return tensor.dim() == 0 && !tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor.clone() : tensor;
      }));
  }
  return stack;
}

// The argument a return value is, for operators that write into their arguments; -1 for a new value.
int argument_of_return(const c10::FunctionSchema& schema, size_t which) {
  const auto* alias = schema.returns()[which].alias_info();
  if (!alias) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
  }
  TORCH_CHECK(false, "sim: cannot tell what ", schema.name(), " returns");
}

Tensor like_on_device(const Tensor& meta, int device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(c10::Device(at::kPrivateUse1, device)));
}

void take_shape(const Tensor& tensor, const Tensor& meta) {
  if (!on_sim(tensor) || tensor.sizes() == meta.sizes()) return;
  tensor.resize_(meta.sizes());
  if (meta.numel()) tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
}

// Runs the operator's meta kernel; nothing if there is none or if shapes depend on values.
std::optional<Stack> infer(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : op.schema().returns()) {
    auto type = value.type()->str();
    if (type != "Tensor" && type != "Tensor[]") return std::nullopt;
  }
  Stack stack;
  for (const auto& argument : arguments) {
    if (argument.isDevice())
      stack.emplace_back(c10::Device(at::kMeta));
    else if (argument.isGenerator())
      stack.emplace_back();
    else
      stack.push_back(map_tensors(argument, to_meta));
  }
  Stack given = stack;
  try {
    KernelScope scope;
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (size_t i = 0; i < given.size(); ++i) {  // out= arguments may have to grow
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor()) take_shape(arguments[i].toTensor(), given[i].toTensor());
  }
  return stack;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), "sim: no kernel for the view ", schema.name());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "sim: the CPU has no ", schema.name());
  const int device = device_of_call(schema, arguments);
  c10::DeviceGuard guard(c10::Device(at::kPrivateUse1, device));
  auto shapes = infer(op, arguments);
  auto inputs = host_arguments(schema, arguments, device);
  Queue& stream = current(device);
  auto name = schema.operator_name().overload_name.empty() ? schema.name() : schema.name() + "." + schema.overload_name();

  std::vector<c10::IValue> results;
  if (shapes) {
    std::vector<std::vector<Tensor>> fresh(schema.returns().size());  // what the kernel's results are copied into
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (int from = argument_of_return(schema, i); from >= 0) {
        results.push_back(arguments[from]);
        continue;
      }
      results.push_back(map_tensors((*shapes)[i], [&](const Tensor& meta) {
        auto made = like_on_device(meta, device);
        fresh[i].push_back(inside(made));
        return made;
      }));
    }
    stream.put(name, [op, inputs = std::move(inputs), fresh = std::move(fresh), name]() mutable {
      KernelScope scope;
      op.callBoxed(&inputs);
      for (size_t i = 0; i < fresh.size(); ++i) {
        if (fresh[i].empty()) continue;
        size_t next = 0;
        map_tensors(inputs[i], [&](const Tensor& result) {
          Tensor& to = fresh[i].at(next++);
          if (result.numel() == 0) return result;  // statistics that a CPU kernel does not keep, such as batch norm's in eval mode
          TORCH_CHECK(to.sizes() == result.sizes(), name, " gave a shape that its meta kernel did not announce");
          to.copy_(result);
          return result;
        });
      }
    });
  } else {
    {
      std::lock_guard<std::mutex> lock(g_sync_mutex);
      ++g_sync_ops[name];
    }
    std::exception_ptr error;
    stream.put(name, [&] {
      try {
        KernelScope scope;
        op.callBoxed(&inputs);
      } catch (...) {
        error = std::current_exception();
      }
    }).host_wait();
    if (error) std::rethrow_exception(error);
    raise_pending_error();
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      int from = argument_of_return(schema, i);
      results.push_back(from >= 0 ? arguments[from] : map_tensors(inputs[i], [&](const Tensor& result) {
        auto made = like_on_device(result, device);
        auto to = inside(made);
        stream.put(name, [to, result] { KernelScope scope; to.copy_(result); });
        return made;
      }));
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- memory and views ----

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(at::kPrivateUse1, current_device()));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(at::kPrivateUse1),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(at::kPrivateUse1, current_device()));
  return at::detail::empty_generic(size, c10::GetAllocator(at::kPrivateUse1),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

void grow(const Tensor& self) {
  size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && needed > self.storage().nbytes()) resize_bytes(self.storage(), needed);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
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
  int64_t count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, at::Stream stream) { used_on(self.storage().mutable_data(), queue_of(stream)); }

// ---- copies ----

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool from_device = on_sim(source), to_device = on_sim(to);
  const int device = to_device ? to.device().index() : source.device().index();
  Queue& stream = current(device);
  const bool crosses = from_device && to_device && source.device() != to.device();
  if (crosses) stream.wait_for(current(source.device().index()).now());

  const Tensor& host = from_device ? to : source;
  const bool both = from_device && to_device;
  const bool pinned = !both && host.is_pinned();
  Tensor read = from_device ? inside(source) : source.detach();
  if (!from_device && non_blocking && !pinned) read = source.clone();  // pageable memory is staged before the call returns
  Tensor write = to_device ? inside(to) : to.detach();
  auto size = to.sizes().vec();
  Mark done = stream.put("copy_", [read, write, size] {
    KernelScope scope;
    write.copy_(read.expand(size));
  });
  if (crosses) current(source.device().index()).wait_for(done);
  if (!both && !(non_blocking && (pinned || to_device))) {
    done.host_wait();
    raise_pending_error();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  at::Scalar value;
  auto view = inside(self);
  std::exception_ptr error;
  current(self.device().index()).put("item", [&] { KernelScope scope; value = view.item(); }).host_wait();
  raise_pending_error();
  return value;
}

// ---- what CPU has under another name, or not at all ----

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  auto meta = [](const Tensor& t) { return to_meta(t); };
  Tensor shape = at::convolution(meta(input), meta(weight), bias ? std::optional<Tensor>(meta(*bias)) : bias, stride, padding,
                                 dilation, transposed, output_padding, groups);
  Tensor result = like_on_device(shape, input.device().index());
  auto x = inside(input), w = inside(weight), y = inside(result);
  auto b = bias && bias->defined() ? std::optional<Tensor>(inside(*bias)) : std::nullopt;
  auto s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec();
  current(input.device().index()).put("convolution", [=] {
    KernelScope scope;
    y.copy_(at::convolution(x, w, b, s, p, d, transposed, o, groups));
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  auto made = [&](bool wanted, const Tensor& like) { return wanted ? at::empty_like(like) : Tensor(); };
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  Tensor gx = made(mask[0], input), gw = made(mask[1], weight);
  Tensor gb = mask[2] ? at::empty({channels}, weight.options()) : Tensor();
  auto seen = [](const Tensor& t) { return t.defined() ? inside(t) : Tensor(); };
  auto g = seen(grad), x = seen(input), w = seen(weight), ox = seen(gx), ow = seen(gw), ob = seen(gb);
  auto s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec();
  current(input.device().index()).put("convolution_backward", [=] {
    KernelScope scope;
    std::vector<int64_t> bias_sizes{channels};
    auto [a, b, c] = at::convolution_backward(g, x, w, at::OptionalIntArrayRef(bias_sizes), s, p, d, transposed, o, groups, mask);
    if (ox.defined()) ox.copy_(a);
    if (ow.defined()) ow.copy_(b);
    if (ob.defined()) ob.copy_(c);
  });
  return {gx, gw, gb};
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// Torch takes these cells on every device but the CPU; as plain formulas they also have derivatives.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  Tensor cy = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * cy.tanh(), cy, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const bool biased = input_bias && input_bias->defined();
  auto in = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  Tensor reset = (in[0] + hidden[0]).sigmoid(), keep = (in[1] + hidden[1]).sigmoid();
  Tensor fresh = (in[2] + reset * hidden[2]).tanh();
  return {(hx - fresh) * keep + fresh, fresh};
}

int64_t attention_by_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;
}

}  // namespace

Tensor inside(const Tensor& tensor) {
  auto* address = static_cast<char*>(real(tensor.storage().data()));
  if (address) address += tensor.storage_offset() * tensor.element_size();
  auto view = at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

std::map<std::string, int64_t> synchronous_ops() {
  std::lock_guard<std::mutex> lock(g_sync_mutex);
  return std::exchange(g_sync_ops, {});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

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

// copy_from reads conjugate and negative views itself; resolving them would copy, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_DTYPE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

}  // namespace sim
