// Waiting for a word of shared memory: read it for a while, give the core away, then sleep on it.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <functional>
#include <new>
#include <vector>

#include "segment.hpp"

namespace unisono {

enum Status : int {
  kOk = 0,
  kMismatch = 1,  // ranks make different calls; the headers say which
  kSizes = 2,     // a rank sends another number of bytes than its receiver expects
  kAborted = 3,   // `Look` has ended this wait
};

// Called now and then during a long wait with those who have not come and the seconds waited so
// far; false ends the wait.
using Look = std::function<bool(const std::vector<int>& missing, double waited_s)>;

int64_t now_ns();
void yield_core();
void ring(Bell& bell);  // gives the word a new value, and wakes all that wait for it
void wake(Bell& bell);  // lets sleepers look again at an unchanged word
void sleep_on(Bell& bell, uint32_t seen, int64_t ns);

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For tests, in builds that define UNISONO_FAULTS: raises a signal after a number of steps of
// collectives and messages; signal 0 stands for a lack of memory.
struct Fault {
#ifdef UNISONO_FAULTS
  std::atomic<long> steps{0};
  std::atomic<int> signal{0};

  void step() {
    if (!steps.load(std::memory_order_relaxed) || --steps != 0) return;
    if (!signal) throw std::bad_alloc();
    std::raise(signal);
  }
#else
  void step() {}
#endif
};

// How one rank waits. It reads the word only while every rank has a core to itself, for about as
// long as that has paid lately: a rank that reads without success takes the core from the rank it waits for.
struct Patience {
  int spins = 0, most_spins = 0;
  // Beside a thread that computes, yielding for longer beats sleeping: to be woken costs more than
  // the wait, and the computing thread has the core meanwhile.
  bool behind = false;
  double look_s = 0.05;
  std::atomic<int64_t> waited_ns{0};

  explicit Patience(bool has_own_core) : spins(has_own_core ? 200 : 0), most_spins(has_own_core ? 2000 : 0) {}

  // Waits until `ready()`. `doze` is what to sleep on: the value of the word is read before `ready`
  // is asked, so a change in between ends the sleep at once. `idle()` does other work between naps
  // and tells whether some is left, so that naps are kept short.
  template <class Ready, class Missing, class Idle>
  Status wait(Bell& doze, Ready ready, Missing missing, Idle idle, const Look& look) {
    if (!behind) {
      for (int i = 0; i < spins; i++) {
        if (ready()) {
          spins = std::min(most_spins, spins + (2 * i + 20 > spins ? 10 : -1));
          return kOk;
        }
        pause_core();
      }
      spins = std::max(std::min(20, most_spins), spins - spins / 8);
    }
    const int64_t began = now_ns();
    const int64_t yield_until = began + (behind ? 5'000'000 : 2'000'000);
    int64_t looked = began, nap = 20'000;
    Status status = kOk;
    while (true) {
      const uint32_t seen = doze.value.load(std::memory_order_acquire);
      if (ready()) break;
      const int64_t now = now_ns();
      if (now < yield_until) {
        yield_core();
        continue;
      }
      const bool busy = idle();
      if (ready()) break;
      if (now - looked >= static_cast<int64_t>(look_s * 1e9)) {
        looked = now;
        if (!look(missing(), (now - began) * 1e-9)) {
          status = kAborted;
          break;
        }
        if (ready()) break;
      }
      sleep_on(doze, seen, nap);
      nap = std::min<int64_t>(nap * 3 / 2, busy ? 1'000'000 : static_cast<int64_t>(std::min(look_s, 0.05) * 1e9));
    }
    waited_ns += now_ns() - began;
    return status;
  }
};

}  // namespace unisono
