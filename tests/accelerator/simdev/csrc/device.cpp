// What torch asks of a device: allocator, guard (devices, streams, events), generator, pinned
// memory, hooks.
#include "device.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <map>

namespace sim {
namespace {

// -- memory ---------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = device_at(current_device());
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    Block* block = sim::allocate(device.index(), bytes);
    const auto free = [](void* context) { release(static_cast<Block*>(context)); };
    return {address_of(block), block, free, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    void *target = real(to), *source = real(from);
    current_queue(device_of_address(to)).put("copy_data", [=] {
      std::memcpy(target, source, bytes);
    });
  }
  bool initialized() override { return is_initialised(); }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_use(pointer.get(), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Usage now = usage(resolve(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* all : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*all)[0].current = now.allocated;
      (*all)[0].peak = now.peak_allocated;
    }
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(resolve(device)); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const Usage now = usage(resolve(device));
    return {static_cast<size_t>(now.total - now.reserved), static_cast<size_t>(now.total)};
  }
};

DeviceAllocator g_allocator;

// Memory of the host that copies can use while the host goes on: here only a list of ranges.
class PinnedAllocator final : public at::HostAllocator {
 public:
  static PinnedAllocator& instance() {
    static auto* one = new PinnedAllocator;
    return *one;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* start = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[static_cast<char*>(start)] = bytes;
    return {start, start, &free, c10::Device(c10::kCPU)};
  }
  bool owns(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(static_cast<const char*>(address));
    if (next == ranges_.begin()) return false;
    --next;
    return address < next->first + next->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;  // a task holds the tensors that it reads
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void free(void* start) {
    auto& self = instance();
    {
      std::lock_guard<std::mutex> lock(self.mutex_);
      self.ranges_.erase(static_cast<char*>(start));
    }
    std::free(start);
  }
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};

// -- devices, streams, events ---------------------------------------------------------------------

struct Event {
  Mark mark;
  std::shared_ptr<std::atomic<int64_t>> time_ns;  // when the stream got there, if that is wanted
};

Event& event_at(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_device(device.index());
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_queue(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(queue(resolve(device.index()), 0));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const int index = resolve(device.index());
    return stream_of(queue(index, next_side_stream(index)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    return stream_of(queue(index, exchange_current_queue(index, stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).now().reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).now().wait_on_host("stream.synchronize");
    raise_pending_error();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize(resolve(device), "device.synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    Event& recorded = event_at(*event);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {  // with timing
      auto time = recorded.time_ns = std::make_shared<std::atomic<int64_t>>(0);
      queue_of(stream).put("event", [time] { *time = Clock::now().time_since_epoch().count(); });
    }
    recorded.mark = queue_of(stream).now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queue_of(stream).wait_for(event_at(event).mark);
  }
  bool queryEvent(void* event) const override { return !event || event_at(event).mark.reached(); }
  void synchronizeEvent(void* event) const override {
    if (event) event_at(event).mark.wait_on_host("event.synchronize");
    raise_pending_error();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second && event_at(first).time_ns && event_at(second).time_ns,
                "sim: both events must be recorded with timing enabled");
    return static_cast<double>(*event_at(second).time_ns - *event_at(first).time_ns) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    record_use(pointer.get(), queue_of(stream));
  }
};

// -- random numbers -------------------------------------------------------------------------------

// State is a seed and an offset, moved on by the host at each launch, as in CUDA's generator.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int index)
      : c10::GeneratorImpl(device_at(index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  uint64_t current_seed() const override { return state.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }
  void set_offset(uint64_t offset) override { state.offset = offset; }
  uint64_t get_offset() const override { return state.offset; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({sizeof(State)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &state, sizeof(State));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.numel() == sizeof(State) && bytes.is_cpu() &&
                    bytes.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: RNG state must be ", sizeof(State), " bytes on the CPU");
    std::memcpy(&state, bytes.data(), sizeof(State));
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state = state;
    return copy;
  }
  struct State {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  } state;
};

// -- registration ---------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialised(); }
  void init() const override { initialise(); }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(resolve(device));
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_address(data);
    TORCH_CHECK(device >= 0, "sim: not an address of a device");
    return device_at(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::instance().owns(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

const bool g_is_registered = [] {
  at::setHostAllocator(at::kPrivateUse1, &PinnedAllocator::instance());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

REGISTER_ALLOCATOR(c10::kPrivateUse1, &g_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

c10::Device device_at(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

Queue& queue_of(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }

c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(queue.device), queue.id);
}

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(resolve(device));
}

uint64_t next_kernel_seed(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_privateuseone(),
              "Expected a 'sim' device type for generator but found '", generator.device().type(),
              "'");
  auto* impl = generator.get<Generator>();
  std::lock_guard<std::mutex> lock(impl->mutex_);
  // The mixing step of splitmix64: neighbouring offsets give unrelated seeds.
  uint64_t mixed = impl->state.seed + 0x9E3779B97F4A7C15ull * ++impl->state.offset;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = g_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept) g_allocator.copy_data(fresh.get(), storage.data(), kept);
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace sim
