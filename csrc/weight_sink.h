// Where the backward pass puts the weights P and their gradients dS of a block of query rows.
#pragma once
#include "pack.h"

namespace {

constexpr int kQueryBlock = 144;

// Where P and dS of a query block go, [rows][stride]: as words along the queries for dV and dK, and dS along the keys
// for dQ. In float32 both are the same rows.
template <class Op>
struct WeightSink;
template <>
struct WeightSink<Float32> {
  word *p, *ds, *ds_rows;
  long stride;
  int begin;  // the group's first row

  REGARD_INLINE void put(int r, int rows, int column, vf p0, vf p1, vf ds0, vf ds1) const {
    long at = (begin + r) * stride + column;
    store(p + at, p0);
    store(ds + at, ds0);
    if (r + 1 < rows) {
      store(p + at + stride, p1);
      store(ds + at + stride, ds1);
    }
  }
  static void take(Arrays &arrays, WeightSink &sink, long stride) {
    sink.stride = stride;
    arrays.take(sink.p, kQueryBlock * stride);
    arrays.take(sink.ds, kQueryBlock * stride);
    sink.ds_rows = sink.ds;
  }
};
#if defined(__AVX512BF16__)
template <>
struct WeightSink<Bfloat16> {
  word *p, *ds, *ds_rows;
  long stride;
  int begin;

  static REGARD_INLINE vf interleave(vf even, vf odd) {
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vf)_mm512_permutexvar_epi16(order, halves);
  }
  REGARD_INLINE void put(int r, int rows, int column, vf p0, vf p1, vf ds0, vf ds1) const {
    long at = (begin + r) / 2 * stride + column;
    store(p + at, interleave(p0, p1));
    store(ds + at, interleave(ds0, ds1));
    bf16 *row = (bf16 *)ds_rows + (begin + r) * stride + column;
    *(vh_any *)row = to_bf16(ds0);
    if (r + 1 < rows) *(vh_any *)(row + stride) = to_bf16(ds1);
  }
  static void take(Arrays &arrays, WeightSink &sink, long stride) {
    sink.stride = stride;
    arrays.take(sink.p, kQueryBlock / 2 * stride);
    arrays.take(sink.ds, kQueryBlock / 2 * stride);
    arrays.take(sink.ds_rows, kQueryBlock / 2 * stride);
  }
};
#endif

}  // namespace
