#include <numeric>

#include "group.hpp"

namespace unisono {
namespace {

constexpr size_t kReduceBlock = 32 * 1024;  // stays in a near cache between reduction and copy
constexpr int kOffsetBits = 40;
constexpr uint64_t kOffsetMask = (uint64_t{1} << kOffsetBits) - 1;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
  return hash * 0xFF51AFD7ED558CCDull;
}
uint64_t digest_of(uint64_t alike, const std::vector<size_t>& sizes) {
  for (size_t n : sizes) alike = mix(alike, n);
  return alike;
}
size_t rounds(size_t nbytes, size_t at_a_time) { return std::max<size_t>(1, (nbytes + at_a_time - 1) / at_a_time); }

// Where the piece of a rank begins: pieces of about equal length, at whole cache lines.
size_t cut(size_t nbytes, int parts, int i) {
  const size_t each = (nbytes + parts * kLine - 1) / (parts * kLine) * kLine;
  return std::min(nbytes, i * each);
}

}  // namespace

uint64_t code_of(Verb verb, int dtype, int op, int root) {
  return static_cast<uint64_t>(verb) | static_cast<uint64_t>(dtype + 1) << 8 | static_cast<uint64_t>(op + 1) << 16 |
         static_cast<uint64_t>(root + 1) << 24;
}

Group::Group(uint8_t* base, Layout layout, int rank, bool has_own_core)
    : layout(layout), rank(rank), size(static_cast<int>(layout.size)), patience(has_own_core),
      messages(base, layout, rank, has_own_core, fault), base_(base),
      controls_(reinterpret_cast<Control*>(base + layout.control())), heads_(layout.size),
      table_(2 * layout.size * layout.size), parts_(layout.size) {
  control(rank).state.store(kAlive, std::memory_order_release);
}

// -- meetings -------------------------------------------------------------------------------------

Status Group::sync() {
  fault.step();
  met_++;
  Bell& own = controls_[rank].met;
  // A rank that sees this value sees all that this rank wrote before it; one order with the sleepers.
  own.value.store(met_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst)) wake(own);
  const auto has_come = [this](int r) {
    return static_cast<int32_t>(controls_[r].met.value.load(std::memory_order_acquire) - met_) >= 0;
  };
  for (int i = 1; i < size; i++) {
    const int peer = rank + i < size ? rank + i : rank + i - size;
    if (has_come(peer)) continue;
    const Status status = patience.wait(
        controls_[peer].met, [&] { return has_come(peer); },
        [&] {
          std::vector<int> missing;
          for (int r = 0; r < size; r++)
            if (!has_come(r)) missing.push_back(r);
          return missing;
        },
        [this] { return messages.attend(); }, look);
    if (status != kOk) return status;
  }
  return kOk;
}

Status Group::meet(int turn, Header own, bool same_size) {
  auto* heads = reinterpret_cast<Header*>(base_ + layout.headers()) + turn * size;
  heads[rank] = own;
  if (const Status status = sync(); status != kOk) return status;
  bool fits = true;
  for (int r = 0; r < size; r++) {
    heads_[r] = heads[r];
    fits &= heads[r].code == own.code && heads[r].digest == own.digest && (!same_size || heads[r].nbytes == own.nbytes);
  }
  return fits ? kOk : kMismatch;
}

Status Group::barrier() { return meet(next_turn(), {code_of(kBarrier, -1, -1, -1), 0, 0, 0}, true); }

Status Group::agree(Verb verb, int dtype, uint64_t nbytes, uint64_t digest) {
  return meet(next_turn(), {code_of(verb, dtype, -1, -1), nbytes, digest, 0}, true);
}

uint64_t* Group::table_row(int turn, int r) {
  return reinterpret_cast<uint64_t*>(base_ + layout.tables()) + (turn * size + r) * 2 * size;
}

void Group::read_table(int turn) { std::memcpy(table_.data(), table_row(turn, 0), table_.size() * sizeof(uint64_t)); }

// -- shared buffers -------------------------------------------------------------------------------

uint64_t Group::add_buffer(uint8_t* first, size_t stride, size_t nbytes) {
  std::lock_guard<std::mutex> held(buffers_lock_);
  buffers_.push_back({++buffers_made_, first, stride, nbytes});
  return buffers_made_;
}

