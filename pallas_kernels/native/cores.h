// Which core a thread runs on, where threads that work for each other must not share one.
//
// While kernels keep all cores busy, a thread that wakes up is put on the core that it had or on that of whoever woke it,
// without a look at the others (Linux looks for an idle core only where few are busy). So a helper waits for its caller's
// core, or the host's thread takes it from the kernels, while another core has nothing to do, for milliseconds.
//
// Source: sched_setaffinity(2); select_idle_cpu in Linux's kernel/sched/fair.c.
#pragma once
#include <atomic>

#if defined(__linux__)
#include <sched.h>
#endif

namespace jaxserve {

// The core of the calling thread; -1 where that is not known.
inline int own_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another core, if it is on this one and may run on others; where it may run stays as it was.
inline void leave_core([[maybe_unused]] int core) {
#if defined(__linux__)
  if (core < 0 || core >= CPU_SETSIZE || sched_getcpu() != core) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(core, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}

// The core that a kernel was last called on; -1 before the first call.
inline std::atomic<int>& caller_core() {
  static std::atomic<int> core{-1};
  return core;
}

}  // namespace jaxserve
