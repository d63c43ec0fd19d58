// What lies where in the shared memory of a group, the same in every process that maps it.
//
// A page of its own for the file, one control block per rank, headers and size tables of two turns, two slots
// per rank, and one ring for each ordered pair of ranks. A rank's slots lie together, and so do the
// rings it writes to, so that each rank can touch its own memory first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono {

constexpr uint64_t kVersion = 9;
constexpr size_t kPage = 4096;  // unit of the layout, whatever the kernel's page is
constexpr size_t kLine = 64;
// Data lies this far from the start of a page: large tensors lie 64 bytes from it, and a copy whose
// target is 64 bytes further in its page than its source takes twice the time.
constexpr size_t kShift = 1024;
constexpr size_t kTextBytes = 2048;
// Cells of a ring. With fewer, two ranks that send to each other wait for each other at every cell.
constexpr int kCells = 8;

enum State : uint32_t { kJoining = 0, kAlive = 1, kFailed = 2, kClosed = 3, kGaveUp = 4 };

// A word that others wait for. `sleepers` is only touched by those who go to sleep.
struct alignas(kLine) Bell {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "atomics in shared memory must not use locks");

struct alignas(kLine) Control {
  Bell met;   // how many meetings this rank has come to
  Bell bell;  // rung for messages
  std::atomic<uint32_t> state;
  std::atomic<int32_t> culprit;  // world rank to blame, once the state is kFailed or kGaveUp
  std::atomic<uint32_t> lacks;  // the last meeting before which this rank missed a shared buffer
  std::atomic<uint32_t> text_bytes;
  char text[kTextBytes];
};

struct alignas(kLine) Header {
  uint64_t code, nbytes, digest, place;
};

struct alignas(kLine) Ring {
  std::atomic<uint64_t> written;
  alignas(kLine) std::atomic<uint64_t> read;
};

struct alignas(kLine) Cell {
  int64_t tag;
  uint64_t nbytes, offset, length;
  int64_t dtype;
};

struct Layout {
  size_t size, slot_bytes;

  static size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
  size_t control() const { return kPage; }
  size_t headers() const { return up(control() + size * sizeof(Control), kPage); }
  size_t tables() const { return headers() + 2 * size * sizeof(Header); }
  // What only a few words of each rank live in; every rank touches all of it.
  size_t common_bytes() const { return up(tables() + 2 * size * 2 * size * sizeof(uint64_t), kPage); }
  size_t own_slots_bytes() const { return up(2 * slot_bytes + kShift, kPage); }
  size_t own_slots(size_t rank) const { return common_bytes() + rank * own_slots_bytes(); }
  size_t slot(size_t turn, size_t rank) const { return own_slots(rank) + kShift + turn * slot_bytes; }
  size_t cell_bytes() const { return size <= 32 ? 65536 : 8192; }
  // A page with the ring's own words and the head of each cell, then what the cells hold.
  size_t ring_bytes() const { return up(kPage + kShift + kCells * cell_bytes(), kPage); }
  size_t rings() const { return own_slots(size); }
  size_t ring(size_t src, size_t dst) const {
    return rings() + (src * (size - 1) + (dst < src ? dst : dst - 1)) * ring_bytes();
  }
  size_t total() const { return rings() + size * (size - 1) * ring_bytes(); }
};

}  // namespace unisono