void Group::drop_buffer(uint64_t number) {
  std::lock_guard<std::mutex> held(buffers_lock_);
  for (size_t i = 0; i < buffers_.size(); i++)
    if (buffers_[i].number == number) buffers_.erase(buffers_.begin() + i--);
}

// A word that says where in which buffer the bytes lie, 0 if in none.
uint64_t Group::place(const uint8_t* x, size_t nbytes) const {
  std::lock_guard<std::mutex> held(buffers_lock_);
  for (const Buffer& b : buffers_) {
    const uint8_t* own = b.first + rank * b.stride;
    if (nbytes && own <= x && x + nbytes <= own + b.nbytes) return (b.number << kOffsetBits) + (x - own) + 1;
  }
  return 0;
}

// The place of blocks that follow each other in one buffer.
uint64_t Group::row_place(const Blocks& blocks) const {
  const uint8_t *first = nullptr, *end = nullptr;
  for (size_t i = 0; i < blocks.at.size(); i++) {
    if (!blocks.nbytes[i]) continue;
    if (!first) first = end = blocks.at[i];
    if (blocks.at[i] != end) return 0;
    end += blocks.nbytes[i];
  }
  return first ? place(first, end - first) : 0;
}

// To be asked with the lock held; null if this rank's tensor is gone.
const Buffer* Group::buffer_of(uint64_t place) const {
  for (const Buffer& b : buffers_)
    if (place && b.number == (place - 1) >> kOffsetBits) return &b;
  return nullptr;
}

const uint8_t* Group::at_place(int r, uint64_t place) const {
  const Buffer* b = buffer_of(place);
  return b->first + r * b->stride + ((place - 1) & kOffsetMask);
}

bool Group::any_place() const {
  for (const Header& head : heads_)
    if (head.place) return true;
  return false;
}

// The meeting after which no rank reads from buffers any more. `again` if a rank had to do without one,
// because its own tensor there is gone: then the bytes go through slots.
Status Group::leave_buffers(bool lacks, bool& again) {
  if (lacks) controls_[rank].lacks.store(met_ + 1, std::memory_order_relaxed);
  const Status status = sync();
  for (int r = 0; r < size; r++) again |= controls_[r].lacks.load(std::memory_order_relaxed) == met_;
  for (Header& head : heads_) head.place = 0;
  return status;
}

// -- reductions -----------------------------------------------------------------------------------

Status Group::all_reduce(uint8_t* x, size_t elements, int dtype, int op, int root) {
  const Reduce reduce = reduction(dtype, op);
  const size_t nbytes = elements * element_bytes(dtype);
  const bool wanted = root < 0 || root == rank;
  Header head{code_of(root < 0 ? kAllReduce : kReduce, dtype, op, root), nbytes, 0, 0};
  const int turn = next_turn();
  if (nbytes <= std::min(small_bytes, layout.slot_bytes)) {
    hand_over(slot(turn, rank), x, nbytes);
    if (const Status status = meet(turn, head, true); status != kOk) return status;
    if (!wanted || !nbytes) return kOk;
    auto& parts = parts_;
    for (int r = 0; r < size; r++) parts[r] = slot(turn, r);
    reduce(x, parts.data(), size, elements);
    return kOk;
  }
  head.place = place(x, nbytes);
  const size_t first = std::min(nbytes, layout.slot_bytes / 2);
  if (!head.place) {
    const size_t low = cut(first, size, rank), high = cut(first, size, rank + 1);
    hand_over(slot(turn, rank), x, low);
    hand_over(slot(turn, rank) + high, x + high, first - high);
  }
  if (const Status status = meet(turn, head, true); status != kOk) return status;
  if (!any_place()) return large_all_reduce(x, nbytes, dtype, reduce, turn, true, wanted);
  bool same = true;
  for (const Header& h : heads_) same &= h.place == heads_[0].place;
  if (same) {  // this rank's own tensor keeps the buffer
    Buffer buffer;
    {
      std::lock_guard<std::mutex> held(buffers_lock_);
      buffer = *buffer_of(head.place);
    }
    return reduce_in_place((head.place - 1) & kOffsetMask, buffer, nbytes, dtype, reduce, root);
  }
  return large_all_reduce(x, nbytes, dtype, reduce, next_turn(), false, wanted);
}

