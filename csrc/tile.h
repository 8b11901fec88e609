// The register-tiled product that every kernel is made of: C += A B with a tile of 6 rows by 64 columns in registers.
//
// A and B consist of 32-bit words along the reduction axis: one float32, or two neighbouring bfloat16. A is read word
// by word with any strides, B in rows of whole vectors, so only B is ever packed.
#pragma once
#include "vec.h"

namespace {

constexpr int kTileRows = 6;

struct Float32 {
  typedef float Element;
  static constexpr int per_word = 1;
  static constexpr bool coarse = false;
  static REGARD_INLINE vf multiply_add(vf c, vf a, vf b) { return a * b + c; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  typedef bf16 Element;
  static constexpr int per_word = 2;
  static constexpr bool coarse = true;
  static REGARD_INLINE vf multiply_add(vf c, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// f(0) ... f(N - 1) with constant arguments: unlike a loop, this lets arrays of vectors live in registers throughout.
template <int n>
struct Constant {
  constexpr operator int() const { return n; }
};
template <int N, class F>
REGARD_INLINE void each(F &&f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(Constant<N - 1>{});
  }
}
#define REGARD_EACH [&](auto i) __attribute__((always_inline))

template <class Op, int R, int V>
struct Tile {
  vf c[R][V];

  REGARD_INLINE void zero() {
    each<R * V>(REGARD_EACH { c[i / V][i % V] = vf{}; });
  }
  REGARD_INLINE void read(const float *p, long stride) {
    each<R * V>(REGARD_EACH { c[i / V][i % V] = load(p + i / V * stride + i % V * kLanes); });
  }
  REGARD_INLINE void scale(const float *factor) {
    each<R * V>(REGARD_EACH { c[i / V][i % V] *= factor[i / V]; });
  }
  REGARD_INLINE void write(float *p, long stride) const {
    each<R * V>(REGARD_EACH { store(p + i / V * stride + i % V * kLanes, c[i / V][i % V]); });
  }
  // Where B is read from memory once, `fetch` asks for what lies `ahead` words behind it.
  template <bool fetch = false>
  REGARD_INLINE void multiply(const word *a, long a_row, long a_step, const word *b, long b_step, long words,
                              long ahead = 0) {
    for (; words > 0; --words, a += a_step, b += b_step) {
      vf right[V], left;
      if constexpr (fetch)
        for (int i = 0; i < V * kLanes; i += 16) __builtin_prefetch(b + ahead + i, 0, 2);
      each<V>(REGARD_EACH { right[i] = load(b + i * kLanes); });
      each<R * V>(REGARD_EACH {
        if (i % V == 0) left = splat(a[i / V * a_row]);
        c[i / V][i % V] = Op::multiply_add(c[i / V][i % V], left, right[i % V]);
      });
    }
  }
};

enum Start { kZero, kScaled, kAdd, kAddAhead };  // C = AB, C = diag(factor) C + AB, C += AB, the same with `fetch`

struct Product {
  const word *a;
  long a_row, a_step;
  const word *b;
  long b_step;
  long words;
  float *c;
  long c_row;
  const float *factor;
  long ahead;
};

template <class Op, int R, int V, Start start>
void product_tile(const Product &p) {
  Tile<Op, R, V> tile;
  if (start == kZero) tile.zero();
  if (start == kScaled) tile.read(p.c, p.c_row), tile.scale(p.factor);
  if (start == kAdd || start == kAddAhead) tile.read(p.c, p.c_row);
  tile.template multiply<start == kAddAhead>(p.a, p.a_row, p.a_step, p.b, p.b_step, p.words, p.ahead);
  tile.write(p.c, p.c_row);
}

template <class Op, int V, Start start>
void product_rows(const Product &p, int rows) {
  switch (rows) {
    case 1: return product_tile<Op, 1, V, start>(p);
    case 2: return product_tile<Op, 2, V, start>(p);
    case 3: return product_tile<Op, 3, V, start>(p);
    case 4: return product_tile<Op, 4, V, start>(p);
    case 5: return product_tile<Op, 5, V, start>(p);
    default: return product_tile<Op, 6, V, start>(p);
  }
}

constexpr int kTileUnits = kTileVectors / kUnitVectors;

template <class Op, Start start>
REGARD_INLINE void product_units(const Product &p, int rows, int units) {
  if constexpr (kTileUnits > 1) {
    if (units == 1) return product_rows<Op, kUnitVectors, start>(p, rows);
    if (units == 2) return product_rows<Op, 2 * kUnitVectors, start>(p, rows);
    if (units == 3) return product_rows<Op, 3 * kUnitVectors, start>(p, rows);
  }
  product_rows<Op, kTileVectors, start>(p, rows);
}

// rows <= 6, units <= 4 (columns / 16). By reference: a copy would read at once what was just written in parts.
template <class Op, Start start>
void product(const Product &p, int rows, int units) {
  if (units <= kTileUnits) return product_units<Op, start>(p, rows, units);
  Product part = p;
  for (; units > 0; units -= kTileUnits, part.b += kTileUnits * kUnit, part.c += kTileUnits * kUnit)
    product_units<Op, start>(part, rows, units < kTileUnits ? units : kTileUnits);
}

// n rows in near-equal groups of at most six, larger ones first: where group g begins.
REGARD_INLINE long group_count(long n) { return (n + kTileRows - 1) / kTileRows; }
REGARD_INLINE long group_begin(long n, long groups, long g) {
  long size = n / groups, larger = n % groups;
  return g * size + (g < larger ? g : larger);
}

}  // namespace
