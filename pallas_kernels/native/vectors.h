// What every C++ kernel here computes with: one register's worth of floats, and the small matrix product
// that scores, values and dense layers are all made of. Compiled once per instruction set (build.py), never
// with -march=native.
//
// Source: register-blocked matrix product, Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008.
#pragma once
#include <algorithm>
#include <cstdint>

namespace jaxserve {

// Compiler vectors as wide as one register: wider ones spill (64 bytes under AVX2 ran 4x slower).
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4, kRows = 6;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2, kRows = 6;
#else
constexpr int kVectorBytes = 16, kVectors = 2, kRows = 6;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }
inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }

inline float sum(Vector x) {
  typedef float Quad __attribute__((vector_size(16), may_alias));
  Quad total{};
  for (int i = 0; i < kVectorBytes / 16; ++i) total += reinterpret_cast<const Quad*>(&x)[i];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

inline float largest(Vector x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i) top = std::max(top, x[i]);
  return top;
}

// 2^x for x <= 0; relative error about 1e-7, never below 2^-126. NaN stays NaN.
inline Vector exp2_nonpositive(Vector x) {
  const Vector bounded = x < -126.f ? x - x - 126.f : x;
  const IntVector whole = __builtin_convertvector(bounded - 0.5f, IntVector);  // truncates: rounds, as x <= 0
  const Vector rest = bounded - __builtin_convertvector(whole, Vector);
  Vector value = rest * 1.54035304e-4f + 1.33335581e-3f;
  for (float c : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.f}) value = value * rest + c;
  const Vector power = (Vector)((IntVector)value + (whole << 23));
  return bounded == bounded ? power : bounded;
}

// C[R, V vectors] (+)= A[R, k] B[k, V vectors].
template <int R, int V>
inline void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int k,
                           bool add) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) total[r][j] = add ? at(c + r * ldc + kLanes * j) : Vector{};
  for (int i = 0; i < k; ++i) {
    Vector row[V];
    for (int j = 0; j < V; ++j) row[j] = at(b + i * ldb + kLanes * j);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) total[r][j] += a[r * lda + i] * row[j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) at(c + r * ldc + kLanes * j) = total[r][j];
}

template <int R>
inline void multiply_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int k, int n,
                          bool add) {
  constexpr int kWide = kVectors * kLanes;
  int column = 0;
  for (; column + kWide <= n; column += kWide)
    multiply_block<R, kVectors>(a, lda, b + column, ldb, c + column, ldc, k, add);
  for (; column < n; column += kLanes) multiply_block<R, 1>(a, lda, b + column, ldb, c + column, ldc, k, add);
}

// C[rows, n] (+)= A[rows, k] B[k, n]; n a multiple of kLanes. Each row's result is the same whatever the others.
inline void multiply(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int k,
                     int n, bool add) {
  for (; rows >= kRows; rows -= kRows, a += kRows * lda, c += kRows * ldc)
    multiply_rows<kRows>(a, lda, b, ldb, c, ldc, k, n, add);
  for (; rows >= 3; rows -= 3, a += 3 * lda, c += 3 * ldc) multiply_rows<3>(a, lda, b, ldb, c, ldc, k, n, add);
  for (; rows >= 1; --rows, a += lda, c += ldc) multiply_rows<1>(a, lda, b, ldb, c, ldc, k, n, add);
}

}  // namespace jaxserve