// Half a slot at a time, the halves of both slots one after the other. Each rank reduces its piece of
// every chunk and leaves it in its own slot; the chunk after it is filled in before the ranks meet, so
// that a chunk costs one meeting. A half is filled again two meetings after it was read.
Status Group::large_all_reduce(uint8_t* x, size_t nbytes, int dtype, Reduce reduce, int turn, bool filled, bool wanted) {
  const size_t chunk = layout.slot_bytes / 2, each = element_bytes(dtype);
  const size_t chunks = (nbytes + chunk - 1) / chunk;
  const auto half = [&](size_t k, int r) { return slot((turn + k / 2) & 1, r) + (k & 1) * chunk; };
  const auto length = [&](size_t k) { return std::min(chunk, nbytes - k * chunk); };
  const auto fill = [&](size_t k) {
    const size_t n = length(k), low = cut(n, size, rank), high = cut(n, size, rank + 1);
    hand_over(half(k, rank), x + k * chunk, low);
    hand_over(half(k, rank) + high, x + k * chunk + high, n - high);
  };
  if (!filled) {
    fill(0);
    if (const Status status = sync(); status != kOk) return status;
  }
  std::vector<uint8_t> scratch(wanted ? 0 : std::min(kReduceBlock, chunk));
  auto& parts = parts_;
  for (size_t k = 0; k < chunks; k++) {
    const size_t n = length(k), low = cut(n, size, rank), high = cut(n, size, rank + 1);
    for (size_t at = low; at < high; at += kReduceBlock) {
      const size_t m = std::min(kReduceBlock, high - at);
      uint8_t* own = x + k * chunk + at;
      for (int r = 0; r < size; r++) parts[r] = r == rank ? own : half(k, r) + at;
      uint8_t* result = wanted ? own : scratch.data();  // elsewhere than on the root `x` stays as it is
      reduce(result, parts.data(), size, m / each);
      hand_over(half(k, rank) + at, result, m);
    }
    if (k + 1 < chunks) fill(k + 1);
    if (const Status status = sync(); status != kOk) return status;
    for (int r = 0; wanted && r < size; r++) {
      const size_t l = cut(n, size, r), h = cut(n, size, r + 1);
      if (r != rank) copy(x + k * chunk + l, half(k, r) + l, h - l);
    }
  }
  turn_ = (turn + (chunks - 1) / 2) & 1;  // the slot that others may still read
  return kOk;
}

// Tensors at one place of a buffer: each rank reduces its piece of all of them where they lie.
Status Group::reduce_in_place(size_t offset, const Buffer& buffer, size_t nbytes, int dtype, Reduce reduce, int root) {
  std::vector<uint8_t> scratch(root < 0 ? 0 : std::min(kReduceBlock, nbytes));
  auto& parts = parts_;
  const size_t high = cut(nbytes, size, rank + 1);
  for (size_t at = cut(nbytes, size, rank); at < high; at += kReduceBlock) {
    const size_t m = std::min(kReduceBlock, high - at);
    const auto region = [&](int r) { return buffer.first + r * buffer.stride + offset + at; };
    for (int r = 0; r < size; r++) parts[r] = region(r);
    uint8_t* result = root < 0 ? region(rank) : scratch.data();
    reduce(result, parts.data(), size, m / element_bytes(dtype));
    if (root >= 0) copy(region(root), result, m);
    else
      for (int r = 0; r < size; r++)
        if (r != rank) hand_over(region(r), result, m, to_region_);
  }
  return sync();
}

