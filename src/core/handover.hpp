// Writing what another rank reads next.
//
// There are two ways: through the caches, or past them by streaming stores. Where cores share a cache
// the first is faster by half. Where they do not (two sockets, two dies) each line must first be taken
// away from the reader's cache, and the second is two to eight times as fast. No machine tells reliably
// which is the case, a virtual one least of all, and it changes while ranks run. So each rank times
// both now and then, and takes the faster; no other rank needs to know.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "segment.hpp"
#include "sync.hpp"

namespace unisono {

class Handover {
 public:
  enum Way : int { kMeasured, kThroughCaches, kStreamed };
  using Copy = void (*)(void* to, const void* from, size_t n);

  Way way = kMeasured;

  // Calls `write` with what it is to copy by. Afterwards a store with release order shows others all
  // that was written.
  template <class Write>
  void operator()(size_t nbytes, Write write) {
    const bool timed = way == kMeasured && nbytes >= kLeastTimed;
    const bool streams = timed ? prefers_stream_ != is_trial() : way == kStreamed;
    const int64_t began = timed ? now_ns() : 0;
    write(streams ? stream : through_caches);
    if (streams) order();
    if (timed) learn(streams, static_cast<double>(now_ns() - began) / static_cast<double>(nbytes));
  }

 private:
  static constexpr size_t kLeastTimed = 8 * 1024;  // less goes through the caches
  // After this number of writes the other way is tried, sooner at first. The first writes touch new
  // memory and tell nothing; one write through the caches after streamed ones tells little, because its
  // lines are in no cache, and is found out by the next.
  static constexpr unsigned kFewest = 32, kMost = 2048;
  // What the writer must gain by streaming, because the reader then fetches from memory. With a shared
  // cache it gains up to twice or loses, without one it gains four to fifteen times.
  static constexpr double kGain = 2.5;

  static void through_caches(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }

#if defined(__SSE2__)
  // Whole lines go past the caches, the ends through them.
  static void stream(void* to, const void* from, size_t n) {
    auto* target = static_cast<uint8_t*>(to);
    auto* source = static_cast<const uint8_t*>(from);
    const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(target) % kLine, n);
    std::memcpy(target, source, head);
    for (target += head, source += head, n -= head; n >= kLine; target += kLine, source += kLine, n -= kLine)
      for (size_t i = 0; i < kLine; i += sizeof(__m128i))
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    std::memcpy(target, source, n);
  }
  static void order() { _mm_sfence(); }  // the one kind of store that later ones may overtake here
#else
  static void stream(void* to, const void* from, size_t n) { through_caches(to, from, n); }
  static void order() {}
#endif

  bool is_trial() {
    if (++writes_ < until_trial_) return false;
    writes_ = 0;
    until_trial_ = std::min(2 * until_trial_, kMost);
    return true;
  }

  // A write may have been interrupted, so a slow one counts for less than a fast one.
  void learn(bool streams, double cost) {
    double& known = cost_[streams];
    known = known == 0 || cost < known ? cost : known + std::min(cost - known, known) / 4;
    prefers_stream_ = cost_[1] != 0 && cost_[0] > kGain * cost_[1];
  }

  double cost_[2] = {0, 0};  // nanoseconds per byte, through the caches and streamed; 0: not known yet
  bool prefers_stream_ = false;
  unsigned writes_ = 0, until_trial_ = kFewest;
};

}  // namespace unisono
