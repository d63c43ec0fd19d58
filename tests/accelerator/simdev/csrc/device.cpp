// What torch has to know about a device: allocator, guard (devices, streams, events), hooks, generator, pinned memory.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
#include <map>
#include "device.hpp"

namespace sim {
namespace {

c10::Device device_of(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = device_of(current_device());
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    Block* block = sim::allocate(device.index(), bytes);
    return {address(block), block, [](void* context) { release(static_cast<Block*>(context)); }, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    void *a = real(to), *b = real(from);
    current(owner(to)).put("copy_data", [=] { std::memcpy(a, b, bytes); });
  }
  bool initialized() override { return initialised(); }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get()) used_on(ptr.get(), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto now = usage(device);
    auto& all = stats.allocated_bytes[0];
    all.current = static_cast<int64_t>(now.bytes);
    all.peak = static_cast<int64_t>(now.peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(mutex);
    ranges[static_cast<char*>(at)] = bytes;
    return {at, at, &free_pinned, c10::Device(c10::kCPU)};
  }
  static void free_pinned(void* at);
  bool holds(const void* ptr) {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = ranges.upper_bound(const_cast<char*>(static_cast<const char*>(ptr)));
    return next != ranges.begin() && ptr < (--next)->first + next->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // tasks hold the tensors they read
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  std::mutex mutex;
  std::map<char*, size_t> ranges;
};

DeviceAllocator g_allocator;
Pinned& pinned() {
  static auto* one = new Pinned;
  return *one;
}
void Pinned::free_pinned(void* at) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges.erase(static_cast<char*>(at));
  }
  std::free(at);
}

// An event is a mark; with timing it also notes when the stream got there.
struct Event {
  Mark mark;
  std::shared_ptr<std::atomic<int64_t>> time_ns;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) set_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return as_stream(current(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(queue(device.index() < 0 ? current_device() : device.index(), 0));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    int index = device.index() < 0 ? current_device() : device.index();
    return as_stream(queue(index, next_side_stream(index)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int index = stream.device_index();
    return as_stream(queue(index, set_current(index, stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).now().reached(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).now().host_wait();
    raise_pending_error();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    auto* mine = static_cast<Event*>(*event);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      auto time = mine->time_ns = std::make_shared<std::atomic<int64_t>>(0);
      queue_of(stream).put("event", [time] { *time = Clock::now().time_since_epoch().count(); });
    }
    mine->mark = queue_of(stream).now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queue_of(stream).wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->mark.reached(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->mark.host_wait();
    raise_pending_error();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    TORCH_CHECK(a && b && a->time_ns && b->time_ns, "sim: both events must be recorded with timing enabled");
    return double(*b->time_ns - *a->time_ns) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    if (ptr.get()) used_on(ptr.get(), queue_of(stream));
  }
};

// State is a seed and an offset, moved on by the host when a kernel is launched, as with CUDA's Philox generator.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int index)
      : c10::GeneratorImpl(device_of(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(state.mutable_data_ptr<uint8_t>() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu(),
                "sim: RNG state must be 16 bytes on the CPU");
    auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->seed_ = seed_, other->offset_ = offset_;
    return other;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialised(); }
  void init() const override { check_usable(); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    int device = owner(data);
    TORCH_CHECK(device >= 0, "sim: not an address of a device");
    return device_of(device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_bytes(storage, bytes); }
};

const bool g_registered = [] {
  at::setHostAllocator(at::kPrivateUse1, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

REGISTER_ALLOCATOR(c10::kPrivateUse1, &g_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

Queue& queue_of(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }

c10::Stream as_stream(const Queue& queue) { return c10::Stream(c10::Stream::UNSAFE, device_of(queue.device), queue.id); }

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

uint64_t next_kernel_seed(const at::Generator& generator) {
  auto* mine = generator.get<Generator>();
  std::lock_guard<std::mutex> lock(mine->mutex_);
  uint64_t mixed = mine->seed_ + 0x9E3779B97F4A7C15ull * ++mine->offset_;  // splitmix64
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = g_allocator.allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept) g_allocator.copy_data(fresh.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace sim
