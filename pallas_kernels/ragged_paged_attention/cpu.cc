// Ragged paged attention on CPU as an XLA FFI custom call, float32. One call writes the step's new keys and values
// into the pool, which is aliased in place, and attends every token to its row's pages. Called by cpu.py.
//
//   q [T, H, D]   k, v [T, K, D] or empty   pool [N, K, 2, page, D]   kv_lens [S]   page_table [S * P]
//   kv_starts [S]   cu_q_lens [S + 1]   ranges [3]   sinks [H] or empty
//   -> out [T, H, D], pool, lse [T, H] or empty
//
// Places count from the first token of the row's first page. An item of work is a block of a row's tokens, all query
// heads of one KV head, and a range of keys:
//
//   a row of one token     its keys are cut at fixed places into parts, so that few rows keep all threads busy;
//                          parts are merged in their order. Where a row is cut depends on its own length alone.
//   a row of several       blocks of kBlockTokens tokens, each against all keys up to its last token
//
// So a row's result is the same, bit for bit, whatever its neighbours, the padding and the threads. Keys and values
// beyond a row's length, before its window, or in pages that it does not name are never read.
//
// Source: online softmax, Milakov and Gimelshein 2018; tiling as FlashAttention, Dao et al. 2022; parts of a row
// merged by their maxima, "Flash-Decoding", Dao et al. 2023.
#include <algorithm>
#include <cmath>
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

constexpr int kTile = 64;          // keys scored at once
constexpr int kBlockTokens = 64;   // tokens of an item of a chunk
constexpr int kPartKeys = 128;     // keys of a part of a single token's row
constexpr int kMaxParts = 32;      // longer rows have longer parts
constexpr int kTasksPerThread = 6;  // from here on a row's head is one task, with all of its parts
constexpr int kFewRows = 12;       // up to here keys are read where they lie; above they are transposed once
constexpr float kUnseen = -1e30f;  // finite: exp2(kUnseen - kUnseen) is 1, not NaN
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

struct Shape {
  int heads, kv_heads, dim, page, table_width;
  float scale, soft_cap;  // soft_cap 0: none
  int window;             // 0: none
  int group() const { return heads / kv_heads; }
  int64_t plane() const { return int64_t{page} * dim; }  // values of a page lie one plane behind its keys
};

struct Row {
  int first, end;     // tokens
  int length;         // places in its pages
  const int* pages;
  int place(int token) const { return length - (end - token); }
};

struct Item {
  int row, head, first, tokens;  // tokens [first, first + tokens)
  int begin, end;                // keys
  int part, num_parts;
  int64_t work() const { return int64_t{tokens} * (end - begin); }
};

// A softmax per query over the keys seen so far: sum of 2^(score - top) * value, its largest score, and the sum of
// the weights.
struct Softmax {
  float *acc, *top, *total;
  Softmax(float* buffer, int queries, int dim)
      : acc(buffer), top(buffer + int64_t{queries} * dim), total(top + queries) {}
  static int64_t size(int queries, int dim) { return int64_t{queries} * (dim + 2); }
};

// Scores of one tile for R queries: dot products with keys as they lie in the pool. Asks for the tile's values and
// the next keys while it computes; the hardware prefetcher stops at each 4 KiB.
template <int R>
void score_few(const float* q, const float* const* keys, int n, int dim, int64_t plane, float* scores) {
  for (int b = 0; b < n; ++b) {
    for (int d = 0; d < dim; d += 16) {
      __builtin_prefetch(keys[b] + plane + d);
      __builtin_prefetch(keys[b] + 16 * dim + d);
    }
    Vector total[R] = {};
    for (int d = 0; d < dim; d += kLanes)
      for (int r = 0; r < R; ++r) total[r] += at(q + r * dim + d) * at(keys[b] + d);
    for (int r = 0; r < R; ++r) scores[r * kTile + b] = sum(total[r]);
  }
}

