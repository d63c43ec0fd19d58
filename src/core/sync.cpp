#include "sync.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace unisono {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void yield_core() { sched_yield(); }

// A sleeper counts itself before it looks at the word for the last time, and the thread that
// changes the word looks for sleepers afterwards; both in one order for all, so one of them sees the other.
void ring(Bell& bell) {
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst)) wake(bell);
}

void wake(Bell& bell) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(Bell& bell, uint32_t seen, int64_t ns) {
  const timespec nap{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell.value.load(std::memory_order_seq_cst) == seen)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.value), FUTEX_WAIT, seen, &nap, nullptr, 0);
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace unisono
