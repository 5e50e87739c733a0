// The dense products of a layer on CPU as XLA FFI custom calls, float32, each with what stands before and behind it.
// Called by cpu.py.
//
//   jaxserve_dense         (norm(x) @ weight + bias) * multiplier + residual
//   jaxserve_dense_gated   silu(norm(x) @ gate + bias) * (norm(x) @ up + bias)
//   jaxserve_dense_heads   norm(x) @ weight + bias, cut into q, k and v; each head of q and k normed, if it has a norm,
//                          and its first dimensions, or all or none, rotated by the position
//
//   x [M, K]   packed [P, K, 64], the weight in panels of 64 columns (cpu.py)   scale [K], bias [N] or empty
//
// Or all of these are in one array of floats, each from a place of its own on (`Places`): a program is called the sooner the
// fewer arrays it takes.
//
//   norm                 rows in equal ranges; once, into memory of the calling thread
//   an item of work      a range of units for up to kMostRows rows; its panels are one run of memory, read once
//     a unit             the columns that are finished together, while they are in the cache: half a panel, a panel of
//                        gate and up, or the fewest panels that are whole heads
//
// With few rows the time is that of reading the weights, with many that of the multiplications. A row of a result is
// the same, bit for bit, beside any other rows (product.h), and no row sees another.
//
// Source: RMSNorm, Zhang and Sennrich 2019; SwiGLU, Shazeer 2020; rotation, Su et al. 2021; norms of heads, Henry et al.
// 2020, "Query-Key Normalization for Transformers".
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "pallas_kernels/dense/product.h"
#include "pallas_kernels/native/threads.h"
#include "pallas_kernels/native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxserve;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

constexpr int kMostRows = 480;         // of x in an item: they and the results stay in the second cache
constexpr int64_t kFewNormed = 1 << 14;  // values that are normed sooner than a second thread has begun
constexpr float kLog2E = 1.44269504f;

// What a product is made of; n columns count, of those that the panels have.
struct Operands {
  const float *x, *packed, *scale, *bias;
  int64_t m, k, n;
  float eps;
};

// Where the parameters of a call begin in their arrays.
struct Places {
  int64_t packed, scale, bias;
};

ffi::Error refuse(const std::string& why) { return ffi::Error::InvalidArgument("dense: " + why); }

const float* data_or_null(const F32& buffer, int64_t at = 0) {
  return buffer.element_count() ? buffer.typed_data() + at : nullptr;
}

std::string shape_of(const F32& buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Whether `size` floats of one dimension are there from `at` on: all of them, or a part of a larger array.
ffi::Error check_vector(const std::string& name, const F32& buffer, int64_t at, int64_t size) {
  const int64_t count = static_cast<int64_t>(buffer.element_count());
  const bool fits = buffer.dimensions().size() == 1 && at >= 0 && size <= count - at && (at > 0 || count == size);
  if (count == 0 || fits) return ffi::Error::Success();
  return refuse(name + " " + shape_of(buffer) + " from " + std::to_string(at) + " on does not fit, expected " +
                std::to_string(size) + " floats");
}

// The operands of a call whose weight has n columns, in `panels` panels; every shape is checked here.
ffi::Error read_operands(const F32& x, const F32& packed, const F32& scale, const F32& bias, const Places& places, float eps,
                         int64_t n, int64_t panels, Operands& operands) {
  const auto xd = x.dimensions(), pd = packed.dimensions();
  if (xd.size() != 2 || (pd.size() != 3 && pd.size() != 1)) return refuse("expected x [M, K] and packed [P, K, 64]");
  const int64_t size = panels * xd[1] * kPanel, count = static_cast<int64_t>(packed.element_count());
  if (pd.size() == 1 && (places.packed < 0 || size > count - places.packed))
    return refuse("parameters " + shape_of(packed) + " hold no weight of " + std::to_string(size) + " floats from " +
                  std::to_string(places.packed) + " on");
  if (pd.size() == 3 && (pd[1] != xd[1] || pd[2] != kPanel || pd[0] != panels || places.packed != 0))
    return refuse("a weight of " + std::to_string(pd[0]) + " panels of " + std::to_string(pd[1]) + " rows and " +
                  std::to_string(pd[2]) + " columns does not fit x of " + std::to_string(xd[1]) + " and a result of " +
                  std::to_string(n) + " columns");
  if (auto error = check_vector("scale", scale, places.scale, xd[1]); error.failure()) return error;
  if (auto error = check_vector("bias", bias, places.bias, n); error.failure()) return error;
  operands = {x.typed_data(), packed.typed_data() + places.packed, data_or_null(scale, places.scale),
              data_or_null(bias, places.bias), xd[0], xd[1], n, eps};
  return ffi::Error::Success();
}

void norm_row(const float* x, const float* scale, int64_t k, float eps, float* normed) {
  Vector squares{};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) squares += at(x + i) * at(x + i);
  float total = sum(squares);
  for (int64_t j = i; j < k; ++j) total += x[j] * x[j];
  const float factor = 1.f / std::sqrt(total / static_cast<float>(k) + eps);
  for (i = 0; i + kLanes <= k; i += kLanes) at(normed + i) = at(x + i) * factor * at(scale + i);
  for (; i < k; ++i) normed[i] = x[i] * factor * scale[i];
}

