// Work shared out over XLA's own threads: a second pool would fight it for the cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// A thread that has helped stays for a moment and waits for the next call, because waking one up takes as long as a
// small product. A step is a chain of such calls, with little between them.
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

  // Called by a helper whose work is done: does what comes within kStay, again and again.
  void stay() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
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
      pause();
    }
  }

 private:
  static constexpr std::chrono::microseconds kStay{40};

  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

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

// Runs body(0) .. body(n - 1) on the caller and on the pool. The caller only ever waits for items that somebody
// has begun, so a pool whose every thread sits in such a call still makes progress. A helper may start after the
// caller returned: it finds nothing left, and touches nothing of the caller's.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int n, const Body& body) {
  struct Job {
    std::atomic<int> next{0}, done{0};
  };
  auto job = std::make_shared<Job>();
  auto drain = [job, n, &body] {
    for (int i; (i = job->next.fetch_add(1)) < n;) {
      body(i);
      job->done.fetch_add(1);
    }
  };
  const int helpers = std::min<int>(static_cast<int>(pool.num_threads()), n) - 1;
  for (int i = 0; i < helpers; ++i)
    if (!Helpers::all().take_over(drain))
      pool.Schedule([drain] {
        drain();
        Helpers::all().stay();
      });
  drain();
  while (job->done.load() < n) std::this_thread::yield();
}

}  // namespace jaxserve
