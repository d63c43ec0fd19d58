// Carries bytes between the ranks of one group, by sockets of this host. Blocks its caller, which
// is the thread of a stream.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <vector>

#include "runtime.hpp"

namespace sim {

// The wire was given up by `abort`; what was under way is lost.
struct Aborted : std::exception {
  const char* what() const noexcept override { return "the communicator was aborted"; }
};

class Wire {
 public:
  // Bytes for another rank, or from it.
  struct Part {
    int peer;
    void* data;
    size_t bytes;
  };

  // Connects to all other ranks, which call this too.
  Wire(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Send and receive all parts, those of one peer in order. Returns when peers have taken what was
  // sent: two ranks that send first and receive later wait for ever, as with NCCL. So does a rank
  // whose peer has died; only `abort` and the deadline end that.
  void exchange(const std::vector<Part>& sends, const std::vector<Part>& receives,
                Clock::time_point deadline);
  void abort();
  void close();  // abort, and close the sockets
  bool is_aborted() const { return is_aborted_; }
  static void abort_all();  // every wire of this process

  const int rank, size;

 private:
  void accept_peer(int listener, Clock::time_point deadline);

  std::vector<int> outgoing_, incoming_;  // sockets by rank; acknowledgements come back on each
  int wake_;
  std::atomic<bool> is_aborted_{false};
  std::mutex exchange_mutex_;
};

}  // namespace sim