// The rows that are multiplied: x itself where there is no norm. They belong to the calling thread until its next call.
const float* normed_rows(ffi::ThreadPool& threads, const Operands& of) {
  if (of.scale == nullptr) return of.x;
  static thread_local std::vector<float> memory;
  memory.resize(std::max<size_t>(memory.size(), of.m * of.k));
  float* normed = memory.data();
  const int64_t ranges = of.m * of.k <= kFewNormed ? 1 : std::min<int64_t>(of.m, threads.num_threads());
  parallel_for(threads, static_cast<int>(ranges), [&](int i) {
    for (int64_t row = of.m * i / ranges; row < of.m * (i + 1) / ranges; ++row)
      norm_row(of.x + row * of.k, of.scale, of.k, of.eps, normed + row * of.k);
  });
  return normed;
}

struct Item {
  int64_t first_row, end_row, first_unit, end_unit;
};

// Units in equal ranges, rows in equal groups: as many items as keep all threads busy.
std::vector<Item> make_items(int64_t m, int64_t units, int64_t num_threads) {
  const int64_t ranges = std::min(units, num_threads);
  const int64_t most = (m + kRows - 1) / kRows;
  const int64_t groups = std::min(most, std::max((m + kMostRows - 1) / kMostRows, (num_threads + ranges - 1) / ranges));
  std::vector<Item> items;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t range = 0; range < ranges; ++range)
      items.push_back({m * group / groups, m * (group + 1) / groups, units * range / ranges,
                       units * (range + 1) / ranges});
  return items;
}

// Hands each row of each unit to finish(row, first column, columns, values), with all columns of its panels.
template <class Finish>
void multiply_units(ffi::ThreadPool& threads, const Operands& of, int64_t panels, int64_t unit, const Finish& finish) {
  const float* x = normed_rows(threads, of);
  const std::vector<Item> items = make_items(of.m, (panels + unit - 1) / unit, threads.num_threads());
  parallel_for(threads, static_cast<int>(items.size()), [&](int i) {
    const Item& item = items[i];
    const int64_t m = item.end_row - item.first_row, wide = unit * kPanel;
    static thread_local std::vector<float> memory;
    memory.resize(std::max<size_t>(memory.size(), m * wide));
    float* values = memory.data();
    for (int64_t one = item.first_unit; one < item.end_unit; ++one) {
      const int64_t first = one * unit, end = std::min(panels, first + unit);
      for (int64_t panel = first; panel < end; ++panel)
        multiply_panel(x + item.first_row * of.k, m, of.k, of.packed + panel * of.k * kPanel, 0, kPanel,
                       values + (panel - first) * kPanel, wide);
      for (int64_t row = 0; row < m; ++row)
        finish(item.first_row + row, first * kPanel, (end - first) * kPanel, values + row * wide);
    }
  });
}

// Columns [first, first + count) of a row of the result, with bias, multiplier and residual.
void write_sum(const float* values, const float* bias, float multiplier, const float* residual, int64_t count,
               float* result) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vector value = at(values + i);
    if (bias != nullptr) value += at(bias + i);
    value *= multiplier;
    if (residual != nullptr) value = at(residual + i) + value;
    at(result + i) = value;
  }
  for (; i < count; ++i) {
    const float value = (bias != nullptr ? values[i] + bias[i] : values[i]) * multiplier;
    result[i] = residual != nullptr ? residual[i] + value : value;
  }
}

// Half panels of one item: where the result has all their columns it is where they are summed up.
void multiply_halves(const float* x, const Operands& of, float multiplier, const float* residual, const Item& item,
                     float* result) {
  static thread_local std::vector<float> last;  // of a panel that the result has not all columns of
  const int64_t m = item.end_row - item.first_row;
  const float* rows = x + item.first_row * of.k;
  for (int64_t half = item.first_unit; half < item.end_unit;) {
    const int64_t panel = half / 2, end = std::min(item.end_unit, 2 * panel + 2);
    const int from = static_cast<int>(half - 2 * panel) * kHalf, to = static_cast<int>(end - 2 * panel) * kHalf;
    const int64_t place = item.first_row * of.n + panel * kPanel, count = std::min<int64_t>(to, of.n - panel * kPanel);
    float *values = result + place;
    int64_t stride = of.n;
    if (count < to) {
      last.resize(std::max<size_t>(last.size(), m * kPanel));
      values = last.data(), stride = kPanel;
    }
    multiply_panel(rows, m, of.k, of.packed + panel * of.k * kPanel, from, to, values, stride);
    if (count < to || of.bias != nullptr || residual != nullptr || multiplier != 1.f)
      for (int64_t row = 0; row < m; ++row)
        write_sum(values + row * stride + from, of.bias ? of.bias + panel * kPanel + from : nullptr, multiplier,
                  residual ? residual + place + row * of.n + from : nullptr, count - from, result + place + row * of.n + from);
    half = end;
  }
}

