// Work shared out over XLA's own threads: a second pool would fight it for the cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pallas_kernels/native/cores.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// A thread that has helped stays for a moment and waits for the next call, because waking one up takes as long as a
// small product. A step is a chain of such calls, with little between them. While it waits it yields: another thread that
// wants its core, such as the host's, gets it there, and not in the middle of an item that a caller waits for.
class Helpers {
 public:
  // Those of all calls. Never destroyed: helpers may outlive the process's statics.
  static Helpers& all() {
    static Helpers& helpers = *new Helpers;
    return helpers;
  }

  // Hands work to a helper that waits; false where none does.
  bool take_over(std::function<void()> work) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (num_waiting_ <= static_cast<int>(work_.size())) return false;
    work_.push_back(std::move(work));
    num_queued_.fetch_add(1, std::memory_order_release);
    return true;
  }

  // Called by a helper whose work is done: does what comes within kStay, again and again. Returns where `most` wait.
  void stay(int most) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (num_waiting_ >= most) return;
      ++num_waiting_;
    }
    for (auto end = now() + kStay;;) {
      if (num_queued_.load(std::memory_order_acquire) > 0) {
        if (std::function<void()> work = next(true)) {
          work();
          std::lock_guard<std::mutex> guard(mutex_);
          ++num_waiting_;
          end = now() + kStay;
        }
      } else if (now() > end) {
        // What was queued in this instant is still for a helper that counted as waiting.
        std::function<void()> work = next(false);
        if (!work) return;
        work();
        return;
      }
      std::this_thread::yield();
    }
  }

 private:
  static constexpr std::chrono::microseconds kStay{150};

  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

  // Work to do, and one fewer waits; with none queued, one fewer waits unless it `goes_on`.
  std::function<void()> next(bool goes_on) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (work_.empty()) {
      if (!goes_on) --num_waiting_;
      return nullptr;
    }
    --num_waiting_;
    std::function<void()> work = std::move(work_.back());
    work_.pop_back();
    num_queued_.fetch_sub(1, std::memory_order_relaxed);
    return work;
  }

  std::mutex mutex_;
  int num_waiting_ = 0;  // of which some may have work queued
  std::vector<std::function<void()>> work_;
  std::atomic<int> num_queued_{0};
};

// One call's items, 0 to n - 1: each is begun by one thread and counted when it is done.
class Items {
 public:
  explicit Items(int n) : n_(n), core_(own_core()) {}

  // Does items until all are begun.
  template <class Body>
  void work(const Body& body) {
    for (int i; (i = next_.fetch_add(1)) < n_;) {
      body(i);
      if (done_.fetch_add(1) + 1 < n_) continue;
      std::lock_guard<std::mutex> guard(mutex_);
      all_done_.notify_all();
    }
  }

  // The same, on a thread that is not the caller's, and off its core.
  template <class Body>
  void help(const Body& body) {
    leave_core(core_);
    work(body);
  }

  // Until all are done. A core that somebody waits on looks busy, so a helper that was put behind another thread is not
  // moved to it: after a moment the caller sleeps. It does not yield: on a busy machine that gives others a whole slice.
  void wait() {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (done_.load() < n_) {
      if (std::chrono::steady_clock::now() < end) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> guard(mutex_);
      all_done_.wait(guard, [this] { return done_.load() >= n_; });
    }
  }

 private:
  static constexpr std::chrono::microseconds kSpin{60};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int n_, core_;
  std::atomic<int> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// Runs body(0) .. body(n - 1) on the caller and on the pool. The caller only ever waits for items that somebody
// has begun, so a pool whose every thread sits in such a call still makes progress. A helper may start after the
// caller returned: it finds nothing left, and touches nothing of the caller's.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int n, const Body& body) {
  const int most = static_cast<int>(pool.num_threads()) - 1, wanted = std::min(most, n - 1);
  caller_core().store(own_core(), std::memory_order_relaxed);
  if (wanted < 1) {
    for (int i = 0; i < n; ++i) body(i);
    return;
  }
  auto items = std::make_shared<Items>(n);
  auto help = [items, &body] { items->help(body); };
  for (int i = 0; i < wanted; ++i)
    if (!Helpers::all().take_over(help))
      pool.Schedule([help, most] {
        help();
        Helpers::all().stay(most);
      });
  items->work(body);
  items->wait();
}

}  // namespace jaxserve