void score(int queries, const float* q, const float* const* keys, int n, int dim, int64_t plane, float* transposed,
           float* scores) {
  if (queries <= kFewRows) {
    int r = 0;
    for (; r + 3 <= queries; r += 3) score_few<3>(q + r * dim, keys, n, dim, plane, scores + r * kTile);
    for (; r < queries; ++r) score_few<1>(q + r * dim, keys, n, dim, plane, scores + r * kTile);
    return;
  }
  for (int d0 = 0; d0 < dim; d0 += 16)
    for (int b = 0; b < kTile; ++b)
      for (int d = d0; d < d0 + 16; ++d) transposed[d * kTile + b] = b < n ? keys[b][d] : 0.f;
  multiply(queries, q, dim, transposed, kTile, scores, kTile, dim, kTile, false);
}

// cap * tanh(score / cap), in units of log2.
void apply_soft_cap(float* scores, int count, float cap) {
  for (int i = 0; i < count; i += kLanes) {
    const Vector x = at(scores + i) / cap;
    const Vector size = x < 0.f ? -x : x;
    const Vector e = exp2_nonpositive(size * (-2.f * kLog2E));
    const Vector tanh = (1.f - e) / (1.f + e);
    at(scores + i) = (x < 0.f ? -tanh : tanh) * (cap * kLog2E);
  }
}

// Folds one tile of scores into a query's softmax; the scores become weights.
void fold(float* scores, int dim, float* acc, float* top, float* total) {
  Vector highest = at(scores);
  for (int j = kLanes; j < kTile; j += kLanes) highest = highest > at(scores + j) ? highest : at(scores + j);
  const float new_top = std::max(*top, largest(highest));
  Vector weights{};
  for (int j = 0; j < kTile; j += kLanes) weights += at(scores + j) = exp2_nonpositive(at(scores + j) - new_top);
  const float fade = std::exp2(*top - new_top);
  *total = *total * fade + sum(weights);
  if (new_top > *top)
    for (int d = 0; d < dim; d += kLanes) at(acc + d) *= fade;
  *top = new_top;
}

// Attends an item's queries to its keys.
void attend(const Shape& shape, const Row& row, const Item& item, const float* q, const float* pool, Softmax state) {
  const int dim = shape.dim, group = shape.group(), queries = item.tokens * group;
  static thread_local std::vector<float> buffer;
  buffer.resize(int64_t{queries} * (dim + kTile) + int64_t{dim} * kTile);
  float *scaled = buffer.data(), *scores = scaled + int64_t{queries} * dim, *transposed = scores + queries * kTile;
  const float scale = shape.soft_cap > 0 ? shape.scale : shape.scale * kLog2E;
  for (int r = 0; r < queries; ++r) {
    const float* from = q + (int64_t{item.first + r / group} * shape.heads + item.head * group + r % group) * dim;
    for (int d = 0; d < dim; ++d) scaled[r * dim + d] = from[d] * scale;
  }
  std::fill(state.acc, state.acc + int64_t{queries} * dim, 0.f);
  std::fill(state.top, state.top + queries, kUnseen);
  std::fill(state.total, state.total + queries, 0.f);
  const float* keys[kTile];
  for (int tile = item.begin; tile < item.end; tile += kTile) {
    const int n = std::min(kTile, item.end - tile);
    for (int b = 0; b < n; ++b) {
      const int place = tile + b;
      const int64_t page = row.pages[place / shape.page];
      keys[b] = pool + (page * shape.kv_heads + item.head) * 2 * shape.plane() + (place % shape.page) * dim;
    }
    score(queries, scaled, keys, n, dim, shape.plane(), transposed, scores);
    if (shape.soft_cap > 0) apply_soft_cap(scores, queries * kTile, shape.soft_cap);
    for (int r = 0; r < queries; ++r) {
      float* own = scores + r * kTile;
      const int place = row.place(item.first + r / group);
      const int seen = std::clamp(place + 1 - tile, 0, n);
      const int hidden = shape.window > 0 ? std::clamp(place + 1 - shape.window - tile, 0, kTile) : 0;
      std::fill(own + seen, own + kTile, kUnseen);
      std::fill(own, own + hidden, kUnseen);
      if (hidden >= seen) {  // nothing to see: weights of 0, and not of exp2(kUnseen - kUnseen)
        std::fill(own, own + kTile, 0.f);
        continue;
      }
      fold(own, dim, state.acc + int64_t{r} * dim, state.top + r, state.total + r);
    }
    for (int b = 0, run; b < n; b += run) {  // one run of values per page
      run = std::min(n - b, shape.page - (tile + b) % shape.page);
      multiply(queries, scores + b, kTile, keys[b] + shape.plane(), dim, state.acc, dim, run, dim, true);
    }
  }
}

