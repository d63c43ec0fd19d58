#include "runtime.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace sim {
namespace {

std::atomic<bool> g_initialised{false}, g_forked{false};
std::atomic<int64_t> g_patience_ns[2];  // of default streams, of side streams
std::atomic<int64_t> g_next_side_stream[kMaxDevices];

std::mutex g_report_mutex;  // of the two below
std::string g_pending_error;
Counters g_counters;

thread_local int t_device = 0;
thread_local int64_t t_stream[kMaxDevices] = {};

std::vector<std::unique_ptr<Queue>>& queues() {
  static auto* all = [] {  // never destroyed: the workers outlive static objects
    auto* made = new std::vector<std::unique_ptr<Queue>>;
    for (int device = 0; device < device_count(); ++device)
      for (int64_t id = 0; id <= kSideStreams; ++id)
        made->push_back(std::make_unique<Queue>(device, id));
    return made;
  }();
  return *all;
}

void keep_error(const std::string& task, const char* what) {
  std::lock_guard<std::mutex> lock(g_report_mutex);
  if (g_pending_error.empty()) g_pending_error = task + ": " + what;
}

}  // namespace

// -- streams --------------------------------------------------------------------------------------

bool Mark::reached() const { return queue == nullptr || queue->reached(position); }

bool Mark::wait_on_host(const std::string& cause, Deadline deadline) const {
  count_sync(cause);
  if (queue == nullptr) return true;
  std::optional<pybind11::gil_scoped_release> without_gil;  // a worker may need it to free a tensor
  if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
  return queue->block(position, deadline);
}

Mark Queue::put(std::string name, std::function<void()> run) {
  initialise();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_worker_) {
    has_worker_ = true;
    std::thread([this] { loop(); }).detach();
  }
  const std::chrono::nanoseconds patience(g_patience_ns[id != 0].load());
  tasks_.push_back({std::move(name), std::move(run), Clock::now() + patience});
  changed_.notify_all();
  return {this, ++put_};
}

Mark Queue::now() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {this, put_};
}

void Queue::wait_for(Mark mark) {
  if (mark.queue == nullptr || mark.queue == this || mark.reached()) return;
  put("wait for a stream", [mark] { mark.queue->block(mark.position); });
}

bool Queue::reached(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= position;
}

bool Queue::block(uint64_t position, Deadline deadline) {
  if (g_forked) return true;  // the workers are not in this process
  std::unique_lock<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, position);
  changed_.notify_all();
  const auto is_reached = [&] { return done_ >= position; };
  if (deadline) return changed_.wait_until(lock, *deadline, is_reached);
  changed_.wait(lock, is_reached);
  return true;
}

void Queue::loop() {
  t_device = device;
  t_stream[device] = id;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    const auto due = tasks_.front().due;
    changed_.wait_until(lock, due, [&] { return demanded_ > done_; });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task.run();
    } catch (const c10::Error& error) {
      keep_error(task.name, error.what_without_backtrace());
    } catch (const std::exception& error) {
      keep_error(task.name, error.what());
    }
    task.run = nullptr;  // frees the tensors that it held before the mark is reached
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

// -- devices --------------------------------------------------------------------------------------

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("SIM_DEVICES");
    return text ? std::clamp(std::atoi(text), 0, kMaxDevices) : 2;
  }();
  return count;
}

int current_device() { return t_device; }

int resolve(int index) { return index < 0 ? t_device : index; }

void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "sim: invalid device ordinal ", index,
              ", there are ", device_count());
  t_device = index;
}

Queue& queue(int device, int64_t id) {
  TORCH_CHECK(device >= 0 && device < device_count() && id >= 0 && id <= kSideStreams,
              "sim: no stream ", id, " on device ", device, ", there are ", device_count());
  return *queues()[device * (kSideStreams + 1) + id];
}

Queue& current_queue(int device) {
  device = resolve(device);
  return queue(device, device < kMaxDevices ? t_stream[device] : 0);
}

int64_t exchange_current_queue(int device, int64_t id) {
  queue(device, id);  // throws if there is none
  return std::exchange(t_stream[device], id);
}

int64_t next_side_stream(int device) { return 1 + g_next_side_stream[device]++ % kSideStreams; }

void synchronize(int device, const std::string& cause) {
  count_sync(cause);
  {
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (PyGILState_Check()) without_gil.emplace();
    for (int64_t id = 0; id <= kSideStreams; ++id) {
      const Mark mark = queue(device, id).now();
      mark.queue->block(mark.position);
    }
  }
  raise_pending_error();
}

bool drain(Deadline deadline) {
  if (!g_initialised || g_forked) return true;
  bool is_empty = true;
  for (auto& one : queues()) {
    const Mark mark = one->now();
    is_empty = one->block(mark.position, deadline) && is_empty;
  }
  return is_empty;
}

// -- life of the process --------------------------------------------------------------------------

void initialise() {
  TORCH_CHECK(!g_forked,
              "Cannot re-initialize sim in forked subprocess: the device was used before the fork");
  if (g_initialised.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
}

bool is_initialised() { return g_initialised; }
bool is_in_bad_fork() { return g_forked; }

void raise_pending_error() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(g_report_mutex);
    error.swap(g_pending_error);
  }
  TORCH_CHECK(error.empty(), "sim error: an earlier asynchronous task failed. ", error);
}

void set_patience(double default_stream_s, double side_streams_s) {
  g_patience_ns[0] = static_cast<int64_t>(default_stream_s * 1e9);
  g_patience_ns[1] = static_cast<int64_t>(side_streams_s * 1e9);
}

std::pair<double, double> patience() { return {g_patience_ns[0] / 1e9, g_patience_ns[1] / 1e9}; }

// -- counters -------------------------------------------------------------------------------------

Counters counters() {
  std::lock_guard<std::mutex> lock(g_report_mutex);
  return g_counters;
}

void count_sync(const std::string& cause) {
  std::lock_guard<std::mutex> lock(g_report_mutex);
  ++g_counters.syncs[cause];
}

void count_bytes(bool to_device, bool pinned, size_t bytes) {
  static const char* const names[2][2] = {{"to host, pageable", "to host, pinned"},
                                          {"to device, pageable", "to device, pinned"}};
  std::lock_guard<std::mutex> lock(g_report_mutex);
  g_counters.bytes[names[to_device][pinned]] += static_cast<int64_t>(bytes);
}

}  // namespace sim
