// A weight in panels of 64 columns [P, K, 64] times a block of rows: what every call of cpu.cc is made of.
//
//   kDepth rows of a panel   stay in the first cache while all rows of x pass by; what comes next in memory is
//                            fetched meanwhile
//     R rows of x            against the panel's width in registers
//
// A sum runs over K in order: each block of kDepth terms in an accumulator of their own, then added to those before. So
// the rounding of a term does not grow with K, and one huge term spoils only those of its own block. Whatever the number
// of rows, a row of the result is the same, bit for bit, beside any other rows.
//
// Source: register and cache blocking, Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
// 2008.
#pragma once
#include <algorithm>
#include <cstdint>

#include "pallas_kernels/native/vectors.h"

namespace jaxserve {

constexpr int kPanel = 64;       // columns
constexpr int kHalf = kPanel / 2;
constexpr int kDepth = 144;       // rows of a panel at a time, at most: 36 KiB
constexpr int kFetchers = 8;      // groups of rows of x that fetch, at most
constexpr int kLine = 16;         // floats
constexpr int kWide = kVectors * kLanes;  // columns that the registers hold, at most a panel
static_assert(kPanel % kWide == 0);

// What a product fetches meanwhile: with each row of B `Lines` lines, from `next + step * row` on.
struct Fetch {
  const float* next;
  int64_t step;  // floats
};

// C[R, V vectors] (+)= A[R, k] B[k, V vectors], B with kPanel floats a row.
template <int R, int V, int Lines, bool Add>
void product(const float* a, int64_t lda, const float* b, Fetch fetch, float* c, int64_t ldc, int k) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) total[r][j] = Vector{};
  for (int i = 0; i < k; ++i, b += kPanel, fetch.next += fetch.step) {
    Vector row[V];
    for (int j = 0; j < V; ++j) row[j] = at(b + kLanes * j);
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(fetch.next + kLine * line, 0, 2);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) total[r][j] += a[r * lda + i] * row[j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) {
      if constexpr (Add) at(c + r * ldc + kLanes * j) += total[r][j];
      else at(c + r * ldc + kLanes * j) = total[r][j];
    }
}

using Product = void (*)(const float*, int64_t, const float*, Fetch, float*, int64_t, int);

template <int R, int V, bool Add>
Product pick_lines(int lines) {
  switch (lines) {
    case 0: return product<R, V, 0, Add>;
    case 1: return product<R, V, 1, Add>;
    default: return product<R, V, 2, Add>;
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

// x times `wide` columns of `depth` rows of a panel. The groups of rows share in fetching as many of the rows that
// follow, so that memory is read all the while. A single group leaves the fetching to the hardware, which is better at
// it: requests of its own take up the few places that the first cache has for them.
inline void multiply_depth(const float* x, int64_t m, int64_t k, int depth, const float* b, int wide, float* c,
                           int64_t ldc, bool add) {
  const int64_t groups = (m + kRows - 1) / kRows;
  const int lines = std::max(1, wide / kLine);
  const int64_t fetchers = groups == 1 ? 0 : std::min<int64_t>(groups, wide == kPanel ? kFetchers : lines);
  const float* next = b + int64_t{depth} * kPanel;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = m * group / groups, end = m * (group + 1) / groups;
    const int rows = static_cast<int>(end - first);
    Fetch fetch{next, kPanel};
    int count = 0;
    if (group < fetchers && wide == kPanel) {  // one run of memory: each group an equal piece
      count = static_cast<int>((lines + fetchers - 1) / fetchers);
      fetch = {next + depth * kPanel * group / fetchers, (kPanel + fetchers - 1) / fetchers};
    } else if (group < fetchers) {  // each group some lines of every row
      const int64_t from = lines * group / fetchers;
      count = static_cast<int>(lines * (group + 1) / fetchers - from);
      fetch.next += kLine * from;
    }
    const Product run = wide == kWide ? pick<kVectors>(rows, count, add) : pick<kVectors / 2>(rows, count, add);
    run(x + first * k, k, b, fetch, c + first * ldc, ldc, depth);
  }
}

// x [m, k] times columns [from, to) of a panel, multiples of kHalf.
inline void multiply_panel(const float* x, int64_t m, int64_t k, const float* panel, int from, int to, float* c,
                           int64_t ldc) {
  const int64_t blocks = (k + kDepth - 1) / kDepth;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = k * block / blocks;
    const int depth = static_cast<int>(k * (block + 1) / blocks - begin);
    for (int column = from; column < to;) {
      const int wide = std::min(kWide, to - column);
      multiply_depth(x + begin, m, k, depth, panel + begin * kPanel + column, wide, c + column, ldc, begin > 0);
      column += wide;
    }
  }
}

}  // namespace jaxserve
