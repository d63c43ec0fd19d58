#include "wire.hpp"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <set>

namespace sim {
namespace {

using Part = Wire::Part;

std::mutex g_wires_mutex;
std::set<Wire*>& wires() {
  static auto* all = new std::set<Wire*>;
  return *all;
}

// A name in Linux' abstract space: no file is left behind.
sockaddr_un address_named(const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return address;
}

std::string random_name() {
  std::random_device random;
  std::string name = "simccl-";
  for (int i = 0; i < 32; ++i) name += "0123456789abcdef"[random() % 16];
  return name;
}

void check_call(bool is_fine, const char* call) {
  TORCH_CHECK_WITH(DistBackendError, is_fine, "simccl: ", call, ": ", std::strerror(errno));
}

// Move bytes through a socket that does not block: how many, 0 if none now, -1 if the peer is gone.
template <typename Call, typename Pointer>
ssize_t move_bytes(Call call, int fd, Pointer data, size_t bytes) {
  for (;;) {
    const ssize_t moved = call(fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved > 0) return moved;
    if (moved < 0 && errno == EINTR) continue;
    return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : -1;
  }
}

// The parts for one peer or from one peer, in order. Each is its length, its bytes, and one byte
// back from whoever took it.
class Flow {
 public:
  Flow(int fd, bool sends) : fd(fd), sends_(sends) {}
  void add(const Part& part) { parts_.push_back(part); }
  bool is_over() const { return acknowledged_ == parts_.size(); }
  short events() const { return sends_ && next_ < parts_.size() ? POLLOUT | POLLIN : POLLIN; }

  void go_on() {
    while (!is_gone && next_ < parts_.size() && move_part()) {
      if (!sends_) {
        const char yes = 1;
        is_gone = move_bytes(::send, fd, &yes, 1) < 0;
        ++acknowledged_;
      }
      ++next_;
      moved_ = 0;
    }
    char bytes[64];
    while (sends_ && !is_gone && !is_over()) {
      const ssize_t count = move_bytes(::recv, fd, bytes, sizeof(bytes));
      if (count == 0) return;
      is_gone = count < 0;
      acknowledged_ += std::max<ssize_t>(count, 0);
    }
  }

  const int fd;
  bool is_gone = false;

 private:
  // Whether the current part is through.
  bool move_part() {
    const Part& part = parts_[next_];
    if (sends_) length_ = part.bytes;
    while (moved_ < sizeof(length_) + part.bytes) {
      const bool in_head = moved_ < sizeof(length_);
      char* data = in_head ? reinterpret_cast<char*>(&length_) + moved_
                           : static_cast<char*>(part.data) + (moved_ - sizeof(length_));
      const size_t rest = (in_head ? 0 : part.bytes) + sizeof(length_) - moved_;
      const ssize_t count =
          sends_ ? move_bytes(::send, fd, data, rest) : move_bytes(::recv, fd, data, rest);
      is_gone = count < 0;
      if (count <= 0) return false;
      moved_ += count;
      TORCH_CHECK_WITH(DistBackendError, moved_ < sizeof(length_) || length_ == part.bytes,
                       "simccl: rank ", part.peer, " sends ", length_, " bytes where ", part.bytes,
                       " are expected; ranks are in different calls, or tensors differ");
    }
    return true;
  }

  const bool sends_;
  std::vector<Part> parts_;
  size_t next_ = 0, moved_ = 0, acknowledged_ = 0;
  uint64_t length_ = 0;
};

int milliseconds_until(Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60'000));
}

}  // namespace

Wire::Wire(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout)
    : rank(rank), size(size), outgoing_(size, -1), incoming_(size, -1),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const auto deadline = Clock::now() + timeout;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto name = random_name();
  const auto own = address_named(name);
  check_call(bind(listener, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) == 0, "bind");
  check_call(listen(listener, size) == 0, "listen");
  store.set("rank " + std::to_string(rank), std::vector<uint8_t>(name.begin(), name.end()));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto text = store.get("rank " + std::to_string(peer));
    const auto address = address_named({text.begin(), text.end()});
    const int fd = outgoing_[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check_call(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
               "connect");
    check_call(::send(fd, &rank, sizeof(rank), MSG_NOSIGNAL) == sizeof(rank), "send");
  }
  for (int i = 1; i < size; ++i) accept_peer(listener, deadline);
  ::close(listener);
  std::lock_guard<std::mutex> lock(g_wires_mutex);
  wires().insert(this);
}

void Wire::accept_peer(int listener, Clock::time_point deadline) {
  pollfd entry = {listener, POLLIN, 0};
  const bool has_come = poll(&entry, 1, milliseconds_until(deadline)) == 1;
  TORCH_CHECK_WITH(DistBackendError, has_come, "simccl: not all ranks have joined in time");
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  int peer = -1;
  check_call(::recv(fd, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer), "recv");
  incoming_.at(peer) = fd;
}

Wire::~Wire() {
  {
    std::lock_guard<std::mutex> lock(g_wires_mutex);
    wires().erase(this);
  }
  close();
  ::close(wake_);
}

void Wire::exchange(const std::vector<Part>& sends, const std::vector<Part>& receives,
                    Clock::time_point deadline) {
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  std::vector<Flow> flows;
  std::vector<Part> to_self, from_self;
  for (int peer = 0; peer < size; ++peer) flows.emplace_back(outgoing_[peer], true);
  for (int peer = 0; peer < size; ++peer) flows.emplace_back(incoming_[peer], false);
  for (const Part& part : sends)
    part.peer == rank ? to_self.push_back(part) : flows[part.peer].add(part);
  for (const Part& part : receives)
    part.peer == rank ? from_self.push_back(part) : flows[size + part.peer].add(part);
  for (size_t i = 0; i < std::min(to_self.size(), from_self.size()); ++i)
    std::memmove(from_self[i].data, to_self[i].data,
                 std::min(to_self[i].bytes, from_self[i].bytes));

  for (;;) {
    if (is_aborted_) throw Aborted();
    bool is_over = true;
    std::vector<pollfd> entries = {{wake_, POLLIN, 0}};
    for (Flow& flow : flows) {
      if (!flow.is_over()) flow.go_on();
      is_over = is_over && flow.is_over();
      if (!flow.is_over() && !flow.is_gone) entries.push_back({flow.fd, flow.events(), 0});
    }
    if (is_over) return;
    TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline,
                     "simccl watchdog caught collective operation timeout: not all ranks came");
    poll(entries.data(), entries.size(), milliseconds_until(deadline));
  }
}

void Wire::abort() {
  is_aborted_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_, &one, sizeof(one));
}

void Wire::close() {
  abort();
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  for (auto* sockets : {&outgoing_, &incoming_})
    for (int& fd : *sockets)
      if (fd >= 0) ::close(std::exchange(fd, -1));
}

void Wire::abort_all() {
  std::lock_guard<std::mutex> lock(g_wires_mutex);
  for (Wire* wire : wires()) wire->abort();
}

}  // namespace sim