ffi::Error run(ffi::ThreadPool threads, F32 x, F32 packed, F32 scale, F32 bias, F32 residual, ffi::Result<F32> result,
               float eps, int64_t packed_at, int64_t scale_at, int64_t bias_at, float multiplier) {
  if (result->dimensions().size() != 2) return refuse("expected a result [M, N]");
  const int64_t n = result->dimensions()[1];
  Operands of;
  const Places places{packed_at, scale_at, bias_at};
  if (auto error = read_operands(x, packed, scale, bias, places, eps, n, (n + kPanel - 1) / kPanel, of); error.failure())
    return error;
  if (result->dimensions()[0] != of.m) return refuse("a result " + shape_of(*result) + " of x " + shape_of(x));
  if (residual.element_count() && shape_of(residual) != shape_of(*result))
    return refuse("residual " + shape_of(residual) + " does not fit a result " + shape_of(*result));
  const float *rows = normed_rows(threads, of), *added = data_or_null(residual);
  float* out = result->typed_data();
  const std::vector<Item> items = make_items(of.m, (n + kHalf - 1) / kHalf, threads.num_threads());
  parallel_for(threads, static_cast<int>(items.size()),
               [&](int i) { multiply_halves(rows, of, multiplier, added, items[i], out); });
  return ffi::Error::Success();
}

// x / (1 + e^-x); the power that is taken is never above 1.
Vector silu(Vector x) {
  const Vector e = exp2_nonpositive((x < 0.f ? x : -x) * kLog2E);
  return x * ((x < 0.f ? e : Vector{} + 1.f) / (1.f + e));
}

ffi::Error run_gated(ffi::ThreadPool threads, F32 x, F32 packed, F32 scale, F32 bias, ffi::Result<F32> result,
                     float eps, int64_t packed_at, int64_t scale_at, int64_t bias_at) {
  if (result->dimensions().size() != 2) return refuse("expected a result [M, N / 2]");
  const int64_t n = result->dimensions()[1], panels = (n + kHalf - 1) / kHalf;
  Operands of;
  const Places places{packed_at, scale_at, bias_at};
  if (auto error = read_operands(x, packed, scale, bias, places, eps, 2 * n, panels, of); error.failure()) return error;
  if (result->dimensions()[0] != of.m) return refuse("a result " + shape_of(*result) + " of x " + shape_of(x));
  float* out = result->typed_data();
  multiply_units(threads, of, panels, 1, [&](int64_t row, int64_t column, int64_t, float* values) {
    float *gate = values, *up = values + kHalf;
    const int64_t first = column / 2, count = std::min<int64_t>(kHalf, n - first);
    for (int64_t i = 0; of.bias != nullptr && i < count; ++i) {
      gate[i] += of.bias[first + i];
      up[i] += of.bias[n + first + i];
    }
    for (int i = 0; i < kHalf; i += kLanes) at(gate + i) = silu(at(gate + i)) * at(up + i);
    write_sum(gate, nullptr, 1.f, nullptr, count, out + row * n + first);
  });
  return ffi::Error::Success();
}

// What becomes of each head of q, or of k: a norm, if it has one, and the position.
struct Turn {
  const float* scale;  // [dim] or null
  float eps;
  int half;  // the first 2 half dimensions are rotated, their halves are the pairs; the others stay as they are
};

// One head of q or k; what it is made of is written over.
void turn(float* head, const Turn& by, const float* cos, const float* sin, int64_t dim, float* result) {
  if (by.scale != nullptr) norm_row(head, by.scale, dim, by.eps, head);
  for (int i = 0; i < by.half; ++i) {
    const float low = head[i], high = head[by.half + i];
    result[i] = low * cos[i] - high * sin[i];
    result[by.half + i] = high * cos[i] + low * sin[i];
  }
  std::copy(head + 2 * by.half, head + dim, result + 2 * by.half);
}

