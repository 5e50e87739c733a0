// What cores.py calls of cores.h.
#include "pallas_kernels/native/cores.h"

extern "C" __attribute__((visibility("default"))) int jaxserve_caller_core() {
  return jaxserve::caller_core().load(std::memory_order_relaxed);
}

extern "C" __attribute__((visibility("default"))) void jaxserve_leave_core(int core) { jaxserve::leave_core(core); }
