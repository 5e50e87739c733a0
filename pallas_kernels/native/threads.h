// Work shared out over XLA's own threads: a second pool would fight it for the cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

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
  for (int i = 0; i < helpers; ++i) pool.Schedule(decltype(drain)(drain));
  drain();
  while (job->done.load() < n) std::this_thread::yield();
}

}  // namespace jaxserve
