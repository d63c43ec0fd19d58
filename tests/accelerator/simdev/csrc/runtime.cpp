#include "runtime.hpp"
#include <c10/util/Exception.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <unistd.h>
#include <unordered_map>

namespace sim {
namespace {

std::atomic<bool> g_started{false}, g_forked{false};
std::atomic<int64_t> g_patience_ns[2] = {0, 0};  // of default streams, of side streams
std::mutex g_error_mutex;
std::string g_error;

std::chrono::nanoseconds patience_of(const Queue& queue) {
  return std::chrono::nanoseconds(g_patience_ns[queue.id != 0].load());
}

void note_error(const std::string& name, const char* what) {
  std::lock_guard<std::mutex> lock(g_error_mutex);
  if (g_error.empty()) g_error = name + ": " + what;
}

struct Streams {
  std::vector<std::unique_ptr<Queue>> queues;
  Streams() {
    for (int device = 0; device < kDevices; ++device)
      for (int64_t id = 0; id <= kPool; ++id) queues.push_back(std::make_unique<Queue>(device, id));
  }
};
Streams& streams() {
  static Streams* all = new Streams;  // never destroyed: workers outlive static destruction
  return *all;
}

thread_local int t_device = 0;
thread_local int64_t t_stream[kDevices] = {};
std::atomic<int64_t> g_next[kDevices];

}  // namespace

bool in_bad_fork() { return g_forked; }
bool initialised() { return g_started; }

// A fault in memory of the device is told before whoever handled faults until now (faulthandler, or the end) gets it.
struct sigaction g_previous_fault;
void tell_fault(int, siginfo_t* info, void*) {
  if (int device = owner(info->si_addr); device >= 0) {
    char text[] = "sim: host code touched the memory of device 0: a data_ptr() was read or written outside a kernel\n";
    *std::strchr(text, '0') = char('0' + device);
    [[maybe_unused]] auto n = write(2, text, sizeof(text) - 1);
  }
  sigaction(SIGSEGV, &g_previous_fault, nullptr);  // returning repeats the access
}

void check_usable() {
  TORCH_CHECK(!g_forked, "Cannot re-initialize sim in forked subprocess: the device was used before the fork");
  if (g_started.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  struct sigaction action = {};
  action.sa_sigaction = tell_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &g_previous_fault);
}

void raise_pending_error() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(g_error_mutex);
    error.swap(g_error);
  }
  TORCH_CHECK(error.empty(), "sim error: an earlier asynchronous task failed. ", error);
}

bool Mark::reached() const { return queue == nullptr || queue->reached(position); }

bool Mark::host_wait(std::optional<Clock::time_point> until) const {
  if (queue == nullptr) return true;
  std::optional<pybind11::gil_scoped_release> without_gil;  // a worker may need the GIL to let go of a tensor
  if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
  return queue->block_host(position, until);
}

Mark Queue::put(std::string name, std::function<void()> run) {
  check_usable();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { loop(); }).detach();
  }
  tasks_.push_back({std::move(name), std::move(run), Clock::now() + patience_of(*this)});
  changed_.notify_all();
  return {this, ++put_};
}

Mark Queue::now() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {this, put_};
}

void Queue::wait_for(Mark mark) {
  if (mark.queue == nullptr || mark.queue == this || mark.reached()) return;
  put("wait for a stream", [mark] { mark.queue->block_host(mark.position); });
}

bool Queue::reached(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= position;
}

void Queue::demand(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, position);
  changed_.notify_all();
}

bool Queue::block_host(uint64_t position, std::optional<Clock::time_point> until) {
  if (g_forked) return true;
  demand(position);
  std::unique_lock<std::mutex> lock(mutex_);
  auto reached = [&] { return done_ >= position; };
  if (until) return changed_.wait_until(lock, *until, reached);
  changed_.wait(lock, reached);
  return true;
}

void Queue::loop() {
  t_device = device;
  t_stream[device] = id;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    changed_.wait_until(lock, tasks_.front().due, [&] { return demanded_ > done_; });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task.run();
    } catch (const c10::Error& error) {
      note_error(task.name, error.what_without_backtrace());
    } catch (const std::exception& error) {
      note_error(task.name, error.what());
    }
    task.run = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

int current_device() { return t_device; }

void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim: invalid device ordinal ", index, ", there are ", kDevices);
  t_device = index;
}

Queue& queue(int device, int64_t id) {
  TORCH_CHECK(device >= 0 && device < kDevices && id >= 0 && id <= kPool, "sim: no stream ", id, " on device ", device);
  return *streams().queues[device * (kPool + 1) + id];
}

Queue& current(int device) { return queue(device < 0 ? t_device : device, t_stream[device < 0 ? t_device : device]); }

int64_t set_current(int device, int64_t id) {
  queue(device, id);
  return std::exchange(t_stream[device], id);
}

