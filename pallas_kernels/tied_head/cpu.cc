// The tied head on CPU as an XLA FFI custom call, float32. Called by cpu.py.
//
//   x [M, K], names [N, K]  ->  x @ names^T [M, N]; names are the rows of the embedding, read once a call
//
// kNames rows of the embedding against up to kRows rows of x. A sum runs over K lane by lane and the lanes are added in
// one fixed order, whatever M, the tiling and the threads: a row of the result is the same, bit for bit, in any batch.
#include <algorithm>
#include <cstdint>

#include "pallas_kernels/native/threads.h"
#include "pallas_kernels/native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxserve;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

constexpr int kNames = 4;   // rows of the embedding at once
constexpr int kBlock = 64;  // rows of the embedding of an item of work
static_assert(kRows == 6);

// Rows of x in equal groups of at most kRows.
template <class Body>
void for_groups(int rows, const Body& body) {
  const int groups = (rows + kRows - 1) / kRows;
  for (int g = 0; g < groups; ++g) body(g, rows * g / groups, rows * (g + 1) / groups);
}

// result[r, j] = x[r] . names[j] for R rows of x and J of the embedding.
template <int R, int J>
void dots(const float* x, const float* names, int64_t k, float* result, int64_t ldr, bool fetch) {
  Vector total[R][J] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Vector name[J];
    for (int j = 0; j < J; ++j) {
      if (fetch) __builtin_prefetch(names + (J + j) * k + i);
      name[j] = at(names + j * k + i);
    }
    for (int r = 0; r < R; ++r) {
      const Vector own = at(x + r * k + i);
      for (int j = 0; j < J; ++j) total[r][j] += own * name[j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) {
      float one = sum(total[r][j]);
      for (int64_t rest = i; rest < k; ++rest) one = __builtin_fmaf(x[r * k + rest], names[j * k + rest], one);
      result[r * ldr + j] = one;
    }
}

template <int J>
void dots_of(int r, const float* x, const float* names, int64_t k, float* result, int64_t ldr, bool fetch) {
  switch (r) {
    case 1: return dots<1, J>(x, names, k, result, ldr, fetch);
    case 2: return dots<2, J>(x, names, k, result, ldr, fetch);
    case 3: return dots<3, J>(x, names, k, result, ldr, fetch);
    case 4: return dots<4, J>(x, names, k, result, ldr, fetch);
    case 5: return dots<5, J>(x, names, k, result, ldr, fetch);
    default: return dots<6, J>(x, names, k, result, ldr, fetch);
  }
}

ffi::Error run(ffi::ThreadPool threads, F32 x, F32 names, ffi::Result<F32> result) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = names.dimensions()[0];
  if (names.dimensions()[1] != k || result->dimensions()[0] != m || result->dimensions()[1] != n)
    return ffi::Error::InvalidArgument("tied_head: rows of the embedding do not fit x");
  const float *rows = x.typed_data(), *table = names.typed_data();
  float* out = result->typed_data();
  parallel_for(threads, static_cast<int>((n + kBlock - 1) / kBlock), [&](int block) {
    const int64_t end = std::min<int64_t>(n, int64_t{block + 1} * kBlock);
    int64_t name = int64_t{block} * kBlock;
    for (; name + kNames <= end; name += kNames)
      for_groups(static_cast<int>(m), [&](int g, int first, int last) {
        dots_of<kNames>(last - first, rows + first * k, table + name * k, k, out + first * n + name, n,
                        g == 0 && name + 2 * kNames <= n);
      });
    for (; name < end; ++name)
      for_groups(static_cast<int>(m), [&](int, int first, int last) {
        dots_of<1>(last - first, rows + first * k, table + name * k, k, out + first * n + name, n, false);
      });
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_tied_head, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()    // x
                                  .Arg<F32>()    // names
                                  .Ret<F32>());  // result
