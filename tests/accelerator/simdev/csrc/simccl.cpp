// A process group backend that behaves as NCCL's does. Collectives run on a stream of their own, after the work that was on the
// current stream when they were called. wait() makes the current stream wait and returns at once. Data travel by gloo.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include "ops.hpp"
#include "simccl.hpp"

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using Finish = std::function<void()>;
using Start = std::function<Finish()>;  // begins a transfer and returns what waits for it
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct SimWork final : c10d::Work {
  SimWork(int rank, OpType type, Mark mark, Tensors outputs, std::shared_ptr<std::atomic<bool>> aborted)
      : Work(rank, type), mark(mark), outputs(std::move(outputs)), aborted(std::move(aborted)) {}
  bool isCompleted() override { return mark.reached(); }
  bool isSuccess() const override { return true; }
  // With a timeout the host waits, and when that has passed (since the call, not since this wait) the group is lost: NCCL
  // aborts its communicator. Without one only barriers make the host wait.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout && !mark.host_wait(began + timeout)) {
      *aborted = true;
      TORCH_CHECK_WITH(DistBackendError, false, "simccl watchdog caught collective operation timeout: ", c10d::opTypeToString(opType_),
                       " ran for more than ", timeout.count(), " milliseconds before timing out; the communicator was aborted");
    }
    if (opType_ == OpType::BARRIER) mark.host_wait();
    if (timeout != kNoTimeout || opType_ == OpType::BARRIER) raise_pending_error();
    return true;
  }
  void synchronize() override {
    if (mark.queue) current(mark.queue->device).wait_for(mark);
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Mark mark;
  Tensors outputs;
  std::shared_ptr<std::atomic<bool>> aborted;
  Clock::time_point began = Clock::now();
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

class SimCCL final : public c10d::Backend {
 public:
  SimCCL(c10::intrusive_ptr<c10d::Backend> wire, std::chrono::milliseconds timeout)
      : Backend(wire->getRank(), wire->getSize()), wire_(std::move(wire)), options_(c10::make_intrusive<Options>("simccl", timeout)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void shutdown() override { drain(); }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto starts = std::exchange(starts_, {});
    auto held = std::exchange(held_, {});
    if (starts.empty()) return c10::make_intrusive<SimWork>(rank_, OpType::COALESCED, Mark{}, Tensors{}, aborted_);
    return launch(OpType::COALESCED, held, held, [starts] {
      std::vector<Finish> finish;
      for (auto& start : starts) finish.push_back(start());
      return [finish] { for (auto& one : finish) one(); };
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto t = views(tensors);
    return launch(OpType::BROADCAST, tensors, tensors, [=, this] { return over(wire_->broadcast(keep(t), options)); });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto t = views(tensors);
    return launch(OpType::ALLREDUCE, tensors, tensors, [=, this] { return reduced(t, options); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto t = views(tensors);
    return launch(OpType::ALLREDUCE_COALESCED, tensors, tensors, [=, this] {
      for (auto& one : t) reduced({one}, options)();
      return [] {};
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto t = views(tensors);
    return launch(OpType::REDUCE, tensors, tensors, [=, this] {
      Tensor copy = t[0].clone();  // other ranks' tensors stay as they are
      c10d::AllreduceOptions all;
      all.reduceOp = options.reduceOp;
      reduced({copy}, all)();
      if (rank_ == options.rootRank) keep(t)[0].copy_(copy);
      return [] {};
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto o = views(outputs.at(0)), i = views(inputs);
    return launch(OpType::ALLGATHER, with(outputs[0], inputs), outputs[0], [=, this] {
      bool even = true;
      for (auto& one : o) even = even && one.numel() == i[0].numel();
      if (even) {
        std::vector<Tensors> lists{o};
        return over(wire_->allgather(lists, keep(i), options));
      }
      Tensor(o[rank_]).copy_(i[0].view_as(o[rank_]));  // blocks of different lengths: one broadcast each, as NCCL does
      for (int k = 0; k < size_; ++k) {
        c10d::BroadcastOptions from;
        from.rootRank = k;
        Tensors one{o[k]};
        if (one[0].numel()) wire_->broadcast(one, from)->wait();
      }
      return Finish([] {});
    });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto o = view(output), i = view(input);
    TORCH_CHECK(output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    return launch(OpType::_ALLGATHER_BASE, {output, input}, {output}, [=, this] { return gathered(o, i, options); });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto o = views(outputs), i = views(inputs);
    return launch(OpType::COALESCED, with(outputs, inputs), outputs, [=, this] {
      for (size_t k = 0; k < o.size(); ++k) gathered(o[k], i[k], options)();
      return [] {};
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors none, &out = outputs.empty() ? none : outputs[0];
    auto o = views(out), i = views(inputs);
    return launch(OpType::GATHER, with(out, inputs), out, [=, this] {
      std::vector<Tensors> lists;
      if (rank_ == options.rootRank) lists.push_back(o);
      return over(wire_->gather(lists, keep(i), options));
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors none, &in = inputs.empty() ? none : inputs[0];
    auto o = views(outputs), i = views(in);
    return launch(OpType::SCATTER, with(in, outputs), outputs, [=, this] {
      std::vector<Tensors> lists;
      if (rank_ == options.rootRank) lists.push_back(i);
      return over(wire_->scatter(keep(o), lists, options));
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto o = views(outputs), i = views(inputs.at(0));
    return launch(OpType::REDUCE_SCATTER, with(inputs[0], outputs), outputs, [=, this] {
      for (int k = 0; k < size_; ++k) {
        Tensor sum = i[k].clone();
        reduced({sum}, plain(options))();
        if (k == rank_) Tensor(o[0]).copy_(sum.view_as(o[0]));
      }
      return [] {};
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto o = view(output), i = view(input);
    TORCH_CHECK(input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
    return launch(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, [=, this] { return scattered(o, i, options); });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto o = views(outputs), i = views(inputs);
    return launch(OpType::COALESCED, with(outputs, inputs), outputs, [=, this] {
      for (size_t k = 0; k < o.size(); ++k) scattered(o[k], i[k], options)();
      return [] {};
    });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto o = view(output), i = view(input);
    auto os = out_sizes, is = in_sizes;
    return launch(OpType::ALLTOALL_BASE, {output, input}, {output}, [=, this]() mutable {
      return over(wire_->alltoall_base(o, i, os, is, options));
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto o = views(outputs), i = views(inputs);
    return launch(OpType::ALLTOALL, with(outputs, inputs), outputs, [=, this] {
      Tensors flat;
      std::vector<int64_t> in_sizes, out_sizes;
      int64_t total = 0;
      for (auto& t : i) flat.push_back(t.reshape({-1})), in_sizes.push_back(t.numel());
      for (auto& t : o) out_sizes.push_back(t.numel()), total += t.numel();
      Tensor send = at::cat(flat), receive = at::empty({total}, send.options());
      auto out = out_sizes, in = in_sizes;  // gloo empties the lists it is given
      wire_->alltoall_base(receive, send, out, in, options)->wait();
      auto parts = receive.split_with_sizes(out_sizes);
      for (size_t k = 0; k < o.size(); ++k) Tensor(o[k]).copy_(parts[k].view_as(o[k]));
      return [] {};
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto t = views(tensors);
    return launch(OpType::SEND, tensors, tensors, [=, this] { return over(wire_->send(keep(t), to, tag)); });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto t = views(tensors);
    return launch(OpType::RECV, tensors, tensors, [=, this] { return over(wire_->recv(keep(t), from, tag)); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    int device = options.device ? options.device->index() : current_device();
    return launch(OpType::BARRIER, {}, {}, [this] { return over(wire_->barrier()); }, device);
  }

 private:
  // Gloo takes its tensors by mutable reference; a task owns a copy of the list.
  static Tensors& keep(const Tensors& tensors) { return const_cast<Tensors&>(tensors); }
  static Tensors with(Tensors a, const Tensors& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  static Finish over(WorkPtr work) {
    return [work] { work->wait(); };
  }
  static c10d::AllreduceOptions plain(const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    return all;
  }
  static Tensor view(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "simccl: Tensors must be on the device and dense, got one on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "simccl: Tensors must be contiguous");
    return inside(tensor);
  }
  static Tensors views(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) all.push_back(view(tensor));
    return all;
  }

  Finish reduced(Tensors t, const c10d::AllreduceOptions& options) {
    TORCH_CHECK(options.reduceOp != c10d::ReduceOp::PREMUL_SUM, "simccl: no PREMUL_SUM");
    auto sum = options;
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) sum.reduceOp = c10d::ReduceOp::SUM;
    wire_->allreduce(t, sum)->wait();
    if (mean) t[0].div_(size_);
    return [] {};
  }
  Finish gathered(Tensor o, Tensor i, const c10d::AllgatherOptions& options) {
    auto flat = o.view({-1}), mine = i.reshape({-1});
    std::vector<Tensors> lists{flat.chunk(size_)};
    if (mine.numel() == 0) return [] {};
    Tensors inputs{mine};
    wire_->allgather(lists, inputs, options)->wait();
    return [] {};
  }
  Finish scattered(Tensor o, Tensor i, const c10d::ReduceScatterOptions& options) {
    Tensor sum = i.clone();
    reduced({sum}, plain(options))();
    o.view({-1}).copy_(sum.view({-1}).narrow(0, rank_ * o.numel(), o.numel()));
    return [] {};
  }

  WorkPtr launch(OpType type, const Tensors& held, const Tensors& outputs, Start start, int device = -1) {
    for (auto& tensor : held) {
      TORCH_CHECK(device < 0 || device == tensor.device().index(), "simccl: tensors of one call on different devices");
      device = tensor.device().index();
    }
    TORCH_CHECK_WITH(DistBackendError, !*aborted_, "simccl communicator was aborted");
    if (device < 0) device = current_device();
    if (coalescing_) {
      starts_.push_back(std::move(start));
      held_.insert(held_.end(), held.begin(), held.end());
      return c10::make_intrusive<SimWork>(rank_, type, Mark{}, outputs, aborted_);
    }
    ++sequence_;
    Queue*& mine = streams_[device];
    if (!mine) mine = &queue(device, next_side_stream(device));
    mine->wait_for(current(device).now());
    auto holder = std::make_shared<Tensors>(held);  // alive until it is over, so that nobody gets their memory
    Mark mark = mine->put("simccl " + c10d::opTypeToString(type), [start = std::move(start), holder]() mutable {
      at::NoGradGuard no_grad;
      start()();
      start = nullptr;
      holder->clear();
    });
    auto work = c10::make_intrusive<SimWork>(rank_, type, mark, outputs, aborted_);
    {
      c10::Device place(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
      work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                             std::vector<c10::Device>{place});
      int64_t before = set_current(device, mine->id);  // the future is complete when that stream is
      work->future->markCompleted(at::IValue(outputs));
      set_current(device, before);
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> wire_;
  c10::intrusive_ptr<Options> options_;
  Queue* streams_[kDevices] = {};
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<Start> starts_;
  Tensors held_;
};

}  // namespace

void bind_simccl(pybind11::module_ m) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");  // has the base class
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>>(m, "SimCCL")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> wire, double timeout_s) {
        return c10::make_intrusive<SimCCL>(std::move(wire), std::chrono::milliseconds(int64_t(timeout_s * 1e3)));
      }))
      .def_property_readonly("options", &SimCCL::getBackendOptions);
}

}  // namespace sim