// The phases of m rows, for heads of that size.
ffi::Error check_phases(const F32& cos, const F32& sin, int64_t m, int64_t dim) {
  const auto cd = cos.dimensions();
  const bool fits = cd.size() == 3 && cd[0] == m && cd[1] == 1 && 2 * cd[2] <= dim && shape_of(cos) == shape_of(sin);
  if (!fits)
    return refuse("cos " + shape_of(cos) + " and sin " + shape_of(sin) + ", expected [" + std::to_string(m) +
                  ", 1, at most " + std::to_string(dim / 2) + "]");
  return ffi::Error::Success();
}

ffi::Error run_heads(ffi::ThreadPool threads, F32 x, F32 packed, F32 scale, F32 bias, F32 cos, F32 sin, F32 q_scale,
                     F32 k_scale, ffi::Result<F32> q, ffi::Result<F32> k, ffi::Result<F32> v, float eps, int64_t packed_at,
                     int64_t scale_at, int64_t bias_at, float q_eps, float k_eps, int64_t q_scale_at,
                     int64_t k_scale_at) {
  const auto qd = q->dimensions(), kd = k->dimensions();
  if (qd.size() != 3 || kd.size() != 3 || shape_of(*k) != shape_of(*v) || qd[0] != kd[0] || qd[2] != kd[2])
    return refuse("expected q [M, H, D] and k, v [M, K, D], not " + shape_of(*q) + ", " + shape_of(*k) + " and " +
                  shape_of(*v));
  const int64_t heads = qd[1], kv_heads = kd[1], dim = qd[2], n = (heads + 2 * kv_heads) * dim;
  const int64_t panels = (n + kPanel - 1) / kPanel;
  Operands of;
  const Places places{packed_at, scale_at, bias_at};
  if (auto error = read_operands(x, packed, scale, bias, places, eps, n, panels, of); error.failure()) return error;
  if (qd[0] != of.m) return refuse("q " + shape_of(*q) + " of x " + shape_of(x));
  if (auto error = check_phases(cos, sin, of.m, dim); error.failure()) return error;
  if (auto error = check_vector("scale of q", q_scale, q_scale_at, dim); error.failure()) return error;
  if (auto error = check_vector("scale of k", k_scale, k_scale_at, dim); error.failure()) return error;
  const int half = static_cast<int>(cos.dimensions()[2]);
  const Turn q_turn{data_or_null(q_scale, q_scale_at), q_eps, half};
  const Turn k_turn{data_or_null(k_scale, k_scale_at), k_eps, half};
  const float *cosines = cos.typed_data(), *sines = sin.typed_data();
  float *queries = q->typed_data(), *keys = k->typed_data(), *own_values = v->typed_data();
  const int64_t unit = std::lcm(int64_t{kPanel}, dim) / kPanel;
  multiply_units(threads, of, panels, unit, [&](int64_t row, int64_t column, int64_t count, float* values) {
    const int64_t end = std::min(column + count, n);
    if (of.bias != nullptr) write_sum(values, of.bias + column, 1.f, nullptr, end - column, values);
    for (; column < end; column += dim, values += dim) {
      const int64_t head = column / dim, kv_head = head - heads;
      const float *c = cosines + row * half, *s = sines + row * half;
      if (head < heads) turn(values, q_turn, c, s, dim, queries + (row * heads + head) * dim);
      else if (kv_head < kv_heads) turn(values, k_turn, c, s, dim, keys + (row * kv_heads + kv_head) * dim);
      else std::copy_n(values, dim, own_values + (row * kv_heads + kv_head - kv_heads) * dim);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // x
                                  .Arg<F32>()  // packed
                                  .Arg<F32>()  // scale
                                  .Arg<F32>()  // bias
                                  .Arg<F32>()  // residual
                                  .Ret<F32>()  // result
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("packed_at")
                                  .Attr<int64_t>("scale_at")
                                  .Attr<int64_t>("bias_at")
                                  .Attr<float>("multiplier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense_gated, run_gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // x
                                  .Arg<F32>()  // packed
                                  .Arg<F32>()  // scale
                                  .Arg<F32>()  // bias
                                  .Ret<F32>()  // result
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("packed_at")
                                  .Attr<int64_t>("scale_at")
                                  .Attr<int64_t>("bias_at"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense_heads, run_heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // x
                                  .Arg<F32>()  // packed
                                  .Arg<F32>()  // scale
                                  .Arg<F32>()  // bias
                                  .Arg<F32>()  // cos
                                  .Arg<F32>()  // sin
                                  .Arg<F32>()  // q_scale
                                  .Arg<F32>()  // k_scale
                                  .Ret<F32>()  // q
                                  .Ret<F32>()  // k
                                  .Ret<F32>()  // v
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("packed_at")
                                  .Attr<int64_t>("scale_at")
                                  .Attr<int64_t>("bias_at")
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps")
                                  .Attr<int64_t>("q_scale_at")
                                  .Attr<int64_t>("k_scale_at"));
