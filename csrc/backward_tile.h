// Backward pass, one tile of (query, key) pairs: weights P and score gradients dS from registers.
//
//     P = exp(S - max S) / sum exp(S - max S),  dP = dO V^T,  dS = P (f dP - delta),  delta = rowsum(dO O) - d_lse
//
// with f the dropout factor. P is 0 for pairs that may not attend, and dS then exactly 0, whatever V holds there.
#pragma once
#include "column_ranges.h"

namespace {

constexpr int kBackwardWidth = 48;  // columns of a tile: a multiple of 6 and of 16

struct BackwardTile {
  const word *d_out, *v;  // rows of dO; V^T, kBackwardWidth columns
  long d_out_row, words;
  const float *s;             // [6][kBackwardWidth] scores, as stored
  const float *kept, *slope;  // dropout factors and derivatives of the cap, the same shape, or null
  const RowSum *sum;          // per row
  const float *delta;
  float factor;  // from differences of scores to base-2 logits
};

template <class Op, int R, int V, class Sink>
void backward_tile(const BackwardTile &a, const Sink &sink, int column, int offset) {
  Tile<Op, R, V> tile;
  tile.zero();
  tile.multiply(a.d_out, a.d_out_row, 1, a.v + offset, kBackwardWidth, a.words);
  each<R * V>(REGARD_EACH {  // column by column, rows in pairs
    constexpr int v = i / R, r = i % R;
    if constexpr (r % 2 == 0) {
      constexpr int next = r + 1 < R ? r + 1 : r;
      auto at = [&](int row) { return row * kBackwardWidth + offset + v * kLanes; };
      auto weight = [&](int row) __attribute__((always_inline)) {
        return exp2v<Op::coarse>((load(a.s + at(row)) - a.sum[row].top) * a.factor - a.sum[row].log2_sum);
      };
      auto gradient = [&](int row, vf p, vf dp) __attribute__((always_inline)) {
        if (a.kept) dp *= load(a.kept + at(row));
        vf ds = p * (dp - a.delta[row]);
        if (a.slope) ds *= load(a.slope + at(row));
        return p == 0.0f ? vf{} : ds;
      };
      vf p = weight(r), q = next > r ? weight(next) : vf{};
      vf ds = gradient(r, p, tile.c[r][v]), dt = next > r ? gradient(next, q, tile.c[next][v]) : vf{};
      if (a.kept) {
        p *= load(a.kept + at(r));
        if (next > r) q *= load(a.kept + at(next));
      }
      sink.put(r, R, column + offset + v * kLanes, p, q, ds, dt);
    }
  });
}

template <class Op, int V, class Sink>
void backward_rows(const BackwardTile &a, const Sink &sink, int rows, int column, int offset) {
  switch (rows) {
    case 1: return backward_tile<Op, 1, V>(a, sink, column, offset);
    case 2: return backward_tile<Op, 2, V>(a, sink, column, offset);
    case 3: return backward_tile<Op, 3, V>(a, sink, column, offset);
    case 4: return backward_tile<Op, 4, V>(a, sink, column, offset);
    case 5: return backward_tile<Op, 5, V>(a, sink, column, offset);
    default: return backward_tile<Op, 6, V>(a, sink, column, offset);
  }
}

// Columns offset ... offset + 16 units of the panel, which the sink calls column + offset and so on.
template <class Op, class Sink>
void backward_tiles(const BackwardTile &a, const Sink &sink, int rows, int column, int offset, int units) {
  constexpr int most = kTileUnits < 3 ? kTileUnits : 3;
  for (; units > most; units -= most, offset += most * kUnit)
    backward_rows<Op, most * kUnitVectors>(a, sink, rows, column, offset);
  if constexpr (most == 3) {
    if (units == 1) return backward_rows<Op, kUnitVectors>(a, sink, rows, column, offset);
    if (units == 2) return backward_rows<Op, 2 * kUnitVectors>(a, sink, rows, column, offset);
  }
  backward_rows<Op, most * kUnitVectors>(a, sink, rows, column, offset);
}

// Scores of a group of query rows against columns begin ... end of one panel, ready for backward_rows.
template <class Op>
struct TileScores {
  float *s, *slope, *kept;  // [kTileRows][kBackwardWidth] each
  bool only_scaled;

  static void take(Arrays &arrays, TileScores &scores) {
    arrays.take(scores.s, kTileRows * kBackwardWidth);
    arrays.take(scores.slope, kTileRows * kBackwardWidth);
    arrays.take(scores.kept, kTileRows * kBackwardWidth);
  }
  // `k` is the panel of K^T, `first` the slot of its first column
  void compute(const Call &x, const Query *queries, const word *q, long q_row, const word *k, long words, int rows,
               int64_t first, int begin, int end) const {
    product<Op, kZero>({q, q_row, 1, k + begin, kBackwardWidth, words, s + begin, kBackwardWidth, nullptr, 0}, rows,
                       (end - begin) / kUnit);
    int count = end - begin;
    for (int r = 0; r < rows; ++r) {
      int offset = r * kBackwardWidth + begin;
      if (!only_scaled) shape(x, queries[r], s + offset, has_slope(x) ? slope + offset : nullptr, first + begin, count);
      hide(x, queries[r], s + offset, first + begin, count);
      if (x.dropout_p == 0) continue;
      float factor = kept_factor(x);
      for (int c = 0; c < count; ++c) kept[offset + c] = factor;
      drop(x, queries[r], kept + offset, first + begin, count);
    }
  }
};

}  // namespace
