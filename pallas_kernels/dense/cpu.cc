// A layer's dense product on CPU as an XLA FFI custom call, float32. Called by cpu.py.
//
//   x [M, K], packed [P, K, 64]  ->  x @ weight [M, N], where weight [K, N] lies in panels of 64 columns (cpu.py)
//
//   an item of work      a range of half panels, for up to kMostRows rows of x
//     its panels         one run of memory, read once: what comes next is fetched while this is multiplied
//       kDepth rows      of a panel, which stay in the first cache while all rows of x pass by
//         R rows of x    against the panel's width in registers
//
// With few rows the time is that of reading the weights, with many that of the multiplications.
//
// A sum runs over K in order: each kDepth terms in an accumulator of their own, then added to those before. So the
// rounding of a term does not grow with K, and one huge term spoils only those of its own block. Whatever M, the items
// and the threads are, a row of the result is the same, bit for bit, beside any other rows.
//
// Source: register and cache blocking, Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
// 2008.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "pallas_kernels/native/threads.h"
#include "pallas_kernels/native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxserve;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

constexpr int kPanel = 64;       // columns
constexpr int kHalf = kPanel / 2;
constexpr int kDepth = 288;       // rows of a panel at a time: 72 KiB
constexpr int kMostRows = 480;   // of x in an item: they and the results stay in the second cache
constexpr int kAhead = 128;       // rows of a panel between what is fetched and what is multiplied: 32 KiB
constexpr int kLine = 16;         // floats
constexpr int kWide = kVectors * kLanes;  // columns that the registers hold, at most a panel
static_assert(kPanel % kWide == 0);

// C[R, V vectors] (+)= A[R, k] B[k, V vectors], B with kPanel floats a row; meanwhile fetches, for each row of B,
// `Lines` lines of the row that lies `ahead` floats behind it.
template <int R, int V, int Lines, bool Add>
void product(const float* a, int64_t lda, const float* b, int64_t ahead, float* c, int64_t ldc, int k) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) total[r][j] = Vector{};
  for (int i = 0; i < k; ++i, b += kPanel) {
    Vector row[V];
    for (int j = 0; j < V; ++j) row[j] = at(b + kLanes * j);
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(b + ahead + kLine * line, 0, 2);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) total[r][j] += a[r * lda + i] * row[j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) {
      if constexpr (Add) at(c + r * ldc + kLanes * j) += total[r][j];
      else at(c + r * ldc + kLanes * j) = total[r][j];
    }
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, int);

template <int R, int V, bool Add>
Product pick_lines(int lines) {
  switch (lines) {
    case 0: return product<R, V, 0, Add>;
    case 1: return product<R, V, 1, Add>;
    case 2: return product<R, V, 2, Add>;
    default: return product<R, V, 4, Add>;
  }
}

template <int V, bool Add>
Product pick_rows(int r, int lines) {
  switch (r) {
    case 1: return pick_lines<1, V, Add>(lines);
    case 2: return pick_lines<2, V, Add>(lines);
    case 3: return pick_lines<3, V, Add>(lines);
    case 4: return pick_lines<4, V, Add>(lines);
    case 5: return pick_lines<5, V, Add>(lines);
    default: return pick_lines<kRows, V, Add>(lines);
  }
}
static_assert(kRows == 6);

template <int V>
Product pick(int r, int lines, bool add) {
  return add ? pick_rows<V, true>(r, lines) : pick_rows<V, false>(r, lines);
}

// x times `wide` columns of kDepth rows of a panel, or fewer at its end. The fetching is shared out over the first
// groups of rows.
void multiply_depth(const float* x, int64_t m, int64_t k, int depth, const float* b, int wide, float* c, int64_t ldc,
                    bool add) {
  const int64_t groups = (m + kRows - 1) / kRows;
  const int lines = std::max(1, wide / kLine), fetchers = static_cast<int>(std::min<int64_t>(groups, lines));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = m * group / groups, end = m * (group + 1) / groups;
    const int rows = static_cast<int>(end - first);
    int from = 0, count = 0;
    if (group < fetchers) {
      from = static_cast<int>(lines * group / fetchers);
      count = static_cast<int>(lines * (group + 1) / fetchers) - from;
    }
    const Product run = wide == kWide ? pick<kVectors>(rows, count, add) : pick<kVectors / 2>(rows, count, add);
    run(x + first * k, k, b, int64_t{kAhead} * kPanel + kLine * from, c + first * ldc, ldc, depth);
  }
}