// The parts of a row's queries, in order, as one softmax: that of the first part.
void merge(float* parts, int num_parts, int queries, int dim) {
  const int64_t size = Softmax::size(queries, dim);
  Softmax into(parts, queries, dim);
  for (int r = 0; r < queries; ++r) {
    float top = kUnseen;
    for (int p = 0; p < num_parts; ++p) top = std::max(top, Softmax(parts + p * size, queries, dim).top[r]);
    float total = 0;
    for (int p = 0; p < num_parts; ++p) {
      Softmax from(parts + p * size, queries, dim);
      const float weight = from.total[r] == 0.f ? 0.f : std::exp2(from.top[r] - top);
      total += weight * from.total[r];
      float *to = into.acc + int64_t{r} * dim, *acc = from.acc + int64_t{r} * dim;
      for (int d = 0; d < dim; d += kLanes) at(to + d) = p ? at(to + d) + weight * at(acc + d) : weight * at(acc + d);
    }
    into.top[r] = top;
    into.total[r] = total;
  }
}

// Divides by the sum of the weights, the sink's among them, and writes out and lse.
void finish(const Shape& shape, const Item& item, const float* sinks, Softmax state, float* out, float* lse) {
  const int dim = shape.dim, group = shape.group();
  for (int r = 0; r < item.tokens * group; ++r) {
    const int head = item.head * group + r % group;
    const int64_t query = int64_t{item.first + r / group} * shape.heads + head;
    const bool saw_some = state.total[r] != 0.f;  // NaN is some
    float top = state.top[r], total = state.total[r], fade = 1;
    if (sinks != nullptr) {
      const float sink = sinks[head] * kLog2E;
      const float highest = std::max(top, sink);
      fade = std::exp2(top - highest);
      total = total * fade + std::exp2(sink - highest);
      top = highest;
    }
    const float factor = saw_some ? fade / total : 0.f;
    for (int d = 0; d < dim; ++d) out[query * dim + d] = saw_some ? state.acc[int64_t{r} * dim + d] * factor : 0.f;
    if (lse != nullptr) lse[query] = saw_some ? (top + std::log2(total)) * kLn2 : 0.f;
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("ragged_paged_attention: " + what); }

// The rows of a call, every length and page id checked: C++ would read wild where XLA clamps.
ffi::Error read_rows(const Shape& shape, int64_t num_tokens, int64_t num_pages, const I32& kv_lens,
                     const I32& table, const I32& kv_starts, const I32& cu_q_lens, const I32& ranges,
                     std::vector<Row>& rows) {
  const int num_rows = ranges.typed_data()[2];
  if (num_rows < 0 || num_rows > static_cast<int64_t>(kv_lens.element_count()))
    return refuse("ranges[2] is " + std::to_string(num_rows) + ", of " + std::to_string(kv_lens.element_count()) +
                  " rows");
  const int* cu = cu_q_lens.typed_data();
  for (int s = 0; s < num_rows; ++s) {
    const std::string name = "row " + std::to_string(s) + ": ";
    const int tokens = cu[s + 1] - cu[s], length = kv_lens.typed_data()[s] - kv_starts.typed_data()[s];
    if (cu[s] < 0 || tokens < 0 || cu[s + 1] > num_tokens)
      return refuse(name + "tokens [" + std::to_string(cu[s]) + ", " + std::to_string(cu[s + 1]) + ") of " +
                    std::to_string(num_tokens));
    if (tokens == 0) continue;
    const int64_t slots = int64_t{shape.table_width} * shape.page;
    if (length < tokens || length > slots)
      return refuse(name + std::to_string(length) + " tokens in its pages, expected " + std::to_string(tokens) +
                    " to " + std::to_string(slots));
    const int* pages = table.typed_data() + int64_t{s} * shape.table_width;
    for (int p = 0; p < (length + shape.page - 1) / shape.page; ++p)
      if (pages[p] < 0 || pages[p] >= num_pages)
        return refuse(name + "page id " + std::to_string(pages[p]) + " of a pool of " + std::to_string(num_pages) +
                      " pages");
    rows.push_back({cu[s], cu[s + 1], length, pages});
  }
  return ffi::Error::Success();
}

void write(const Shape& shape, const std::vector<Row>& rows, const F32& k, const F32& v, float* pool) {
  const int dim = shape.dim;
  for (const Row& row : rows)
    for (int token = row.first; token < row.end; ++token) {
      const int place = row.place(token);
      const int64_t page = row.pages[place / shape.page];
      for (int head = 0; head < shape.kv_heads; ++head) {
        float* to = pool + (page * shape.kv_heads + head) * 2 * shape.plane() + (place % shape.page) * dim;
        const int64_t from = (int64_t{token} * shape.kv_heads + head) * dim;
        std::memcpy(to, k.typed_data() + from, dim * sizeof(float));
        std::memcpy(to + shape.plane(), v.typed_data() + from, dim * sizeof(float));
      }
    }
}

// The items of a call, those of one row together and its parts in order.
std::vector<Item> make_items(const Shape& shape, const std::vector<Row>& rows) {
  std::vector<Item> items;
  for (int s = 0; s < static_cast<int>(rows.size()); ++s) {
    const Row& row = rows[s];
    const bool is_single = row.end - row.first == 1;
    for (int first = row.first; first < row.end; first += kBlockTokens) {
      const int tokens = std::min(kBlockTokens, row.end - first);
      const int end = row.place(first + tokens - 1) + 1;
      const int begin = shape.window > 0 ? std::max(0, row.place(first) + 1 - shape.window) : 0;
      const int most = kPartKeys * ((end + kPartKeys * kMaxParts - 1) / (kPartKeys * kMaxParts));
      const int step = is_single ? most : end;
      const int first_part = begin / step, num_parts = (end - 1) / step + 1 - first_part;
      for (int head = 0; head < shape.kv_heads; ++head)
        for (int part = 0; part < num_parts; ++part) {
          const int from = std::max(begin, (first_part + part) * step);
          const int to = std::min(end, (first_part + part + 1) * step);
          items.push_back({s, head, first, tokens, from, to, part, num_parts});
        }
    }
  }
  return items;
}

// What a thread does at once: the items [begin, end), of which there are several where all parts of a row's head are
// together.
struct Task {
  int begin, end;
  int64_t work;
};

// Whether there are heads enough to keep all threads busy: then nobody waits while the parts of all are merged.
bool are_many(const std::vector<Item>& items, int64_t num_threads) {
  int64_t num_heads = 0;
  for (const Item& item : items) num_heads += item.part == 0;
  return num_heads >= kTasksPerThread * num_threads;
}

// The tasks of a call, the largest first, so that all threads end together.
std::vector<Task> make_tasks(const std::vector<Item>& items, bool whole) {
  std::vector<Task> tasks;
  for (int i = 0; i < static_cast<int>(items.size()); ++i) {
    if (items[i].part == 0 || !whole) tasks.push_back({i, i, 0});
    tasks.back().end = i + 1;
    tasks.back().work += items[i].work();
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
  return tasks;
}

ffi::Error run(ffi::ThreadPool threads, F32 q, F32 k, F32 v, F32 pool, I32 kv_lens, I32 table, I32 kv_starts,
               I32 cu_q_lens, I32 ranges, F32 sinks, ffi::Result<F32> out, ffi::Result<F32> pool_out,
               ffi::Result<F32> lse, float scale, float soft_cap, int32_t window) {
  const auto qd = q.dimensions(), pd = pool.dimensions();
  const int num_seqs = static_cast<int>(kv_lens.element_count());
  const Shape shape{static_cast<int>(qd[1]), static_cast<int>(pd[1]), static_cast<int>(qd[2]),
                    static_cast<int>(pd[3]), static_cast<int>(table.element_count()) / num_seqs,
                    scale, soft_cap, window};
  if (shape.dim % 16) return refuse("head_dim " + std::to_string(shape.dim) + " is no multiple of 16");
  if (pool.untyped_data() != pool_out->untyped_data()) return refuse("the pool is not updated in place");
  std::vector<Row> rows;
  if (auto error = read_rows(shape, qd[0], pd[0], kv_lens, table, kv_starts, cu_q_lens, ranges, rows);
      error.failure())
    return error;
  float* cache = pool_out->typed_data();
  if (k.element_count()) write(shape, rows, k, v, cache);

  float* result = out->typed_data();
  float* lse_result = lse->element_count() ? lse->typed_data() : nullptr;
  const float* sink = sinks.element_count() ? sinks.typed_data() : nullptr;
  const int last = rows.empty() ? 0 : rows.back().end;  // tokens behind it are padding
  std::fill(result + int64_t{last} * shape.heads * shape.dim, result + out->element_count(), 0.f);
  if (lse_result) std::fill(lse_result + int64_t{last} * shape.heads, lse_result + lse->element_count(), 0.f);

  const std::vector<Item> items = make_items(shape, rows);
  const bool whole = are_many(items, threads.num_threads());
  const std::vector<Task> tasks = make_tasks(items, whole);
  const int64_t part_size = Softmax::size(shape.group(), shape.dim);
  std::vector<float> parts(whole ? 0 : items.size() * part_size);  // of rows whose parts are tasks of their own
  parallel_for(threads, static_cast<int>(tasks.size()), [&](int i) {
    const Task& task = tasks[i];
    const Item& first = items[task.begin];
    const int num_items = task.end - task.begin, queries = first.tokens * shape.group();
    const bool is_part = num_items < first.num_parts;
    static thread_local std::vector<float> own;
    own.resize(std::max<size_t>(own.size(), num_items * Softmax::size(queries, shape.dim)));
    float* memory = is_part ? parts.data() + task.begin * part_size : own.data();
    for (int one = 0; one < num_items; ++one)
      attend(shape, rows[first.row], items[task.begin + one], q.typed_data(), cache,
             Softmax(memory + one * part_size, queries, shape.dim));
    if (is_part) return;
    if (num_items > 1) merge(memory, num_items, queries, shape.dim);
    finish(shape, first, sink, Softmax(memory, queries, shape.dim), result, lse_result);
  });
  for (size_t i = 0; i < items.size() && !whole; i += items[i].num_parts)
    if (items[i].num_parts > 1) {
      merge(parts.data() + i * part_size, items[i].num_parts, shape.group(), shape.dim);
      finish(shape, items[i], sink, Softmax(parts.data() + i * part_size, shape.group(), shape.dim), result, lse_result);
    }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_ragged_paged_attention, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()   // q
                                  .Arg<F32>()   // k
                                  .Arg<F32>()   // v
                                  .Arg<F32>()   // pool
                                  .Arg<I32>()   // kv_lens
                                  .Arg<I32>()   // page_table
                                  .Arg<I32>()   // kv_starts
                                  .Arg<I32>()   // cu_q_lens
                                  .Arg<I32>()   // ranges
                                  .Arg<F32>()   // sinks
                                  .Ret<F32>()   // out
                                  .Ret<F32>()   // pool
                                  .Ret<F32>()   // lse
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window"));