Status Group::reduce_scatter(uint8_t* out, const Blocks& ins, int dtype, int op, int64_t alike) {
  const Reduce reduce = reduction(dtype, op);
  const size_t each = element_bytes(dtype), own = ins.nbytes[rank];
  const size_t before = std::accumulate(ins.nbytes.begin(), ins.nbytes.begin() + rank, size_t{0});
  const size_t total = std::accumulate(ins.nbytes.begin(), ins.nbytes.end(), size_t{0});
  Header head{code_of(kReduceScatter, dtype, op, -1), total, digest_of(alike, ins.nbytes), 0};
  int turn = next_turn();
  auto& parts = parts_;
  if (total <= std::min(small_bytes, layout.slot_bytes)) {
    uint8_t* to = slot(turn, rank);
    for (int r = 0; r < size; to += ins.nbytes[r], r++) copy(to, ins.at[r], ins.nbytes[r]);
    if (const Status status = meet(turn, head, true); status != kOk) return status;
    for (int r = 0; r < size; r++) parts[r] = slot(turn, r) + before;
    if (own) reduce(out, parts.data(), size, own / each);
    return kOk;
  }
  head.place = row_place(ins);
  if (!head.place) fill_shares(turn, ins, 0);
  if (const Status status = meet(turn, head, true); status != kOk) return status;
  const size_t largest = *std::max_element(ins.nbytes.begin(), ins.nbytes.end());
  bool done = false;
  while (true) {
    std::unique_lock<std::mutex> mapped(buffers_lock_, std::defer_lock);
    bool all_placed = true, lacks = false;
    const bool closes = any_place();
    for (const Header& h : heads_) all_placed &= h.place != 0;
    const size_t share = all_placed ? std::max<size_t>(largest, 1) : share_bytes();
    for (size_t k = 0; k < rounds(largest, share); k++) {
      const size_t start = k * share, m = own > start ? std::min(share, own - start) : 0;
      if (k) {
        turn = next_turn();
        if (!heads_[rank].place) fill_shares(turn, ins, start);
        if (const Status status = sync(); status != kOk) return status;
      }
      if (closes) mapped.lock();
      for (int r = 0; m && r < size; r++) lacks |= r != rank && lacks_buffer(r);
      for (size_t at = 0; at < m && !done && !lacks; at += kReduceBlock) {
        for (int r = 0; r < size; r++)
          parts[r] = r == rank         ? ins.at[rank] + start + at
                     : heads_[r].place ? at_place(r, heads_[r].place) + before + start + at
                                       : slot(turn, r) + place_in_slot(r, rank) * share + at;
        reduce(out + start + at, parts.data(), size, std::min(kReduceBlock, m - at) / each);
      }
      if (closes) mapped.unlock();
    }
    if (!closes) return kOk;
    done |= !lacks;
    bool again = false;
    if (const Status status = leave_buffers(lacks, again); status != kOk || !again) return status;
    turn = next_turn();
    fill_shares(turn, ins, 0);
    if (const Status status = sync(); status != kOk) return status;
  }
}

// -- moves: one block per rank, read by others ----------------------------------------------------

// `sizes[r]`: what rank r brings, 0 for those who bring nothing. `outs` null: this rank reads nothing.
Status Group::share(int turn, const uint8_t* x, size_t nbytes, const std::vector<size_t>& sizes,
                    uint8_t* const* outs) {
  const size_t room = layout.slot_bytes;
  const bool closes = any_place();
  bool lacks = false;
  if (closes && outs) {
    std::lock_guard<std::mutex> mapped(buffers_lock_);
    for (int r = 0; r < size; r++) {
      if (r == rank || !outs[r] || !heads_[r].place) continue;
      if (lacks_buffer(r)) lacks = true;
      else copy(outs[r], at_place(r, heads_[r].place), sizes[r]);
    }
  }
  size_t largest = 0;
  for (int r = 0; r < size; r++)
    if (!heads_[r].place) largest = std::max(largest, sizes[r]);
  for (size_t k = 0; k < rounds(largest, room); k++) {
    const size_t start = k * room;
    if (k) {
      turn = next_turn();
      if (nbytes > start && !heads_[rank].place) hand_over(slot(turn, rank), x + start, std::min(room, nbytes - start));
      if (const Status status = sync(); status != kOk) return status;
    }
    for (int r = 0; outs && r < size; r++)
      if (r != rank && outs[r] && !heads_[r].place && sizes[r] > start)
        copy(outs[r] + start, slot(turn, r), std::min(room, sizes[r] - start));
  }
  if (!closes) return kOk;
  bool again = false;
  if (const Status status = leave_buffers(lacks, again); status != kOk || !again) return status;
  turn = next_turn();
  hand_over(slot(turn, rank), x, std::min(nbytes, room));
  if (const Status status = sync(); status != kOk) return status;
  return share(turn, x, nbytes, sizes, outs);
}

