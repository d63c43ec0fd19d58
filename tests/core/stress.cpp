// Collectives, started calls, messages and shared buffers of the core, all at once, without Python:
// ranks are threads over one piece of memory, so that the sanitizers of a compiler see every access.
//
//   stress <ranks> <steps> <seed>
//
// Every rank makes the same random calls, some at once and some started, and compares all results
// with what they must be; a second thread of each rank exchanges messages meanwhile, a third one
// looks at the group as others do. Ends with 0 and a line of figures, or with what went wrong.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "started.hpp"

using namespace unisono;

namespace {

constexpr size_t kSlotBytes = 4096;
constexpr size_t kRegionElements = 40'000;
constexpr int kEpoch = 40;       // steps for which a buffer lives
constexpr int kWithoutFrom = 30;  // from this step of an epoch on, one rank does without it
constexpr double kPatience_s = 60;

std::atomic<bool> failed{false};
std::atomic<long> checks{0};

void fail(const char* what, int rank, long step) {
  if (!failed.exchange(true)) std::fprintf(stderr, "rank %d, step %ld: %s\n", rank, step, what);
}

bool patient(const std::vector<int>&, double waited_s) { return waited_s < kPatience_s && !failed; }

int32_t value(int rank, long step, size_t i) {
  return static_cast<int32_t>((rank + 1) * 7919 + step * 104729 + static_cast<long>(i) * 31);
}
void fill(int32_t* x, size_t n, int rank, long step, size_t from = 0) {
  for (size_t i = 0; i < n; i++) x[i] = value(rank, step, from + i);
}
bool is(const int32_t* x, size_t n, int rank, long step, size_t from = 0) {
  for (size_t i = 0; i < n; i++)
    if (x[i] != value(rank, step, from + i)) return false;
  return true;
}
bool is_sum(const int32_t* x, size_t n, int size, long step, size_t from = 0) {
  for (size_t i = 0; i < n; i++) {
    uint32_t sum = 0;
    for (int r = 0; r < size; r++) sum += static_cast<uint32_t>(value(r, step, from + i));
    if (static_cast<uint32_t>(x[i]) != sum) return false;
  }
  return true;
}
uint8_t* raw(int32_t* x) { return reinterpret_cast<uint8_t*>(x); }

struct World {
  int size;
  long steps;
  unsigned seed;
  uint8_t* memory;
  std::vector<std::vector<int32_t>> buffers;  // one for each epoch, a region for each rank
};

// A call under way, with all it reads and writes.
struct Pending {
  StartedRef started;
  std::shared_ptr<Status> status = std::make_shared<Status>(kOk);
  std::vector<std::vector<int32_t>> memory;
  std::function<bool()> is_right;
  long step;
};

class Rank {
 public:
  Rank(World& world, int rank)
      : world_(world), rank_(rank), size_(world.size),
        group_(world.memory, Layout{static_cast<size_t>(world.size), kSlotBytes}, rank, rank % 2 == 0), order_(group_),
        choices_(world.seed), own_choices_(world.seed * 31 + rank) {
    group_.look = patient;
    group_.small_bytes = 2048;
    group_.set_way(static_cast<Handover::Way>((rank + world.seed) % 3));
  }