int64_t next_side_stream(int device) { return 1 + g_next[device]++ % kPool; }

void synchronize(int device) {
  for (int64_t id = 0; id <= kPool; ++id) queue(device, id).now().host_wait();
  raise_pending_error();
}

void drain() {
  if (!g_started || g_forked) return;
  for (auto& queue : streams().queues) queue->now().host_wait();
}

void set_patience(double default_stream_s, double side_streams_s) {
  g_patience_ns[0] = int64_t(default_stream_s * 1e9);
  g_patience_ns[1] = int64_t(side_streams_s * 1e9);
}

std::vector<double> patience() { return {g_patience_ns[0] / 1e9, g_patience_ns[1] / 1e9}; }

// ---- memory ----

struct Block {
  char* address;
  size_t bytes, asked;
  Queue* home;                 // the stream it was allocated on
  std::set<Queue*> used_on;    // others that were told to use it
  std::vector<Mark> pending;   // what has to be over before it is used again
};

namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every signed integer

class Arena {
 public:
  explicit Arena(int device) : device_(device) {
    const char* limit = std::getenv("SIM_MEMORY_MB");
    size_ = (limit ? std::strtoull(limit, nullptr, 10) : 16384) << 20;
    shown_ = map(PROT_NONE);
    real_ = map(PROT_READ | PROT_WRITE);
  }

  Block* allocate(size_t asked) {
    size_t bytes = 512;
    while (bytes < asked) bytes *= 2;
    Queue& home = current(device_);
    Block* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& waiting = free_[{&home, bytes}];
      for (size_t i = waiting.size(); i-- > 0 && !block;) {
        bool over = true;
        for (auto& mark : waiting[i]->pending) over = over && mark.reached();
        if (!over) continue;
        block = waiting[i];
        waiting.erase(waiting.begin() + i);
      }
      if (!block) {
        TORCH_CHECK_WITH(OutOfMemoryError, top_ + bytes <= size_, "sim out of memory. Tried to allocate ", asked, " bytes of ",
                         size_, " on device ", device_);
        block = new Block{shown_ + top_, bytes, 0, &home, {}, {}};
        top_ += bytes;
      }
      block->pending.clear();
      block->asked = asked;
      live_[block->address] = block;
      in_use_ += asked;
      peak_ = std::max(peak_, in_use_);
    }
    poison(block);  // when the block is given out again, not when it is given back: between the two its stream may learn to wait
    return block;
  }

  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Queue* other : block->used_on) block->pending.push_back(other->now());
    block->used_on.clear();
    in_use_ -= block->asked;
    live_.erase(block->address);
    free_[{block->home, block->bytes}].push_back(block);
  }

  void used_on(void* address, Queue& other) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(address));
    if (found != live_.end() && found->second->home != &other) found->second->used_on.insert(&other);
  }

  bool owns(const void* address) const {
    return address >= shown_ && address < shown_ + size_;
  }
  void* real(const void* address) const { return real_ + (static_cast<const char*>(address) - shown_); }
  Usage usage() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {in_use_, peak_, live_.size()};
  }

 private:
  char* map(int protection) {
    void* got = mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(got != MAP_FAILED, "sim: cannot reserve ", size_, " bytes of address space");
    return static_cast<char*>(got);
  }
  void poison(Block* block) {
    void* start = real(block->address);
    size_t bytes = block->asked;
    if (bytes) block->home->put("poison", [start, bytes] { std::memset(start, kPoison, bytes); });
  }
  const int device_;
  size_t size_, top_ = 0, in_use_ = 0, peak_ = 0;
  char *shown_, *real_;
  std::mutex mutex_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free_;
  std::unordered_map<char*, Block*> live_;
};

std::atomic<Arena*> g_arenas[kDevices];
std::mutex g_arena_mutex;

Arena& arena(int device) {
  if (Arena* found = g_arenas[device]) return *found;
  std::lock_guard<std::mutex> lock(g_arena_mutex);
  if (!g_arenas[device]) g_arenas[device] = new Arena(device);
  return *g_arenas[device];
}

}  // namespace

Block* allocate(int device, size_t bytes) {
  check_usable();
  return arena(device).allocate(bytes);
}
void* address(Block* block) { return block->address; }
void release(Block* block) {
  if (!g_forked) arena(block->home->device).release(block);
}
int owner(const void* address) {
  for (int device = 0; device < kDevices; ++device)
    if (Arena* found = g_arenas[device]; found && found->owns(address)) return device;
  return -1;
}
void used_on(void* address, Queue& other) {
  if (int device = owner(address); device >= 0) arena(device).used_on(address, other);
}
void* real(const void* device_address) {
  int device = owner(device_address);
  TORCH_CHECK(device >= 0 || device_address == nullptr, "sim: not an address of the device");
  return device < 0 ? nullptr : arena(device).real(device_address);
}
Usage usage(int device) { return arena(device).usage(); }

}  // namespace sim
