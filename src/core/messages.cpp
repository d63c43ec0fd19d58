#include "messages.hpp"

#include <cstring>

namespace unisono {

// Dims are added from the innermost outwards, and kept the other way round.
void Extent::add_outer_dim(size_t n, size_t distance) {
  nbytes *= n;
  if (n == 1) return;
  if (!dims && distance == run) {
    run *= n;
    return;
  }
  if (dims && distance == count[0] * stride[0]) {
    count[0] *= n;
    return;
  }
  for (int d = dims++; d > 0; d--) count[d] = count[d - 1], stride[d] = stride[d - 1];
  count[0] = n, stride[0] = distance;
}

template <class Move>
void Extent::each_run(size_t offset, size_t length, Move move) const {
  if (!dims) {
    move(at + offset, length);
    return;
  }
  const size_t inner = count[dims - 1], step = stride[dims - 1];
  size_t begin = offset % run, i = offset / run % inner, row = offset / run / inner;
  for (; length; i = 0, row++) {
    uint8_t* first = at;
    size_t left = row;
    for (int d = dims - 2; d >= 0; left /= count[d], d--) first += left % count[d] * stride[d];
    for (; length && i < inner; i++, begin = 0) {
      const size_t n = std::min(run - begin, length);
      move(first + i * step + begin, n);
      length -= n;
    }
  }
}

void Extent::read(size_t offset, size_t length, uint8_t* to, Handover::Copy copy) const {
  each_run(offset, length, [&](const uint8_t* bytes, size_t n) { copy(to, bytes, n), to += n; });
}

void Extent::write(size_t offset, size_t length, const uint8_t* from) const {
  each_run(offset, length, [&](uint8_t* bytes, size_t n) { std::memcpy(bytes, from, n), from += n; });
}

Messages::Messages(uint8_t* base, Layout layout, int rank, bool has_own_core, Fault& fault)
    : base_(base), layout_(layout), rank_(rank), size_(static_cast<int>(layout.size)), has_own_core_(has_own_core),
      fault_(fault), controls_(reinterpret_cast<Control*>(base + layout.control())), outgoing_(size_), arriving_(size_),
      aside_(size_), written_(size_), read_(size_), listens_(size_) {}

Cell& Messages::cell_of(int src, int dst, uint64_t number) {
  return reinterpret_cast<Cell*>(base_ + layout_.ring(src, dst) + sizeof(Ring))[number % kCells];
}

uint8_t* Messages::bytes_of(int src, int dst, uint64_t number) {
  return base_ + layout_.ring(src, dst) + kPage + kShift + number % kCells * layout_.cell_bytes();
}

TransferRef Messages::post_send(int dst, int64_t tag, const Extent& x, int64_t dtype) {
  auto transfer = std::make_shared<Transfer>(dst, tag, x, dtype);
  std::lock_guard<std::mutex> held(lock_);
  under_way_++;
  outgoing_[dst].push_back(transfer);
  return transfer;
}

TransferRef Messages::post_recv(int src, int64_t tag, const Extent& x, int64_t dtype) {
  auto transfer = std::make_shared<Transfer>(src, tag, x, dtype);
  std::lock_guard<std::mutex> held(lock_);
  for (int r = 0; r < size_; r++)
    if (r != rank_ && (src < 0 || r == src)) listens_[r] = true;
  under_way_++;
  if (!take_aside(transfer)) expected_.push_back(transfer);
  return transfer;
}

bool Messages::progress() {
  if (!under_way()) return false;
  std::unique_lock<std::mutex> held(lock_, std::try_to_lock);
  if (!held) return false;
  bool moved = false;
  for (int r = 0; r < size_; r++) moved |= !outgoing_[r].empty() && push(r);
  for (int r = 0; r < size_; r++) moved |= listens_[r] && (!expected_.empty() || arriving_[r].active) && pull(r);
  if (moved && waiters_.load()) ring(bell());  // another thread may sleep until what has moved here is done
  return moved;
}

Status Messages::wait(const std::vector<TransferRef>& transfers, const Look& look, double look_s) {
  const auto done = [&] {
    for (const auto& t : transfers)
      if (!t->done.load(std::memory_order_acquire)) return false;
    return true;
  };
  waiters_++;
  Status status = kOk;
  Patience patience(has_own_core_);
  patience.look_s = look_s;
  // As long as something moves there is no reason to sleep, however long it takes.
  while (status == kOk && !done()) {
    bool moved = false;
    status = patience.wait(
        bell(), [&] { return (moved = progress()) || done(); },
        [&] {
          std::vector<int> missing;
          for (int r = 0; r < size_; r++)
            for (const auto& t : transfers)
              if (r != rank_ && !t->done && (t->peer < 0 || t->peer == r)) {
                missing.push_back(r);
                break;
              }
          return missing;
        },
        [] { return false; }, look);
  }
  waited_ns += patience.waited_ns.load();
  waiters_--;
  if (status != kOk) forget(transfers);
  return status;
}

// Whoever has given up waiting may free the memory: nothing is read from there or written to it again.
void Messages::forget(const std::vector<TransferRef>& transfers) {
  std::lock_guard<std::mutex> held(lock_);
  for (const auto& t : transfers) {
    if (t->done) continue;
    under_way_--;
    expected_.remove(t);
    for (auto& queue : outgoing_) queue.erase(std::remove(queue.begin(), queue.end(), t), queue.end());
    for (auto& arriving : arriving_)
      if (arriving.transfer == t) arriving.transfer.reset();
  }
}

bool Messages::overflows() {
  std::lock_guard<std::mutex> held(lock_);
  size_t cells = 0;
  for (int r = 0; r < size_; r++)
    if (!outgoing_[r].empty() || arriving_[r].active) return true;
  for (const auto& t : expected_) cells += (t->extent.nbytes + layout_.cell_bytes() - 1) / layout_.cell_bytes();
  return cells > kCells;
}

bool Messages::push(int dst) {
  Ring& ring_to = ring_of(rank_, dst);
  auto& queue = outgoing_[dst];
  bool moved = false;
  while (!queue.empty() && written_[dst] - ring_to.read.load(std::memory_order_acquire) < kCells) {
    Transfer& t = *queue.front();
    Cell& cell = cell_of(rank_, dst, written_[dst]);
    const size_t nbytes = t.extent.nbytes, length = std::min(layout_.cell_bytes(), nbytes - t.moved);
    cell.tag = t.tag, cell.nbytes = nbytes, cell.offset = t.moved, cell.length = length, cell.dtype = t.dtype;
    fault_.step();
    uint8_t* bytes = bytes_of(rank_, dst, written_[dst]);
    if (length) hand_over(length, [&](Handover::Copy copy) { t.extent.read(t.moved, length, bytes, copy); });
    t.moved += length;
    ring_to.written.store(++written_[dst], std::memory_order_release);
    ring(controls_[dst].bell);
    moved = true;
    if (t.moved == nbytes) {
      finish(t);
      queue.pop_front();
    }
  }
  return moved;
}

bool Messages::pull(int src) {
  Ring& ring_from = ring_of(src, rank_);
  Arriving& arriving = arriving_[src];
  bool moved = false;
  while (ring_from.written.load(std::memory_order_acquire) > read_[src]) {
    Cell& cell = cell_of(src, rank_, read_[src]);
    if (!arriving.active) {
      TransferRef transfer = match(src, cell.tag);
      if (!transfer && !is_wanted(src)) break;  // no receive is posted for this rank: leave it in the ring
      arriving = Arriving{};
      arriving.active = true;
      arriving.tag = cell.tag, arriving.nbytes = cell.nbytes, arriving.dtype = cell.dtype;
      arriving.is_aside = !transfer;
      if (!transfer) arriving.aside.resize(cell.nbytes);
      if (transfer) {
        transfer->peer = src;
        if (transfer->extent.nbytes != cell.nbytes || transfer->dtype != cell.dtype)
          refuse(*transfer, cell.nbytes, cell.dtype);
        else
          arriving.transfer = transfer;
      }
    }
    take(src, cell);
    ring_from.read.store(++read_[src], std::memory_order_release);
    ring(controls_[src].bell);
    moved = true;
  }
  return moved;
}

void Messages::take(int src, Cell& cell) {
  Arriving& arriving = arriving_[src];
  const uint8_t* bytes = bytes_of(src, rank_, read_[src]);
  fault_.step();
  if (!cell.length) {}  // an empty message has no memory
  else if (arriving.transfer) arriving.transfer->extent.write(cell.offset, cell.length, bytes);
  else if (arriving.is_aside) std::memcpy(arriving.aside.data() + cell.offset, bytes, cell.length);
  arriving.moved += cell.length;
  if (arriving.moved < arriving.nbytes) return;
  arriving.active = false;
  if (arriving.transfer) {
    finish(*arriving.transfer);
    arriving.transfer.reset();
  } else if (arriving.is_aside) {
    // A receive may have been posted while the message was being put aside.
    if (TransferRef transfer = match(src, arriving.tag)) deliver(arriving, transfer, src);
    else aside_[src].push_back(std::move(arriving));
  }
}

// The oldest receive that takes a message of this tag from this rank.
TransferRef Messages::match(int src, int64_t tag) {
  for (auto it = expected_.begin(); it != expected_.end(); ++it)
    if ((*it)->tag == tag && ((*it)->peer < 0 || (*it)->peer == src)) {
      TransferRef found = *it;
      expected_.erase(it);
      return found;
    }
  return nullptr;
}

bool Messages::is_wanted(int src) const {
  for (const auto& t : expected_)
    if (t->peer < 0 || t->peer == src) return true;
  return false;
}

bool Messages::take_aside(const TransferRef& transfer) {
  for (int src = 0; src < size_; src++) {
    if (transfer->peer >= 0 && transfer->peer != src) continue;
    for (auto it = aside_[src].begin(); it != aside_[src].end(); ++it)
      if (it->tag == transfer->tag) {
        deliver(*it, transfer, src);
        aside_[src].erase(it);
        return true;
      }
  }
  return false;
}

void Messages::deliver(Arriving& message, const TransferRef& transfer, int src) {
  transfer->peer = src;
  if (message.nbytes != transfer->extent.nbytes || message.dtype != transfer->dtype) {
    refuse(*transfer, message.nbytes, message.dtype);
    return;
  }
  if (message.nbytes) transfer->extent.write(0, message.nbytes, message.aside.data());
  finish(*transfer);
}

void Messages::refuse(Transfer& transfer, size_t nbytes, int64_t dtype) {
  transfer.refused = true;
  transfer.found_nbytes = nbytes;
  transfer.found_dtype = dtype;
  finish(transfer);
}

void Messages::finish(Transfer& transfer) {
  under_way_--;
  transfer.done.store(true, std::memory_order_release);
}

}  // namespace unisono