  void run() {
    std::thread talking([this] { talk(); });
    std::atomic<bool> ends{false};
    std::thread observing([this, &ends] {
      int64_t waited = 0;
      while (!ends) {
        for (int r = 0; r < size_; r++) waited += group_.control(r).state.load() + group_.patience.waited_ns.load();
        group_.drop_buffer(1'000'000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      observed_ = waited;
    });
    for (long step = 0; step < world_.steps && !failed; step++) take_step(step);
    drain();
    talking.join();
    ends = true;
    observing.join();
    group_.close();
    order_.close();
  }

 private:
  void take_step(long step) {
    const long epoch = step / kEpoch;
    if (step % kEpoch == 0) {
      drain();
      if (number_) group_.drop_buffer(number_);
      auto& all = world_.buffers[epoch];
      number_ = group_.add_buffer(raw(all.data()), kRegionElements * 4, kRegionElements * 4);
      region_ = all.data() + rank_ * kRegionElements;
    }
    const unsigned kind = choices_() % 9;
    const size_t sizes[] = {0, 1, 17, 500, 1024, 1500, 4000, 9000};
    const size_t n = sizes[choices_() % 8];
    const int root = choices_() % size_;
    const unsigned placing = choices_() % 3;
    const bool late = step % kEpoch >= kWithoutFrom;
    if (late && rank_ == 0 && number_) {
      drain();
      group_.drop_buffer(number_);
      number_ = 0;
    }
    // In none, in all, or in those of even ranks; who has dropped the buffer has plain memory.
    const bool placed = number_ && (placing == 1 || (placing == 2 && rank_ % 2 == 0));
    if (placed) drain();
    Pending call;
    call.step = step;
    std::function<Status()> kernel = prepare(call, kind, n, root, placed ? region_ : nullptr);
    auto run = [kernel, status = call.status] { *status = kernel(); };
    if (own_choices_() % 3 == 0) {
      order_.perform(run);
    } else {
      call.started = order_.start(run);
      order_.then(*call.started, [] { checks++; });
    }
    pending_.push_back(std::move(call));
    if (placed || pending_.size() > 6 || own_choices_() % 4 == 0) drain();
  }

  // Lays out the tensors of a call; returns what makes it.
  std::function<Status()> prepare(Pending& call, unsigned kind, size_t n, int root, int32_t* at) {
    const long step = call.step;
    const int me = rank_, size = size_;
    Group& g = group_;
    const auto room = [&](size_t elements) {  // never empty, so that it has an address
      call.memory.emplace_back(elements + 1);
      return call.memory.back().data();
    };
    const auto length = [n, size](int r) { return r == 1 ? n : r == 2 ? size_t{0} : n / 3 + static_cast<size_t>(r % size); };
    const auto piece = [n](int src, int dst) { return (src + dst) % 3 == 2 ? size_t{0} : n / (1 + (src * 2 + dst) % 3); };
    switch (kind) {
      case 0:
        call.is_right = [] { return true; };
        return [&g] { return g.barrier(); };
      case 1: case 2: {
        int32_t* x = at ? at : room(n);
        const int only = kind == 1 ? -1 : root;
        fill(x, n, me, step);
        call.is_right = [=] { return only < 0 || only == me ? is_sum(x, n, size, step) : is(x, n, me, step); };
        return [=, &g] { return g.all_reduce(raw(x), n, kInt32, kSum, only); };
      }
      case 3: {
        int32_t* x = at ? at : room(n);
        fill(x, n, me, step);
        call.is_right = [=] { return is(x, n, root, step); };
        return [=, &g] { return g.broadcast(raw(x), n * 4, kInt32, root); };
      }
      case 4: case 5: {
        int32_t* x = at ? at : room(length(me));
        fill(x, length(me), me, step);
        Blocks outs;
        std::vector<int32_t*> rows;
        for (int r = 0; r < size; r++) {
          rows.push_back(room(length(r)));
          outs.at.push_back(raw(rows.back()));
          outs.nbytes.push_back(length(r) * 4);
        }
        const bool wanted = kind == 4 || root == me;
        call.is_right = [=] {
          for (int r = 0; wanted && r < size; r++)
            if (!is(rows[r], length(r), r, step)) return false;
          return true;
        };
        const size_t nbytes = length(me) * 4;
        if (kind == 4) return [=, &g] { return g.all_gather(outs, raw(x), kInt32, 0); };
        return [=, &g] { return g.gather(wanted ? outs : Blocks{}, raw(x), nbytes, kInt32, root); };
      }
      case 6: {
        Blocks ins;
        size_t total = 0, before = 0;
        for (int r = 0; r < size; r++) total += length(r), before += r < me ? length(r) : 0;
        int32_t* x = at && total < kRegionElements ? at : room(total);
        fill(x, total, me, step);
        for (int r = 0, from = 0; r < size; from += static_cast<int>(length(r)), r++) {
          ins.at.push_back(raw(x + from));
          ins.nbytes.push_back(length(r) * 4);
        }
        const size_t mine = length(me);
        int32_t* out = step % 2 ? room(mine) : x + before;
        call.is_right = [=] { return is_sum(out, mine, size, step, before); };
        return [=, &g] { return g.reduce_scatter(raw(out), ins, kInt32, kSum, 0); };
      }
      case 7: {
        Blocks ins, outs;
        size_t total = 0;
        for (int r = 0; r < size; r++) total += piece(me, r);
        int32_t* x = at && total < kRegionElements ? at : room(total);
        std::vector<int32_t*> rows;
        for (int r = 0, from = 0; r < size; from += static_cast<int>(piece(me, r)), r++) {
          fill(x + from, piece(me, r), me, step, r * 1000);
          ins.at.push_back(raw(x + from));
          ins.nbytes.push_back(piece(me, r) * 4);
          rows.push_back(room(piece(r, me)));
          outs.at.push_back(raw(rows.back()));
          outs.nbytes.push_back(piece(r, me) * 4);
        }
        call.is_right = [=] {
          for (int r = 0; r < size; r++)
            if (!is(rows[r], piece(r, me), r, step, me * 1000)) return false;
          return true;
        };
        return [=, &g] { return g.all_to_all(outs, ins, kInt32); };
      }
      default: {
        Blocks ins;
        int32_t* out = room(length(me));
        if (me == root) {
          size_t total = 0;
          for (int r = 0; r < size; r++) total += length(r);
          int32_t* x = at && total < kRegionElements ? at : room(total);
          for (int r = 0, from = 0; r < size; from += static_cast<int>(length(r)), r++) {
            fill(x + from, length(r), root, step, r * 1000);
            ins.at.push_back(raw(x + from));
            ins.nbytes.push_back(length(r) * 4);
          }
        }
        const size_t mine = length(me);
        call.is_right = [=] { return is(out, mine, root, step, me * 1000); };
        return [=, &g] { return g.scatter(raw(out), mine * 4, ins, kInt32, root); };
      }
    }
  }

  void drain() {
    for (auto& call : pending_) {
      while (call.started && !order_.wait(call.started, 1.0)) continue;
      if (*call.status != kOk) fail("a call went wrong", rank_, call.step);
      else if (!call.is_right()) fail("a wrong result", rank_, call.step);
      checks++;
    }
    pending_.clear();
  }

  // A ring of messages, some from anybody, some larger than a ring, some that nobody waits for at first.
  void talk() {
    const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
    for (long i = 0; i < world_.steps && !failed; i++) {
      const size_t n = i % 7 == 3 ? 90'000 : i % 5 == 0 ? 0 : 100;
      std::vector<int32_t> out(n + 1), in(2 * n + 1);
      fill(out.data(), n, rank_, i);
      Extent from(raw(out.data()), n * 4), to(raw(in.data()), n * 4);
      const size_t rows = i % 4 == 2 && n ? 10 : 1;  // what comes may land with room between its rows
      if (rows > 1) {
        to = Extent(raw(in.data()), n / rows * 4);
        to.add_outer_dim(rows, 2 * n / rows * 4);
      }
      Messages& m = group_.messages;
      std::vector<TransferRef> both{m.post_recv(i % 2 ? -1 : before, i, to, kInt32), m.post_send(next, i, from, kInt32)};
      if (i % 3 == 0) {
        m.progress();
        if (m.overflows()) order_.attend_messages();
        std::this_thread::yield();
      }
      if (m.wait(both, patient, 0.05) != kOk) return fail("a message did not come", rank_, i);
      for (size_t r = 1; r < rows; r++) std::copy_n(&in[2 * n / rows * r], n / rows, &in[n / rows * r]);
      if (both[0]->peer != before || both[0]->refused || !is(in.data(), n, before, i)) return fail("a wrong message", rank_, i);
      checks++;
    }
  }

  World& world_;
  const int rank_, size_;
  Group group_;
  Order order_;
  std::mt19937 choices_, own_choices_;
  std::vector<Pending> pending_;
  uint64_t number_ = 0;
  int32_t* region_ = nullptr;
  int64_t observed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  World world{argc > 1 ? std::atoi(argv[1]) : 3, argc > 2 ? std::atol(argv[2]) : 400,
              argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1, nullptr, {}};
  const Layout layout{static_cast<size_t>(world.size), kSlotBytes};
  void* memory = mmap(nullptr, layout.total(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  world.memory = static_cast<uint8_t*>(memory);
  world.buffers.assign(world.steps / kEpoch + 1, std::vector<int32_t>(kRegionElements * world.size));
  const int64_t began = now_ns();
  {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < world.size; r++) ranks.push_back(std::make_unique<Rank>(world, r));
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
    for (auto& thread : threads) thread.join();
  }
  munmap(memory, layout.total());
  std::printf("%s: %d ranks, %ld steps, %ld checks, %.1f s\n", failed ? "FAILED" : "ok", world.size, world.steps,
              checks.load(), (now_ns() - began) * 1e-9);
  return failed;
}
