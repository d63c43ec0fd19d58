// All operators that are not in ops.cpp. The shapes of the results come from the operator's meta
// kernel at once, the values from its CPU kernel later, on the stream. An operator without a meta
// kernel, or with a shape that depends on values, makes the host wait.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops.hpp"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Arguments = std::vector<IValue>;
using Change = std::function<Tensor(const Tensor&)>;

// Apply a function to every tensor of an argument, whatever it is packed in.
IValue map_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector())
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorList().vec())
      changed.push_back(tensor && tensor->defined() ? change(*tensor) : tensor);
    return changed;
  }
  return value;
}

// CUDA, too, takes index tensors of the host here.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_";
}

void check_same_device(bool is_same, int device, const Tensor& other, const std::string& name) {
  TORCH_CHECK(is_same, "Expected all tensors to be on the same device, but found at least two "
              "devices, sim:", device, " and ", other.device(), "! (", name, ")");
}

// Numbers, that is tensors without dimensions, may come from anywhere.
int device_of_call(const std::string& name, const Arguments& arguments) {
  int device = -1;
  Tensor host_tensor;
  for (const auto& argument : arguments)
    map_tensors(argument, [&](const Tensor& tensor) {
      if (on_sim(tensor)) {
        const int index = tensor.device().index();
        check_same_device(device < 0 || device == index || tensor.dim() == 0, device, tensor, name);
        if (device < 0) device = index;
      } else if (tensor.dim() > 0) {
        host_tensor = tensor;
      }
      return tensor;
    });
  if (host_tensor.defined() && device >= 0)
    check_same_device(takes_host_indices(name), device, host_tensor, name);
  for (const auto& argument : arguments)
    if (device < 0 && argument.isDevice() && argument.toDevice().is_privateuseone())
      device = argument.toDevice().index();
  return resolve(device);
}

// The arguments as the CPU kernel gets them, fixed at the call: addresses, numbers of the host, the
// seed of a random operator.
Stack kernel_arguments(const c10::FunctionSchema& schema, const Arguments& arguments, int device) {
  const auto as_kernels_see_it = [](const Tensor& tensor) {
    if (on_sim(tensor)) return inside(tensor);
    const bool may_change = tensor.dim() == 0 && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return may_change ? tensor.clone() : tensor;
  };
  Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto type = schema.arguments()[i].type()->str();
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device(at::kCPU));
    } else if (type.find("Generator") != std::string::npos) {
      const auto& generator =
          argument.isNone() ? default_generator(device) : argument.toGenerator();
      stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>(next_kernel_seed(generator)));
    } else {
      stack.push_back(map_tensors(argument, as_kernels_see_it));
    }
  }
  return stack;
}

// The argument that a return value is, for operators that write into one; -1 for a new value.
int argument_of_return(const c10::FunctionSchema& schema, size_t which) {
  const auto* alias = schema.returns()[which].alias_info();
  if (!alias) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
  }
  TORCH_CHECK(false, "sim: cannot tell what ", schema.name(), " returns");
}

// An out= argument may have to grow.
void take_shape(const Tensor& tensor, const Tensor& meta) {
  if (!on_sim(tensor) || tensor.sizes() == meta.sizes()) return;
  tensor.resize_(meta.sizes());
  if (meta.numel())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
}

// Run the operator's meta kernel; nothing if there is none or if shapes depend on values.
std::optional<Stack> inferred_results(const c10::OperatorHandle& op, const Arguments& arguments) {
  for (const auto& value : op.schema().returns()) {
    const auto type = value.type()->str();
    if (type != "Tensor" && type != "Tensor[]") return std::nullopt;
  }
  Stack stack;
  for (const auto& argument : arguments) {
    if (argument.isDevice())
      stack.emplace_back(c10::Device(at::kMeta));
    else if (argument.isGenerator())
      stack.emplace_back();
    else
      stack.push_back(map_tensors(argument, as_meta));
  }
  const Stack metas = stack;
  try {
    const KernelScope scope;
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;  // if the call is wrong, the CPU kernel says so
  }
  for (size_t i = 0; i < metas.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor())
      take_shape(arguments[i].toTensor(), metas[i].toTensor());
  }
  return stack;
}

