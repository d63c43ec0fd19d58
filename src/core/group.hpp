// One rank's view of a group: its meetings, its collectives, its messages, its shared buffers.
//
// A collective is a row of turns. In a turn a rank writes its own slot, meets the others, and reads
// theirs. There are two slots per rank, used in turn: no rank writes a slot again before all have
// met once more, and a rank that comes to that meeting has read what it needed. With the first turn every
// rank writes what it is about to do, so ranks that disagree find out before any data is used.
#pragma once

#include <cstring>
#include <mutex>
#include <vector>

#include "handover.hpp"
#include "messages.hpp"
#include "reduce.hpp"
#include "segment.hpp"
#include "sync.hpp"

namespace unisono {

// Numbers under which collectives travel; unisono.comm.engines.shm has the same order.
enum Verb : int {
  kBarrier, kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kGather, kScatter,
  kInts, kTexts, kSharedBuffer
};

// Memory in which every rank has a region of its own, mapped by all: collectives on it copy nothing.
struct Buffer {
  uint64_t number;
  uint8_t* first;  // region of rank 0 in this process
  size_t stride, nbytes;
};

// Blocks of all ranks, by their rank.
struct Blocks {
  std::vector<uint8_t*> at;
  std::vector<size_t> nbytes;
};

class Group {
 public:
  Group(uint8_t* base, Layout layout, int rank, bool has_own_core);

  Status barrier();
  // In place; with a root, only there.
  Status all_reduce(uint8_t* x, size_t elements, int dtype, int op, int root = -1);
  // `out` becomes the reduction of every rank's `ins[rank]`. `alike` must agree, as the sizes must.
  Status reduce_scatter(uint8_t* out, const Blocks& ins, int dtype, int op, int64_t alike);
  // Every rank but a root brings one block that others read: broadcast, all_gather, gather, ints.
  Status broadcast(uint8_t* x, size_t nbytes, int dtype, int root);
  Status all_gather(const Blocks& outs, const uint8_t* x, int dtype, int64_t alike) {
    return gather_on_all(kAllGather, outs, x, dtype, alike);
  }
  Status ints(const Blocks& outs, const uint8_t* x) { return gather_on_all(kInts, outs, x, -1, 0); }
  Status gather(const Blocks& outs, const uint8_t* x, size_t nbytes, int dtype, int root);
  // Ranks bring one block for each other: all_to_all, scatter. Empty vectors where a rank has none.
  Status all_to_all(const Blocks& outs, const Blocks& ins, int dtype);
  Status scatter(uint8_t* out, size_t nbytes, const Blocks& ins, int dtype, int root);
  // A few bytes of every rank, of lengths the others do not know.
  Status texts(const std::vector<uint8_t>& own, std::vector<std::vector<uint8_t>>& all);
  // Meets and compares, for calls that are made of several others.
  Status agree(Verb verb, int dtype, uint64_t nbytes, uint64_t digest);

  uint64_t add_buffer(uint8_t* first, size_t stride, size_t nbytes);
  void drop_buffer(uint64_t number);

  // What each rank brought to the collective that has just met, and what it sends and expects.
  const std::vector<Header>& headers() const { return heads_; }
  const std::vector<uint64_t>& table() const { return table_; }

  Control& control(int rank) { return controls_[rank]; }
  void fail(State state, int culprit, const char* text, size_t length);
  void close();
  void wake_all();

  const Layout layout;
  const int rank, size;
  Patience patience;
  Look look;
  void set_way(Handover::Way way) { to_slot_.way = to_region_.way = messages.hand_over.way = way; }
  size_t small_bytes = 32 * 1024;  // up to here every rank reduces everything after one meeting
  Fault fault;
  Messages messages;

 private:
  uint8_t* slot(int turn, int rank) { return base_ + layout.slot(turn, rank); }
  int next_turn() { return turn_ ^= 1; }
  Status sync();
  Status meet(int turn, Header own, bool same_size);
  Status gather_on_all(Verb verb, const Blocks& outs, const uint8_t* x, int dtype, int64_t alike);
  Status large_all_reduce(uint8_t* x, size_t nbytes, int dtype, Reduce reduce, int turn, bool filled, bool wanted);
  Status reduce_in_place(size_t offset, const Buffer& buffer, size_t nbytes, int dtype, Reduce reduce, int root);
  Status share(int turn, const uint8_t* x, size_t nbytes, const std::vector<size_t>& sizes, uint8_t* const* outs);
  Status deal(int turn, const Blocks& ins, const Blocks& outs);
  Status leave_buffers(bool lacks, bool& again);
  void fill_shares(int turn, const Blocks& ins, size_t start);
  size_t share_bytes() const { return layout.slot_bytes / (size - 1) / kLine * kLine; }
  size_t place_in_slot(int owner, int peer) const { return peer < owner ? peer : peer - 1; }
  uint64_t place(const uint8_t* x, size_t nbytes) const;
  uint64_t row_place(const Blocks& blocks) const;
  const uint8_t* at_place(int rank, uint64_t place) const;
  const Buffer* buffer_of(uint64_t place) const;
  bool lacks_buffer(int r) const { return heads_[r].place && !buffer_of(heads_[r].place); }
  uint64_t* table_row(int turn, int rank);
  void read_table(int turn);
  bool any_place() const;
  void copy(void* to, const void* from, size_t n) {
    fault.step();
    if (n && to != from) std::memcpy(to, from, n);
  }

  // The same for what others read next.
  void hand_over(void* to, const void* from, size_t n) { hand_over(to, from, n, to_slot_); }
  void hand_over(void* to, const void* from, size_t n, Handover& way) {
    fault.step();
    if (n) way(n, [&](Handover::Copy copy) { copy(to, from, n); });
  }

  uint8_t* const base_;
  Control* const controls_;
  Handover to_slot_, to_region_;
  uint32_t met_ = 0;
  int turn_ = 1;
  std::vector<Header> heads_;
  std::vector<uint64_t> table_;
  std::vector<const void*> parts_;
  // Tensors die in any thread. Whoever reads from a buffer of others holds the lock: it stays mapped.
  mutable std::mutex buffers_lock_;
  std::vector<Buffer> buffers_;
  uint64_t buffers_made_ = 0;
  std::mutex fail_lock_;
};

uint64_t code_of(Verb verb, int dtype, int op, int root);

}  // namespace unisono
