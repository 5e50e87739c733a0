// Dense products of few rows on CPU as an XLA FFI custom call, float32. Called by cpu.py.
//
//   x [M, K], weights [K, N] (any number of them)  ->  x @ weight [M, N], one for each
//
// With few rows the time is that of reading the weights, so they are read where they lie, in the layout that XLA
// reads too, and once a call for up to kMostRows rows of x. Several weights in one call are one list of work, though
// nobody joined them in memory. An item of work is a panel of columns: kDepth rows of the weight at a time, while the
// next are fetched.
//
// A sum runs over K in order in one accumulator, whatever M, the panels and the threads are: a row of the result is
// the same, bit for bit, beside any other rows.
//
// Source: register-blocked matrix product, Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pallas_kernels/native/threads.h"
#include "pallas_kernels/native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxserve;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

constexpr int kTotals = kRows * kVectors;  // accumulators that the registers hold beside their operands
constexpr int kMostRows = 8;               // of x for one reading of a weight
constexpr int kMostVectors = 8;            // columns of one pass
constexpr int kPanel = 48;                 // vectors: long runs of memory are read faster
constexpr int kDepth = 8;                  // rows of a weight before the accumulators are put down

// C[R, V vectors] (+)= A[R, k] B[k, V vectors]; meanwhile fetches the lines `ahead` floats behind each row of B.
template <int R, int V>
void product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t ahead, float* c, int64_t ldc, int k,
             bool add) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) total[r][j] = add ? at(c + r * ldc + kLanes * j) : Vector{};
  for (int i = 0; i < k; ++i, b += ldb) {
    Vector row[V];
    for (int j = 0; j < V; ++j) {
      row[j] = at(b + kLanes * j);
      __builtin_prefetch(b + ahead + kLanes * j);
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) total[r][j] += a[r * lda + i] * row[j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) at(c + r * ldc + kLanes * j) = total[r][j];
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, int, bool);

// How many vectors of columns the registers hold for R rows of x.
constexpr int widest(int r) { return std::max(1, std::min(kMostVectors, kTotals / r)); }

template <int R, int... V>
Product pick_width(int v, std::integer_sequence<int, V...>) {
  static constexpr Product all[] = {product<R, V + 1>...};
  return all[v - 1];
}

template <int... R>
Product pick_rows(int r, int v, std::integer_sequence<int, R...>) {
  using Pick = Product (*)(int);
  static constexpr Pick all[] = {
      +[](int v) { return pick_width<R + 1>(v, std::make_integer_sequence<int, widest(R + 1)>{}); }...};
  return all[r - 1](v);
}

// The product for r rows of x and v vectors of columns, v at most widest(r).
Product pick(int r, int v) { return pick_rows(r, v, std::make_integer_sequence<int, kMostRows>{}); }

struct Weight {
  const float* data;
  float* result;
  int64_t columns;
};

struct Item {
  Weight weight;
  int64_t column;  // the first
  int vectors;
};

void multiply(const float* x, int64_t m, int64_t k, const Item& item) {
  const int64_t n = item.weight.columns, groups = (m + kMostRows - 1) / kMostRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = m * group / groups, end = m * (group + 1) / groups;
    const int rows = static_cast<int>(end - first), most = widest(rows);
    float* result = item.weight.result + first * n + item.column;
    for (int64_t begin = 0; begin < k; begin += kDepth) {
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, k - begin));
      const int64_t ahead = begin + 2 * kDepth <= k ? kDepth * n : 0;
      const float* weight = item.weight.data + begin * n + item.column;
      for (int j = 0; j < item.vectors; j += most)
        pick(rows, std::min(most, item.vectors - j))(x + first * k + begin, k, weight + j * kLanes, n, ahead,
                                                     result + j * kLanes, n, depth, begin > 0);
    }
  }
}

// Columns that fill no vector.
void multiply_tail(const float* x, int64_t m, int64_t k, const Weight& weight) {
  for (int64_t column = weight.columns / kLanes * kLanes; column < weight.columns; ++column)
    for (int64_t row = 0; row < m; ++row) {
      float total = 0;
      for (int64_t i = 0; i < k; ++i)
        total = __builtin_fmaf(x[row * k + i], weight.data[i * weight.columns + column], total);
      weight.result[row * weight.columns + column] = total;
    }
}

// Panels of equal width, none wider than kPanel or than what each thread gets.
void add_items(const Weight& weight, int64_t share, std::vector<Item>& items) {
  const int64_t vectors = weight.columns / kLanes, most = std::clamp<int64_t>(share, 1, kPanel);
  const int64_t panels = (vectors + most - 1) / most;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t first = vectors * panel / panels, end = vectors * (panel + 1) / panels;
    items.push_back({weight, first * kLanes, static_cast<int>(end - first)});
  }
}

ffi::Error refuse(const std::string& why) { return ffi::Error::InvalidArgument("dense: " + why); }

ffi::Error run(ffi::ThreadPool threads, F32 x, ffi::RemainingArgs weights, ffi::RemainingRets results) {
  if (x.dimensions().size() != 2) return refuse("x is [M, K]");
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  if (weights.size() != results.size()) return refuse("as many results as weights are needed");
  std::vector<Weight> all;
  std::vector<Item> items;
  int64_t vectors = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto weight = weights.get<F32>(i);
    const auto result = results.get<F32>(i);
    if (!weight || !result) return refuse("weights and results are float32");
    const auto wd = weight->dimensions(), rd = (*result)->dimensions();
    if (wd.size() != 2 || rd.size() != 2 || wd[0] != k || rd[0] != m || rd[1] != wd[1])
      return refuse("weight " + std::to_string(i) + " does not fit x or its result");
    all.push_back({weight->typed_data(), (*result)->typed_data(), wd[1]});
    vectors += wd[1] / kLanes;
  }
  const int64_t num_threads = threads.num_threads(), share = (vectors + num_threads - 1) / num_threads;
  for (const Weight& weight : all) add_items(weight, share, items);
  const float* rows = x.typed_data();
  parallel_for(threads, static_cast<int>(items.size()), [&](int i) { multiply(rows, m, k, items[i]); });
  for (const Weight& weight : all) multiply_tail(rows, m, k, weight);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // x
                                  .RemainingArgs()
                                  .RemainingRets());