// Run the CPU kernel, which replaces its arguments by its results. Some kernels resize an out=
// argument on their way, which memory of the device does not allow: they get one of the host.
void run_kernel(const c10::OperatorHandle& op, Stack& stack) {
  const KernelScope scope;
  std::vector<std::pair<Tensor, Tensor>> outputs;
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!op.schema().arguments()[i].is_out() || !stack[i].isTensor()) continue;
    const Tensor target = stack[i].toTensor();
    outputs.emplace_back(target,
                         at::empty_strided(target.sizes(), target.strides(), target.options()));
    stack[i] = outputs.back().second;
  }
  op.callBoxed(&stack);
  for (const auto& [target, value] : outputs) {
    TORCH_CHECK(target.sizes() == value.sizes(), op.schema().name(), " needs an out= of shape ",
                value.sizes(), ", not ", target.sizes());
    target.copy_(value);
  }
}

// One call on its way: what it is, and where.
struct Call {
  const c10::OperatorHandle& op;
  const Arguments arguments;
  const std::string name;
  const int device;
  Queue& stream;

  const c10::FunctionSchema& schema() const { return op.schema(); }

  Stack run_later(const Stack& metas, Stack inputs) const;
  Stack run_now(Stack inputs) const;
};

Stack Call::run_later(const Stack& metas, Stack inputs) const {
  Stack results;
  std::vector<std::vector<Tensor>> targets(schema().returns().size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (const int argument = argument_of_return(schema(), i); argument >= 0) {
      results.push_back(arguments[argument]);
      continue;
    }
    results.push_back(map_tensors(metas[i], [&](const Tensor& meta) {
      Tensor result = empty_like_meta(meta, device);
      targets[i].push_back(inside(result));
      return result;
    }));
  }
  stream.put(name, [op = op, name = name, inputs, targets]() mutable {
    run_kernel(op, inputs);
    const KernelScope scope;
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].empty()) continue;
      size_t next = 0;
      map_tensors(inputs[i], [&](const Tensor& result) {
        const Tensor& target = targets[i].at(next++);
        if (result.numel() == 0) return result;  // statistics that only other devices keep
        TORCH_CHECK(target.sizes() == result.sizes(), name, " returned the shape ", result.sizes(),
                    ", its meta kernel announced ", target.sizes());
        target.copy_(result);
        return result;
      });
    }
  });
  return results;
}

Stack Call::run_now(Stack inputs) const {
  std::exception_ptr error;
  const Mark done = stream.put(name, [&] {
    try {
      run_kernel(op, inputs);
    } catch (...) {
      error = std::current_exception();
    }
  });
  done.wait_on_host(name);
  if (error) std::rethrow_exception(error);
  raise_pending_error();
  Stack results;
  for (size_t i = 0; i < schema().returns().size(); ++i) {
    const int argument = argument_of_return(schema(), i);
    results.push_back(argument >= 0 ? arguments[argument]
                                    : map_tensors(inputs[i], [this](const Tensor& value) {
                                        Tensor result = empty_like_meta(value, device);
                                        stream.put(name, [value, target = inside(result)] {
                                          const KernelScope scope;
                                          target.copy_(value);
                                        });
                                        return result;
                                      }));
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  for (const auto& value : schema.returns())
    TORCH_CHECK_NOT_IMPLEMENTED(!value.alias_info() || value.alias_info()->isWrite(),
                                "sim: no kernel for the view ", schema.name());
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "sim: the CPU has no ", schema.name());
  const Arguments arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const int device = device_of_call(schema.name(), arguments);
  const c10::DeviceGuard guard(device_at(device));
  const auto& overload = schema.overload_name();
  const auto name = overload.empty() ? schema.name() : schema.name() + "." + overload;
  const Call call{op, arguments, name, device, current_queue(device)};

  const auto metas = inferred_results(op, arguments);
  Stack inputs = kernel_arguments(schema, arguments, device);
  Stack results =
      metas ? call.run_later(*metas, std::move(inputs)) : call.run_now(std::move(inputs));
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