// x [m, k] times columns [from, to) of a panel, multiples of kHalf.
void multiply_panel(const float* x, int64_t m, int64_t k, const float* panel, int from, int to, float* c, int64_t ldc) {
  for (int64_t begin = 0; begin < k; begin += kDepth) {
    const int depth = static_cast<int>(std::min<int64_t>(kDepth, k - begin));
    for (int column = from; column < to;) {
      const int wide = std::min(kWide, to - column);
      multiply_depth(x + begin, m, k, depth, panel + begin * kPanel + column, wide, c + column, ldc, begin > 0);
      column += wide;
    }
  }
}

struct Item {
  int64_t first_row, end_row, first_half, end_half;
};

// Half panels in equal ranges, rows in equal groups: as many items as keep all threads busy.
std::vector<Item> make_items(int64_t m, int64_t halves, int64_t num_threads) {
  const int64_t ranges = std::min(halves, num_threads);
  const int64_t most = (m + kRows - 1) / kRows;
  const int64_t groups = std::min(most, std::max((m + kMostRows - 1) / kMostRows, (num_threads + ranges - 1) / ranges));
  std::vector<Item> items;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t range = 0; range < ranges; ++range)
      items.push_back({m * group / groups, m * (group + 1) / groups, halves * range / ranges,
                       halves * (range + 1) / ranges});
  return items;
}

void multiply(const float* x, int64_t k, const float* packed, float* result, int64_t n, const Item& item) {
  static thread_local std::vector<float> last;  // of a panel that the result has not all columns of
  const int64_t m = item.end_row - item.first_row;
  const float* rows = x + item.first_row * k;
  for (int64_t half = item.first_half; half < item.end_half;) {
    const int64_t panel = half / 2, end = std::min(item.end_half, 2 * panel + 2);
    const int from = static_cast<int>(half - 2 * panel) * kHalf, to = static_cast<int>(end - 2 * panel) * kHalf;
    float* own = result + item.first_row * n + panel * kPanel;
    const int64_t columns = n - panel * kPanel;
    if (to <= columns) {
      multiply_panel(rows, m, k, packed + panel * k * kPanel, from, to, own, n);
    } else if (from < columns) {
      last.resize(m * kPanel);
      multiply_panel(rows, m, k, packed + panel * k * kPanel, from, to, last.data(), kPanel);
      for (int64_t row = 0; row < m; ++row)
        std::memcpy(own + row * n + from, last.data() + row * kPanel + from, (columns - from) * sizeof(float));
    }
    half = end;
  }
}

ffi::Error refuse(const std::string& why) { return ffi::Error::InvalidArgument("dense: " + why); }

ffi::Error run(ffi::ThreadPool threads, F32 x, F32 packed, ffi::Result<F32> result) {
  const auto xd = x.dimensions(), pd = packed.dimensions(), rd = result->dimensions();
  if (xd.size() != 2 || pd.size() != 3 || rd.size() != 2) return refuse("expected x [M, K], packed [P, K, 64], [M, N]");
  const int64_t m = xd[0], k = xd[1], n = rd[1], panels = pd[0];
  if (pd[1] != k || pd[2] != kPanel || rd[0] != m || (n + kPanel - 1) / kPanel != panels)
    return refuse("a weight of " + std::to_string(panels) + " panels of " + std::to_string(pd[1]) + " rows and " +
                  std::to_string(pd[2]) + " columns does not fit x of " + std::to_string(k) + " and a result of " +
                  std::to_string(n) + " columns");
  const float *rows = x.typed_data(), *weight = packed.typed_data();
  float* out = result->typed_data();
  const std::vector<Item> items = make_items(m, (n + kHalf - 1) / kHalf, threads.num_threads());
  parallel_for(threads, static_cast<int>(items.size()), [&](int i) { multiply(rows, k, weight, out, n, items[i]); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()    // x
                                  .Arg<F32>()    // packed
                                  .Ret<F32>());  // result