Status Group::broadcast(uint8_t* x, size_t nbytes, int dtype, int root) {
  const bool brings = rank == root;
  const int turn = next_turn();
  Header head{code_of(kBroadcast, dtype, -1, root), nbytes, 0, brings ? place(x, nbytes) : 0};
  if (brings && !head.place) hand_over(slot(turn, rank), x, std::min(nbytes, layout.slot_bytes));
  if (const Status status = meet(turn, head, true); status != kOk) return status;
  std::vector<size_t> sizes(size);
  std::vector<uint8_t*> outs(size);
  sizes[root] = nbytes;
  outs[root] = x;
  return share(turn, x, brings ? nbytes : 0, sizes, brings ? nullptr : outs.data());
}

Status Group::gather_on_all(Verb verb, const Blocks& outs, const uint8_t* x, int dtype, int64_t alike) {
  const size_t nbytes = outs.nbytes[rank];
  const int turn = next_turn();
  const Header head{code_of(verb, dtype, -1, -1), nbytes, digest_of(alike, outs.nbytes), place(x, nbytes)};
  if (!head.place) hand_over(slot(turn, rank), x, std::min(nbytes, layout.slot_bytes));
  if (const Status status = meet(turn, head, false); status != kOk) return status;
  copy(outs.at[rank], x, nbytes);
  return share(turn, x, nbytes, outs.nbytes, outs.at.data());
}

Status Group::gather(const Blocks& outs, const uint8_t* x, size_t nbytes, int dtype, int root) {
  const bool brings = rank != root;
  const int turn = next_turn();
  const Header head{code_of(kGather, dtype, -1, root), nbytes, 0, brings ? place(x, nbytes) : 0};
  if (brings && !head.place) hand_over(slot(turn, rank), x, std::min(nbytes, layout.slot_bytes));
  if (!brings) std::copy(outs.nbytes.begin(), outs.nbytes.end(), table_row(turn, rank) + size);
  if (const Status status = meet(turn, head, false); status != kOk) return status;
  read_table(turn);
  std::vector<size_t> sizes(size);
  for (int r = 0; r < size; r++) {
    if (table_[root * 2 * size + size + r] != heads_[r].nbytes) return kSizes;
    sizes[r] = r == root ? 0 : heads_[r].nbytes;
  }
  if (!brings) copy(outs.at[rank], x, nbytes);
  return share(turn, x, brings ? nbytes : 0, sizes, brings ? nullptr : outs.at.data());
}

Status Group::texts(const std::vector<uint8_t>& own, std::vector<std::vector<uint8_t>>& all) {
  const int turn = next_turn();
  const size_t nbytes = std::min(own.size(), layout.slot_bytes);
  hand_over(slot(turn, rank), own.data(), nbytes);
  if (const Status status = meet(turn, {code_of(kTexts, -1, -1, -1), nbytes, 0, 0}, false); status != kOk) return status;
  for (int r = 0; r < size; r++) all.emplace_back(slot(turn, r), slot(turn, r) + heads_[r].nbytes);
  return kOk;
}

// -- moves: one block for each other rank ---------------------------------------------------------

void Group::fill_shares(int turn, const Blocks& ins, size_t start) {
  const size_t share = share_bytes();
  for (int r = 0; r < static_cast<int>(ins.at.size()); r++)
    if (r != rank && ins.nbytes[r] > start)
      hand_over(slot(turn, rank) + place_in_slot(rank, r) * share, ins.at[r] + start, std::min(share, ins.nbytes[r] - start));
}

