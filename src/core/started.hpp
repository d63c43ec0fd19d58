// The calls of one group in the order in which they were issued: at once in the caller's thread, or
// behind its back in the group's own thread. A thread that waits for a call runs queued calls meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <utility>

#include "group.hpp"

namespace unisono {

struct Started {
  std::function<void()> run;
  std::vector<std::function<void()>> on_done;  // called once, by the thread that ran it
  std::atomic<bool> done{false};
};
using StartedRef = std::shared_ptr<Started>;

class Order {
 public:
  explicit Order(Group& group) : group_(group) {}
  ~Order() { close(); }

  // Runs the call now, after everything issued before it; it does not throw. False if `interrupted()`
  // while it waited for its turn: then it never runs. One that another thread runs has to end itself.
  bool perform(const std::function<void()>& run, const std::function<bool()>& interrupted = [] { return false; }) {
    if (is_inside()) {  // from a callback of another call
      run();
      return true;
    }
    if (std::unique_lock<std::mutex> turn(turn_, std::try_to_lock); turn && is_empty()) {
      runner_ = std::this_thread::get_id();
      run();
      runner_ = std::thread::id();
      turn.unlock();
      if (!is_empty()) changed_.notify_all();  // queued by another thread meanwhile
      return true;
    }
    StartedRef call = start(run);
    while (!wait(call, 0.05))  // its own waits have deadlines
      if (interrupted() && take_back(call)) return false;
    return true;
  }

  StartedRef start(std::function<void()> run) {
    auto call = std::make_shared<Started>();
    call->run = std::move(run);
    if (is_inside()) {
      execute(*call);
      return call;
    }
    {
      std::lock_guard<std::mutex> held(lock_);
      queue_.push_back(call);
      last_ = call;
    }
    try {
      ensure_thread();
    } catch (...) {  // no thread could be started; the caller keeps no tensors for a call it never got
      if (!take_back(call)) return call;
      throw;
    }
    changed_.notify_all();
    return call;
  }

  // Whether the call has ended within the time; runs queued calls meanwhile if no other thread does.
  bool wait(const StartedRef& call, double seconds) {
    if (call->done) return true;
    if (is_inside()) {
      while (!call->done && run_next()) continue;
      return call->done;
    }
    if (std::unique_lock<std::mutex> turn(turn_, std::try_to_lock); turn) {
      runner_ = std::this_thread::get_id();
      while (!call->done && run_next()) continue;
      runner_ = std::thread::id();
      turn.unlock();
      if (!is_empty()) changed_.notify_all();
      if (call->done) return true;
    }
    std::unique_lock<std::mutex> held(lock_);
    return changed_.wait_for(held, std::chrono::duration<double>(seconds), [&] { return call->done.load(); });
  }

  // Calls `callback` when the call has ended, and with it all that were issued before this moment:
  // what it calls comes behind those, as on a rank where the call has ended already. Then it returns
  // false, and the callback runs now.
  bool then(Started& call, std::function<void()> callback) {
    const bool runs_now = is_inside();
    std::lock_guard<std::mutex> held(lock_);
    if (call.done) return false;
    Started& latest = runs_now || !last_ || last_->done ? call : *last_;
    latest.on_done.push_back(std::move(callback));
    return true;
  }

  // Whether this thread runs a call of the group, or a callback.
  bool is_inside() const { return runner_.load() == std::this_thread::get_id(); }

  // Lets the thread move on messages that no thread waits for.
  void attend_messages() {
    ensure_thread();
    changed_.notify_all();
  }

  // Ends the thread after what is queued.
  void close() {
    if (!thread_.joinable()) return;
    if (getpid() != pid_) {  // the thread has stayed in the parent process
      thread_.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> held(lock_);
      stops_ = true;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) thread_.detach();
    else thread_.join();
  }

 private:
  bool is_empty() {
    std::lock_guard<std::mutex> held(lock_);
    return queue_.empty();
  }

  // Whether the call was still in the queue, from which it is gone now.
  bool take_back(const StartedRef& call) {
    std::lock_guard<std::mutex> held(lock_);
    const auto place = std::find(queue_.begin(), queue_.end(), call);
    if (place == queue_.end()) return false;
    queue_.erase(place);
    if (last_ == call) last_ = queue_.empty() ? nullptr : queue_.back();
    return true;
  }

  bool run_next() {
    StartedRef call;
    {
      std::lock_guard<std::mutex> held(lock_);
      if (queue_.empty()) return false;
      call = queue_.front();
      queue_.pop_front();
    }
    execute(*call);
    return true;
  }

  void execute(Started& call) {
    call.run();
    std::vector<std::function<void()>> callbacks;
    std::function<void()> ran;  // goes when no lock is held: it may own what Python made
    {
      std::lock_guard<std::mutex> held(lock_);
      call.done = true;
      ran.swap(call.run);
      callbacks.swap(call.on_done);
    }
    changed_.notify_all();
    for (const auto& callback : callbacks) callback();
  }

  void ensure_thread() {
    std::lock_guard<std::mutex> held(lock_);
    if (thread_.joinable() || stops_) return;
    pid_ = getpid();
    thread_ = std::thread([this] { loop(); });
  }

  void loop() {
    while (true) {
      {
        std::unique_lock<std::mutex> held(lock_);
        const auto has_work = [&] { return !queue_.empty() || stops_; };
        if (group_.messages.unattended()) changed_.wait_for(held, std::chrono::microseconds(nap_us_), has_work);
        else changed_.wait(held, [&] { return has_work() || group_.messages.unattended(); });
        if (stops_ && queue_.empty()) return;
      }
      if (std::unique_lock<std::mutex> turn(turn_); !is_empty()) {
        runner_ = std::this_thread::get_id();
        group_.patience.behind = true;
        while (run_next()) continue;
        group_.patience.behind = false;
        runner_ = std::thread::id();
      }
      try {
        nap_us_ = group_.messages.progress() ? 100 : 2000;
      } catch (const std::exception&) {  // no memory to put a message aside: a wait for it raises
        nap_us_ = 50'000;
      }
    }
  }

  Group& group_;
  std::mutex turn_;  // held by the thread that runs a call
  std::mutex lock_;  // guards what follows
  std::condition_variable changed_;
  std::deque<StartedRef> queue_;
  StartedRef last_;  // issued last
  std::thread thread_;
  std::atomic<std::thread::id> runner_{};
  pid_t pid_ = 0;
  int nap_us_ = 2000;
  bool stops_ = false;
};

}  // namespace unisono
