// A buffer of zeros that takes no memory until it is touched, as calloc's does, as an XLA FFI custom call. Called by
// lazy_zeros.py for pools of KV pages, most of which a short run never reaches.
//
// The operating system gives pages of zeros where the old ones are given up. That holds for private memory of no file,
// which is what XLA allocates; elsewhere the buffer is written.
//
// Source: madvise(2), MADV_DONTNEED.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Gives the whole pages of [begin, end) up; false where that is not how to get zeros.
bool give_up(char* begin, char* end) {
#if defined(__linux__)
  if (madvise(begin, end - begin, MADV_DONTNEED) != 0) return false;
  madvise(begin, end - begin, MADV_HUGEPAGE);  // fewer faults later; no matter if it is refused
  return true;
#else
  return false;
#endif
}

std::uintptr_t page_bytes() {
#if defined(__linux__)
  return static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
#else
  return 4096;
#endif
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* begin = static_cast<char*>(out->untyped_data());
  char* end = begin + out->size_bytes();
  const std::uintptr_t page = page_bytes();
  char* first = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(end) / page * page);
  if (first < last && give_up(first, last)) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
  } else {
    std::memset(begin, 0, end - begin);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_lazy_zeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
