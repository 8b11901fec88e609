// Matrices in panels of 64 columns, and products of many tiles with them.
#pragma once
#include "pack.h"

namespace {

REGARD_INLINE long blocks_of(long n, long size) { return (n + size - 1) / size; }

// A matrix of `rows` rows in panels of 64 columns, each panel's rows together: what a product reads and writes.
struct Panels {
  float *p;
  long rows;
  REGARD_INLINE float *panel(long c) const { return p + c / kPanel * rows * kPanel; }
  REGARD_INLINE float *at(long r, long c) const { return panel(c) + r * kPanel + c % kPanel; }
};
REGARD_INLINE long panels_size(long rows, long columns) { return (columns + kPanel - 1) / kPanel * rows * kPanel; }

// Rows 0 ... n - 1 and columns 0 ... `columns` - 1 (rounded up to 16) of C (+)= A B.
// A: element (r, w) at a + r * a_row + w * a_step; B: `words` rows, b_step apart; C: rows c_row apart.
template <Start start>
REGARD_INLINE void multiply(float *c, long c_row, const float *a, long a_row, long a_step, const float *b, long b_step,
                            long words, long rows, long columns, const float *factor = nullptr) {
  int units = (int)((columns + kUnit - 1) / kUnit);
  long groups = group_count(rows);
  for (long g = 0; g < groups; ++g) {
    long r = group_begin(rows, groups, g), count = group_begin(rows, groups, g + 1) - r;
    product<Float32, start>({(const word *)a + r * a_row, a_row, a_step, (const word *)b, b_step, words, c + r * c_row,
                             c_row, factor ? factor + r : nullptr, 0},
                            (int)count, units);
  }
}

// The same with B and C in panels; rows of C below `lower` are cut at their own number (A is lower triangular).
// `between` is called after every tile.
struct Nothing {
  REGARD_INLINE void operator()() const {}
};
template <Start start, class Between = Nothing>
REGARD_INLINE void multiply_panels(const Panels &c, long c_first, const float *a, long a_row, long a_step,
                                   const Panels &b, long words, long rows, long columns, const float *factor = nullptr,
                                   bool lower = false, Between &&between = {}) {
  long groups = group_count(rows);
  for (long column = 0; column < columns; column += kPanel) {
    long width = columns - column < kPanel ? columns - column : kPanel;
    for (long g = 0; g < groups; ++g) {
      long r = group_begin(rows, groups, g), end = group_begin(rows, groups, g + 1);
      product<Float32, start>({(const word *)a + r * a_row, a_row, a_step, (const word *)b.panel(column), kPanel,
                               lower && end < words ? end : words, c.panel(column) + (c_first + r) * kPanel, kPanel,
                               factor ? factor + r : nullptr, 0},
                              (int)(end - r), (int)((width + kUnit - 1) / kUnit));
      between();
    }
  }
}

// C += A B^T summed over columns of A in panels: A is (rows of `a` from a_first) in panels, B^T is [columns][ld] rows.
template <Start first>
REGARD_INLINE void multiply_across(float *c, long c_row, const Panels &a, long a_first, const float *b, long b_step,
                                   long across, long rows, long columns) {
  for (long column = 0; column < across; column += kPanel) {
    long words = across - column < kPanel ? across - column : kPanel;
    const float *left = a.panel(column) + a_first * kPanel, *right = b + column * b_step;
    for (long at = 0; at < columns; at += kPanel) {
      long width = columns - at < kPanel ? columns - at : kPanel;
      if (column == 0)
        multiply<first>(c + at, c_row, left, kPanel, 1, right + at, b_step, words, rows, width);
      else
        multiply<kAdd>(c + at, c_row, left, kPanel, 1, right + at, b_step, words, rows, width);
    }
  }
}

// The transpose of rows in panels, as rows of `width` words: to[c][r] = from(first + r, c).
REGARD_INLINE void transpose_panels(float *to, long width, const Panels &from, long first, long rows, long columns) {
  for (long column = 0; column < columns; column += kPanel) {
    long count = columns - column < kPanel ? columns - column : kPanel;
    pack_transposed<float, Float32>((word *)to + column * width, from.panel(column) + first * kPanel, kPanel, rows,
                                    count, width);
  }
}

}  // namespace
