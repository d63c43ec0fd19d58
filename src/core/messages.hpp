// Messages between two ranks: matched by tag, in order, without a thread of their own.
//
// A message travels through the ring of its pair, a cell at a time. Transfers under way are moved on
// by threads that wait for a message or a collective, else by the group's thread. A message without
// a receive stays in its ring, unless one behind it has a receive; then it is put aside.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "handover.hpp"
#include "segment.hpp"
#include "sync.hpp"

namespace unisono {

// Where the bytes of a message lie in a tensor: in runs of one length, at the distances of the outer
// dims. So a slice of a tensor is sent from where it lies and lands where it belongs.
struct Extent {
  static constexpr int kMostDims = 8;

  uint8_t* at = nullptr;
  size_t nbytes = 0;
  size_t run = 0;  // all of it for a contiguous tensor
  int dims = 0;    // around the runs, the outermost first
  size_t count[kMostDims], stride[kMostDims];

  Extent(uint8_t* at, size_t nbytes) : at(at), nbytes(nbytes), run(nbytes) {}
  // Adds a dim around what is there; one that goes on where it ends only makes runs longer.
  void add_outer_dim(size_t n, size_t distance);
  void read(size_t offset, size_t length, uint8_t* to, Handover::Copy copy) const;
  void write(size_t offset, size_t length, const uint8_t* from) const;

 private:
  template <class Move>
  void each_run(size_t offset, size_t length, Move move) const;
};

// A message from this rank or to it.
struct Transfer {
  Transfer(int peer, int64_t tag, const Extent& extent, int64_t dtype)
      : peer(peer), tag(tag), extent(extent), dtype(dtype) {}

  std::atomic<int> peer;  // -1 for a receive from any rank, until a message has come
  int64_t tag;
  Extent extent;
  int64_t dtype;
  size_t moved = 0;
  std::atomic<bool> done{false};
  // A message of another length or dtype than expected is taken from the ring and thrown away.
  bool refused = false;
  size_t found_nbytes = 0;
  int64_t found_dtype = -1;
};
using TransferRef = std::shared_ptr<Transfer>;

class Messages {
 public:
  Messages(uint8_t* base, Layout layout, int rank, bool has_own_core, Fault& fault);

  TransferRef post_send(int dst, int64_t tag, const Extent& x, int64_t dtype);
  TransferRef post_recv(int src, int64_t tag, const Extent& x, int64_t dtype);

  // Moves on what can be moved; tells whether anything was. Never blocks.
  bool progress();
  // The same for those who wait for something else; tells whether transfers are left.
  bool attend() {
    progress();
    return under_way() > 0;
  }
  Status wait(const std::vector<TransferRef>& transfers, const Look& look, double look_s);

  int under_way() const { return under_way_.load(std::memory_order_relaxed); }
  // Whether a peer may be waiting for this rank to empty a ring, or this rank for a peer: then
  // the group's thread has to move messages on while no other thread waits.
  bool overflows();
  // Whether transfers are under way that no thread waits for.
  bool unattended() const { return under_way() > 0 && waiters_.load() == 0; }
  Bell& bell() { return controls_[rank_].bell; }

  std::atomic<int64_t> waited_ns{0};
  Handover hand_over;  // used with the lock held

 private:
  struct Arriving {
    int64_t tag = 0;
    size_t nbytes = 0, moved = 0;
    int64_t dtype = 0;
    TransferRef transfer;        // null if refused or put aside
    std::vector<uint8_t> aside;  // used if put aside
    bool is_aside = false, active = false;
  };

  Ring& ring_of(int src, int dst) { return *reinterpret_cast<Ring*>(base_ + layout_.ring(src, dst)); }
  Cell& cell_of(int src, int dst, uint64_t number);
  uint8_t* bytes_of(int src, int dst, uint64_t number);
  bool push(int dst);
  bool pull(int src);
  void forget(const std::vector<TransferRef>& transfers);
  void take(int src, Cell& cell);
  TransferRef match(int src, int64_t tag);
  bool is_wanted(int src) const;
  bool take_aside(const TransferRef& transfer);
  void deliver(Arriving& message, const TransferRef& transfer, int src);
  void refuse(Transfer& transfer, size_t nbytes, int64_t dtype);
  void finish(Transfer& transfer);

  uint8_t* const base_;
  const Layout layout_;
  const int rank_, size_;
  const bool has_own_core_;
  Fault& fault_;
  Control* const controls_;
  std::mutex lock_;
  std::vector<std::deque<TransferRef>> outgoing_;
  std::list<TransferRef> expected_;
  std::vector<Arriving> arriving_;
  std::vector<std::list<Arriving>> aside_;
  std::vector<uint64_t> written_, read_;
  std::vector<bool> listens_;  // to whom a receive was ever posted
  std::atomic<int> under_way_{0}, waiters_{0};
};

}  // namespace unisono
