#include "memory.hpp"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

namespace sim {

struct Block {
  char* address;
  size_t capacity, bytes;
  Queue* home;  // the stream that it was allocated on
  std::set<Queue*> other_users;
  std::vector<Mark> pending;  // of other users, when it was released
};

namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every signed integer
constexpr size_t kDefaultMegabytes = 16 * 1024;
constexpr size_t kAddresses = 8;  // times the memory: addresses are not used twice

// Blocks come in few sizes, so that the cache finds one that fits.
size_t rounded(size_t bytes) {
  const size_t step = bytes < (1 << 20) ? 512 : 2 << 20;
  return (bytes + step - 1) / step * step;
}

class Arena {
 public:
  explicit Arena(int device) : device_(device) {
    const char* text = std::getenv("SIM_MEMORY_MB");
    size_ = (text ? std::strtoull(text, nullptr, 10) : kDefaultMegabytes) << 20;
    shown_ = map(PROT_NONE);
    real_ = map(PROT_READ | PROT_WRITE);
  }

  // A block that was released goes to the next allocation on its stream at once, as with CUDA: what
  // still uses it there comes first. Uses on other streams count if they were recorded.
  Block* allocate(size_t bytes) {
    const size_t capacity = rounded(bytes);
    Queue& home = current_queue(device_);
    if (!fits(home, capacity)) {
      synchronize(device_, "memory is full");
      empty_cache();
    }
    Block* block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block = take_cached(home, capacity);
      if (!block) block = take_new(home, capacity, bytes);
      block->pending.clear();
      block->bytes = bytes;
      in_use_[block->address] = block;
      allocated_ += static_cast<int64_t>(bytes);
      peak_allocated_ = std::max(peak_allocated_, allocated_);
    }
    // When it is given out, not when it is released: in between, its stream may learn to wait.
    void* start = real(block->address);
    home.put("poison", [start, bytes] { std::memset(start, kPoison, bytes); });
    return block;
  }

  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Queue* other : block->other_users) block->pending.push_back(other->now());
    block->other_users.clear();
    allocated_ -= static_cast<int64_t>(block->bytes);
    in_use_.erase(block->address);
    cache_[{block->home, block->capacity}].push_back(block);
  }

  void record_use(const void* address, Queue& other) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = in_use_.find(static_cast<const char*>(address));
    if (entry != in_use_.end() && entry->second->home != &other)
      entry->second->other_users.insert(&other);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, blocks] : cache_) {
      const auto used = std::partition(blocks.begin(), blocks.end(), is_free);
      for (auto block = blocks.begin(); block != used; ++block) {
        (*block)->home->put("free", [start = real((*block)->address), bytes = (*block)->capacity] {
          madvise(start, bytes, MADV_DONTNEED);
        });
        reserved_ -= (*block)->capacity;
        delete *block;
      }
      blocks.erase(blocks.begin(), used);
    }
  }

  bool owns(const void* address) const {
    return address >= shown_ && address < shown_ + kAddresses * size_;
  }
  void* real(const void* address) const {
    return real_ + (static_cast<const char*>(address) - shown_);
  }

  Usage usage() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {allocated_, peak_allocated_, static_cast<int64_t>(reserved_),
            static_cast<int64_t>(peak_reserved_), static_cast<int64_t>(size_)};
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_allocated_ = allocated_;
    peak_reserved_ = reserved_;
  }

 private:
  static bool is_free(const Block* block) {
    return std::all_of(block->pending.begin(), block->pending.end(),
                       [](const Mark& mark) { return mark.reached(); });
  }

  char* map(int protection) const {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* start = mmap(nullptr, kAddresses * size_, protection, flags, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "sim: cannot reserve ", kAddresses, " times ", size_,
                " bytes of address space");
    return static_cast<char*>(start);
  }

  bool fits(Queue& home, size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& blocks = cache_[{&home, capacity}];
    return reserved_ + capacity <= size_ || std::any_of(blocks.begin(), blocks.end(), is_free);
  }

  Block* take_cached(Queue& home, size_t capacity) {
    auto& blocks = cache_[{&home, capacity}];
    const auto last = std::find_if(blocks.rbegin(), blocks.rend(), is_free);
    if (last == blocks.rend()) return nullptr;
    Block* block = *last;
    blocks.erase(std::next(last).base());
    return block;
  }

  Block* take_new(Queue& home, size_t capacity, size_t bytes) {
    const bool has_room = reserved_ + capacity <= size_ && top_ + capacity <= kAddresses * size_;
    TORCH_CHECK_WITH(OutOfMemoryError, has_room,
                     "sim out of memory. Tried to allocate ", bytes, " bytes. Device ", device_,
                     " has a total capacity of ", size_, " bytes, of which ", size_ - reserved_,
                     " are free and ", allocated_, " are allocated.");
    auto* block = new Block{shown_ + top_, capacity, 0, &home, {}, {}};
    top_ += capacity;
    reserved_ += capacity;
    peak_reserved_ = std::max(peak_reserved_, reserved_);
    return block;
  }

  const int device_;
  size_t size_, top_ = 0, reserved_ = 0, peak_reserved_ = 0;
  int64_t allocated_ = 0, peak_allocated_ = 0;
  char *shown_, *real_;
  std::mutex mutex_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> cache_;
  std::unordered_map<const char*, Block*> in_use_;
};

std::atomic<Arena*> g_arenas[kMaxDevices];
struct sigaction g_previous_action;

// Say what happened before whoever handled faults until now (faulthandler, or the end) gets it.
void report_fault(int, siginfo_t* info, void*) {
  if (const int device = device_of_address(info->si_addr); device >= 0) {
    char text[] =
        "sim: host code touched the memory of device 0: "
        "a data_ptr() was read or written outside a kernel\n";
    *std::strchr(text, '0') = static_cast<char>('0' + device);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  }
  sigaction(SIGSEGV, &g_previous_action, nullptr);  // returning repeats the access
}

Arena& arena(int device) {
  if (Arena* one = g_arenas[device]) return *one;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  static const bool handles_faults = [] {
    struct sigaction action = {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &g_previous_action) == 0;
  }();
  (void)handles_faults;
  if (!g_arenas[device]) g_arenas[device] = new Arena(device);
  return *g_arenas[device];
}

}  // namespace

Block* allocate(int device, size_t bytes) {
  initialise();
  return arena(device).allocate(bytes);
}

void* address_of(const Block* block) { return block->address; }

void release(Block* block) {
  if (!is_in_bad_fork()) arena(block->home->device).release(block);
}

void record_use(const void* address, Queue& other) {
  if (const int device = device_of_address(address); device >= 0)
    arena(device).record_use(address, other);
}

void* real(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  const int device = device_of_address(device_address);
  TORCH_CHECK(device >= 0, "sim: not an address of a device");
  return arena(device).real(device_address);
}

int device_of_address(const void* address) {
  for (int device = 0; device < kMaxDevices; ++device)
    if (const Arena* one = g_arenas[device]; one && one->owns(address)) return device;
  return -1;
}

Usage usage(int device) { return arena(device).usage(); }
void empty_cache() {
  for (Arena* one : g_arenas)
    if (one) one->empty_cache();
}
void reset_peak(int device) { arena(device).reset_peak(); }

}  // namespace sim
