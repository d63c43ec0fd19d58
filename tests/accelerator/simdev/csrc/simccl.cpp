// A process group backend that behaves as NCCL's does. A collective runs on a stream of the group,
// after what was on the current stream when it was called. wait() makes the current stream wait for
// it and returns at once.
#include "simccl.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "ops.hpp"
#include "wire.hpp"

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective sends and receives, and what it does with that. Made on the stream, so that it
// sees what earlier kernels wrote.
struct Transfer {
  std::vector<Wire::Part> sends, receives;
  std::function<void()> finish = [] {};

  void send(int peer, const Tensor& tensor) {
    sends.push_back({peer, tensor.data_ptr(), tensor.nbytes()});
  }
  void receive(int peer, const Tensor& tensor) {
    receives.push_back({peer, tensor.data_ptr(), tensor.nbytes()});
  }
};
using MakeTransfer = std::function<Transfer()>;

// The outcome of one collective, written on its stream.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr error;
};

struct SimWork final : c10d::Work {
  SimWork(int rank, OpType type, Mark mark, Tensors outputs, std::shared_ptr<Wire> wire)
      : Work(rank, type), mark(mark), outputs(std::move(outputs)), wire(std::move(wire)) {}

  bool isCompleted() override { return mark.reached() || wire->is_aborted(); }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override {
    {
      std::lock_guard<std::mutex> lock(outcome->mutex);
      if (outcome->error) return outcome->error;
    }
    if (mark.reached() || !wire->is_aborted()) return nullptr;
    return std::make_exception_ptr(Aborted());
  }

  // With a timeout the host waits. When it has passed, counted from the call of the collective,
  // the group is lost, for NCCL aborts its communicator. Without one only barriers block the host.
  bool wait(Milliseconds timeout) override {
    synchronize();
    const bool is_barrier = opType_ == OpType::BARRIER;
    if (timeout != kNoTimeout) {
      if (!mark.wait_on_host("work.wait(timeout)", began + timeout)) {
        wire->abort();
        TORCH_CHECK_WITH(DistBackendError, false,
                         "simccl watchdog caught collective operation timeout: ",
                         c10d::opTypeToString(opType_), " ran for more than ", timeout.count(),
                         " milliseconds before timing out; the communicator was aborted");
      }
    } else if (is_barrier) {
      mark.wait_on_host("barrier");
    }
    if (timeout != kNoTimeout || is_barrier) raise_pending_error();
    return true;
  }
  void synchronize() override {
    if (mark.queue) current_queue(mark.queue->device).wait_for(mark);
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  const Mark mark;
  const Tensors outputs;
  const std::shared_ptr<Wire> wire;
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  const Clock::time_point began = Clock::now();
};

// The tensor as the stream sees it. NCCL takes dense tensors of the device only.
Tensor view_of(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone() && tensor.layout() == at::kStrided,
              "simccl: Tensors must be on the device and dense, got one on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "simccl: Tensors must be contiguous");
  return inside(tensor);
}

Tensors views_of(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(view_of(tensor));
  return views;
}

Tensors joined(Tensors a, const Tensors& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void check_op(const ReduceOp& op) {
  constexpr ReduceOp::RedOpType known[] = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                           ReduceOp::MIN, ReduceOp::MAX};
  for (const auto one : known)
    if (op == one) return;
  TORCH_CHECK(false, "simccl: cannot use this ReduceOp; it has SUM, AVG, PRODUCT, MIN and MAX");
}

// Reduce the blocks of all ranks, in the order of ranks.
Tensor reduced(const Tensors& blocks, const ReduceOp& op) {
  Tensor total = blocks[0].clone();
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (op == ReduceOp::PRODUCT)
      total.mul_(blocks[i]);
    else if (op == ReduceOp::MIN)
      at::minimum_out(total, total, blocks[i]);
    else if (op == ReduceOp::MAX)
      at::maximum_out(total, total, blocks[i]);
    else
      total.add_(blocks[i]);
  }
  if (op == ReduceOp::AVG) {
    const auto size = static_cast<int64_t>(blocks.size());
    at::isIntegralType(total.scalar_type(), true) ? total.div_(size, "trunc") : total.div_(size);
  }
  return total;
}

class SimCCL final : public c10d::Backend {
 public:
  SimCCL(std::shared_ptr<Wire> wire, Milliseconds timeout)
      : Backend(wire->rank, wire->size), wire_(std::move(wire)),
        options_(c10::make_intrusive<Options>("simccl", timeout)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }

  void abort() override { wire_->abort(); }
  void shutdown() override {
    if (!wire_->is_aborted()) last_.wait_on_host("destroy_process_group");
    wire_->close();
  }

  // -- reductions ---------------------------------------------------------------------------------

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_to_all(OpType::ALLREDUCE, tensors, options.reduceOp);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_to_all(OpType::ALLREDUCE_COALESCED, tensors, options.reduceOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_op(options.reduceOp);
    const Tensor own = view_of(tensors.at(0));
    const int root = static_cast<int>(options.rootRank);
    return launch(OpType::REDUCE, tensors, tensors, [=, this, op = options.reduceOp] {
      Transfer transfer;
      if (rank_ == root)
        gather_blocks(transfer, own, [own, op](const Tensors& blocks) {
          own.copy_(reduced(blocks, op));
        });
      else
        transfer.send(root, own);
      return transfer;
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return reduce_blocks(OpType::REDUCE_SCATTER, {outputs.at(0)}, {inputs.at(0)}, options.reduceOp);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce_blocks(OpType::_REDUCE_SCATTER_BASE, {output}, {blocks_of(input, output)},
                         options.reduceOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Tensors> blocks;
    for (size_t i = 0; i < outputs.size(); ++i)
      blocks.push_back(blocks_of(inputs.at(i), outputs[i]));
    return reduce_blocks(OpType::COALESCED, outputs, blocks, options.reduceOp);
  }

  // -- copies -------------------------------------------------------------------------------------

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor own = view_of(tensors.at(0));
    const int root = static_cast<int>(options.rootRank);
    return launch(OpType::BROADCAST, tensors, tensors, [=, this] {
      Transfer transfer;
      if (rank_ != root) transfer.receive(root, own);
      for (int peer = 0; rank_ == root && peer < size_; ++peer)
        if (peer != rank_) transfer.send(peer, own);
      return transfer;
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    return gather_to_all(OpType::ALLGATHER, {outputs.at(0)}, inputs, outputs[0]);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return gather_to_all(OpType::_ALLGATHER_BASE, {blocks_of(output, input)}, {input},
                         {output});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    std::vector<Tensors> blocks;
    for (size_t i = 0; i < inputs.size(); ++i)
      blocks.push_back(blocks_of(outputs.at(i), inputs[i]));
    return gather_to_all(OpType::COALESCED, blocks, inputs, outputs);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const Tensors none, &blocks = outputs.empty() ? none : outputs[0];
    const Tensors to = views_of(blocks);
    const Tensor own = view_of(inputs.at(0));
    const int root = static_cast<int>(options.rootRank);
    return launch(OpType::GATHER, joined(blocks, inputs), blocks, [=, this] {
      Transfer transfer;
      transfer.send(root, own);
      for (int peer = 0; rank_ == root && peer < size_; ++peer) transfer.receive(peer, to[peer]);
      return transfer;
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const Tensors none, &blocks = inputs.empty() ? none : inputs[0];
    const Tensors from = views_of(blocks);
    const Tensor own = view_of(outputs.at(0));
    const int root = static_cast<int>(options.rootRank);
    return launch(OpType::SCATTER, joined(blocks, outputs), outputs, [=, this] {
      Transfer transfer;
      transfer.receive(root, own);
      for (int peer = 0; rank_ == root && peer < size_; ++peer) transfer.send(peer, from[peer]);
      return transfer;
    });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions&) override {
    const auto cut = [this](const Tensor& tensor, const std::vector<int64_t>& sizes) {
      const Tensor view = view_of(tensor);
      TORCH_CHECK(!sizes.empty() || view.size(0) % size_ == 0, "simccl: dimension 0 of ",
                  view.sizes(), " does not divide equally among ", size_, " ranks");
      return sizes.empty() ? view.tensor_split(size_) : view.split_with_sizes(sizes);
    };
    return exchange_blocks(OpType::ALLTOALL_BASE, {output, input}, {output},
                           cut(output, output_sizes), cut(input, input_sizes));
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return exchange_blocks(OpType::ALLTOALL, joined(outputs, inputs), outputs, views_of(outputs),
                           views_of(inputs));
  }

  // -- messages -----------------------------------------------------------------------------------

  WorkPtr send(Tensors& tensors, int peer, int) override {
    return launch(OpType::SEND, tensors, tensors, [peer, own = view_of(tensors.at(0))] {
      Transfer transfer;
      transfer.send(peer, own);
      return transfer;
    });
  }

  WorkPtr recv(Tensors& tensors, int peer, int) override {
    return launch(OpType::RECV, tensors, tensors, [peer, own = view_of(tensors.at(0))] {
      Transfer transfer;
      transfer.receive(peer, own);
      return transfer;
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto make = [this] {
      Transfer transfer;
      gather_blocks(transfer, at::zeros({1}, at::kByte), [](const Tensors&) {}, true);
      return transfer;
    };
    return launch(OpType::BARRIER, {}, {}, make, options.device ? options.device->index() : -1);
  }

  // Calls between these two are one transfer: messages to and from others need no order then.
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    const auto makes = std::exchange(coalesced_, {});
    const auto tensors = std::exchange(coalesced_tensors_, {});
    if (makes.empty()) return new_work(OpType::COALESCED, Mark{}, {});
    return launch(OpType::COALESCED, tensors, tensors, [makes] {
      Transfer all;
      std::vector<std::function<void()>> finishes;
      for (const auto& make : makes) {
        const Transfer one = make();
        all.sends.insert(all.sends.end(), one.sends.begin(), one.sends.end());
        all.receives.insert(all.receives.end(), one.receives.begin(), one.receives.end());
        finishes.push_back(one.finish);
      }
      all.finish = [finishes] {
        for (const auto& finish : finishes) finish();
      };
      return all;
    });
  }

 private:
  // A whole tensor as one block for each rank, each as large as `block`.
  Tensors blocks_of(const Tensor& whole, const Tensor& block) const {
    TORCH_CHECK(whole.numel() == block.numel() * size_, "simccl: a tensor of ", whole.numel(),
                " elements is not ", size_, " times one of ", block.numel());
    view_of(whole);  // refuses one that cannot be sent
    return whole.view({-1}).tensor_split(size_);
  }

  // Receive the blocks of all ranks and, if `to_all`, send `own` to them.
  void gather_blocks(Transfer& transfer, const Tensor& own,
                     std::function<void(const Tensors&)> finish, bool to_all = false) const {
    Tensors blocks;
    for (int peer = 0; peer < size_; ++peer) {
      blocks.push_back(peer == rank_ ? own : at::empty_like(own));
      if (peer == rank_) continue;
      transfer.receive(peer, blocks.back());
      if (to_all) transfer.send(peer, own);
    }
    transfer.finish = [blocks, finish, before = transfer.finish] {
      before();
      finish(blocks);
    };
  }

  WorkPtr reduce_to_all(OpType type, const Tensors& tensors, const ReduceOp& op) {
    check_op(op);
    return launch(type, tensors, tensors, [this, op, views = views_of(tensors)] {
      Transfer transfer;
      for (const Tensor& own : views)
        gather_blocks(
            transfer, own, [own, op](const Tensors& blocks) { own.copy_(reduced(blocks, op)); },
            true);
      return transfer;
    });
  }

  // inputs[i] has one block for each rank; outputs[i] gets the sum of those for this rank.
  WorkPtr reduce_blocks(OpType type, const Tensors& outputs, const std::vector<Tensors>& inputs,
                        const ReduceOp& op) {
    check_op(op);
    const Tensors to = views_of(outputs);
    Tensors tensors = outputs;
    std::vector<Tensors> from;
    for (const auto& blocks : inputs) {
      from.push_back(views_of(blocks));
      tensors = joined(tensors, blocks);
    }
    return launch(type, tensors, outputs, [=, this] {
      Transfer transfer;
      for (size_t i = 0; i < to.size(); ++i) {
        for (int peer = 0; peer < size_; ++peer)
          if (peer != rank_) transfer.send(peer, from[i][peer]);
        gather_blocks(transfer, from[i][rank_], [op, output = to[i]](const Tensors& blocks) {
          output.copy_(reduced(blocks, op).view_as(output));
        });
      }
      return transfer;
    });
  }

  // blocks[i] are those of `outputs` for input i, one for each rank; they may differ in size.
  WorkPtr gather_to_all(OpType type, const std::vector<Tensors>& blocks, const Tensors& inputs,
                        const Tensors& outputs) {
    const Tensors from = views_of(inputs);
    std::vector<Tensors> to;
    for (const auto& some : blocks) to.push_back(views_of(some));
    return launch(type, joined(outputs, inputs), outputs, [=, this] {
      Transfer transfer;
      for (size_t i = 0; i < to.size(); ++i)
        for (int peer = 0; peer < size_; ++peer) {
          transfer.send(peer, from[i]);
          transfer.receive(peer, to[i][peer]);
        }
      return transfer;
    });
  }

  WorkPtr exchange_blocks(OpType type, const Tensors& tensors, const Tensors& outputs,
                          const Tensors& to, const Tensors& from) {
    return launch(type, tensors, outputs, [=, this] {
      Transfer transfer;
      for (int peer = 0; peer < size_; ++peer) {
        transfer.send(peer, from.at(peer));
        transfer.receive(peer, to.at(peer));
      }
      return transfer;
    });
  }

  c10::intrusive_ptr<SimWork> new_work(OpType type, Mark mark, const Tensors& outputs) const {
    return c10::make_intrusive<SimWork>(rank_, type, mark, outputs, wire_);
  }

  // Put a collective on the group's stream. `tensors` are all that it touches.
  WorkPtr launch(OpType type, const Tensors& tensors, const Tensors& outputs, MakeTransfer make,
                 int device = -1) {
    for (const auto& tensor : tensors) {
      const int other = tensor.device().index();
      TORCH_CHECK(device < 0 || device == other, "simccl: tensors on devices ", device, " and ",
                  other, " in one call");
      device = other;
    }
    TORCH_CHECK_WITH(DistBackendError, !wire_->is_aborted(), "simccl communicator was aborted");
    if (is_coalescing_) {
      coalesced_.push_back(std::move(make));
      coalesced_tensors_ = joined(std::move(coalesced_tensors_), tensors);
      return new_work(type, Mark{}, outputs);
    }
    ++sequence_;
    device = resolve(device);
    Queue*& stream = streams_[device];
    if (!stream) stream = &queue(device, next_side_stream(device));
    stream->wait_for(current_queue(device).now());

    auto outcome = std::make_shared<Outcome>();
    const auto deadline = Clock::now() + options_->timeout;
    // The task holds the tensors, so that nobody gets their memory before it is over, and this
    // group, which `make` belongs to.
    auto self = c10::intrusive_ptr<SimCCL>::reclaim_copy(this);
    last_ = stream->put("simccl " + c10d::opTypeToString(type),
                        [self, make = std::move(make), tensors, outcome, deadline] {
                          self->carry_out(make, *outcome, deadline);
                        });
    auto work = new_work(type, last_, outputs);
    work->outcome = outcome;
    work->future = future_of(outputs, *stream);
    return work;
  }

  void carry_out(const MakeTransfer& make, Outcome& outcome, Clock::time_point deadline) const {
    at::NoGradGuard no_grad;
    try {
      const Transfer transfer = make();
      wire_->exchange(transfer.sends, transfer.receives, deadline);
      transfer.finish();
    } catch (const Aborted&) {  // the stream goes on; results are whatever was there
      std::lock_guard<std::mutex> lock(outcome.mutex);
      outcome.error = std::current_exception();
    } catch (...) {
      wire_->abort();
      std::lock_guard<std::mutex> lock(outcome.mutex);
      outcome.error = std::current_exception();
      throw;
    }
  }

  // A future is complete at once, and whoever takes its value makes its stream wait for `stream`.
  static c10::intrusive_ptr<c10::ivalue::Future> future_of(const Tensors& outputs, Queue& stream) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device_at(stream.device)});
    const int64_t before = exchange_current_queue(stream.device, stream.id);
    future->markCompleted(at::IValue(outputs));
    exchange_current_queue(stream.device, before);
    return future;
  }

  const std::shared_ptr<Wire> wire_;
  const c10::intrusive_ptr<Options> options_;
  Queue* streams_[kMaxDevices] = {};
  Mark last_;
  uint64_t sequence_ = 0;
  bool is_coalescing_ = false;
  std::vector<MakeTransfer> coalesced_;
  Tensors coalesced_tensors_;
};

}  // namespace

void bind_simccl(pybind11::module_ module) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");  // has the base class
  const auto create = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         double timeout_s) {
    const Milliseconds timeout(static_cast<int64_t>(timeout_s * 1e3));
    const py::gil_scoped_release without_gil;
    auto wire = std::make_shared<Wire>(*store, rank, size, timeout);
    return c10::make_intrusive<SimCCL>(std::move(wire), timeout);
  };
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>>(module, "SimCCL")
      .def(py::init(create))
      .def_property_readonly("options", &SimCCL::getBackendOptions);
  module.def("abort_all", &Wire::abort_all);
}

}  // namespace sim