// Every rank knows from the table what each sends to each.
Status Group::deal(int turn, const Blocks& ins, const Blocks& outs) {
  const size_t share = share_bytes();
  const bool closes = any_place();
  const auto sent = [this](int src) { return table_.data() + src * 2 * size; };
  bool lacks = false;
  if (closes) {
    std::lock_guard<std::mutex> mapped(buffers_lock_);
    for (int r = 0; r < static_cast<int>(outs.at.size()); r++) {
      if (r == rank || !outs.nbytes[r] || !heads_[r].place) continue;
      if (lacks_buffer(r)) lacks = true;
      else
        copy(outs.at[r], at_place(r, heads_[r].place) + std::accumulate(sent(r), sent(r) + rank, uint64_t{0}),
             outs.nbytes[r]);
    }
  }
  size_t largest = 0;
  for (int src = 0; src < size; src++)
    for (int dst = 0; dst < size; dst++)
      if (src != dst && !heads_[src].place) largest = std::max<size_t>(largest, sent(src)[dst]);
  for (size_t k = 0; k < rounds(largest, share); k++) {
    const size_t start = k * share;
    if (k) {
      turn = next_turn();
      if (!heads_[rank].place) fill_shares(turn, ins, start);
      if (const Status status = sync(); status != kOk) return status;
    }
    for (int r = 0; r < static_cast<int>(outs.at.size()); r++)
      if (r != rank && !heads_[r].place && outs.nbytes[r] > start)
        copy(outs.at[r] + start, slot(turn, r) + place_in_slot(r, rank) * share, std::min(share, outs.nbytes[r] - start));
  }
  if (!closes) return kOk;
  bool again = false;
  if (const Status status = leave_buffers(lacks, again); status != kOk || !again) return status;
  turn = next_turn();
  fill_shares(turn, ins, 0);
  if (const Status status = sync(); status != kOk) return status;
  return deal(turn, ins, outs);
}

Status Group::all_to_all(const Blocks& outs, const Blocks& ins, int dtype) {
  const int turn = next_turn();
  const size_t total = std::accumulate(ins.nbytes.begin(), ins.nbytes.end(), size_t{0});
  const Header head{code_of(kAllToAll, dtype, -1, -1), total, 0, row_place(ins)};
  uint64_t* row = table_row(turn, rank);
  std::copy(ins.nbytes.begin(), ins.nbytes.end(), row);
  std::copy(outs.nbytes.begin(), outs.nbytes.end(), row + size);
  if (!head.place) fill_shares(turn, ins, 0);
  if (const Status status = meet(turn, head, false); status != kOk) return status;
  read_table(turn);
  for (int src = 0; src < size; src++)
    for (int dst = 0; dst < size; dst++)
      if (table_[src * 2 * size + dst] != table_[dst * 2 * size + size + src]) return kSizes;
  copy(outs.at[rank], ins.at[rank], ins.nbytes[rank]);
  return deal(turn, ins, outs);
}

Status Group::scatter(uint8_t* out, size_t nbytes, const Blocks& ins, int dtype, int root) {
  const int turn = next_turn();
  const Header head{code_of(kScatter, dtype, -1, root), nbytes, 0, rank == root ? row_place(ins) : 0};
  if (rank == root) {
    std::copy(ins.nbytes.begin(), ins.nbytes.end(), table_row(turn, rank));
    if (!head.place) fill_shares(turn, ins, 0);
  }
  if (const Status status = meet(turn, head, false); status != kOk) return status;
  read_table(turn);
  for (int r = 0; r < size; r++) {
    if (table_[root * 2 * size + r] != heads_[r].nbytes) return kSizes;
    if (r != root) std::fill_n(table_.begin() + r * 2 * size, size, 0);  // others send nothing
  }
  Blocks outs;
  if (rank == root) {
    copy(out, ins.at[rank], nbytes);
  } else {
    outs.at.assign(size, nullptr);
    outs.nbytes.assign(size, 0);
    outs.at[root] = out;
    outs.nbytes[root] = nbytes;
  }
  return deal(turn, rank == root ? ins : Blocks{}, outs);
}

// -- the end --------------------------------------------------------------------------------------

void Group::fail(State state, int culprit, const char* text, size_t length) {
  std::lock_guard<std::mutex> held(fail_lock_);
  Control& own = control(rank);
  if (own.state.load() >= kFailed) return;  // the first cause stays
  length = std::min(length, kTextBytes);
  std::memcpy(own.text, text, length);
  own.text_bytes.store(static_cast<uint32_t>(length), std::memory_order_relaxed);
  own.culprit.store(culprit, std::memory_order_relaxed);
  own.state.store(state, std::memory_order_release);
  wake_all();
}

void Group::close() {
  uint32_t alive = kAlive;
  control(rank).state.compare_exchange_strong(alive, kClosed);
  wake_all();
}

void Group::wake_all() {
  wake(control(rank).met);
  for (int r = 0; r < size; r++) wake(control(r).bell);
}

}  // namespace unisono
