// Which columns of a key block a group of query rows reads.
#pragma once
#include "scores.h"

namespace {

constexpr int kMaxBlock = 512;  // keys of a block; six rows of scores stay in the L1 cache
constexpr int kMaxPanels = 8;   // panels of a block

// Columns of a block that a group of rows reads: [begin, end) in whole units, none read from `cut` on.
struct ColumnRange {
  int begin, end, cut;
};
struct ColumnRanges {
  int count;
  ColumnRange range[kMaxPanels];
};

struct Group {
  int begin, rows;
  KeyRange hull;
  bool started;  // whether its sums hold anything yet
};

// Hull of the rows' key ranges.
REGARD_INLINE KeyRange hull_of(const Query *queries, int rows) {
  KeyRange hull = {0, INT64_MAX, 0};
  for (int r = 0; r < rows; ++r) {
    const KeyRange &range = queries[r].keys;
    if (range.prefix > hull.prefix) hull.prefix = range.prefix;
    if (range.low >= range.high) continue;
    if (range.low < hull.low) hull.low = range.low;
    if (range.high > hull.high) hull.high = range.high;
  }
  if (hull.low > hull.high) hull.low = hull.high;
  return hull;
}

// Panels are `width` columns: 64 in the forward pass, 48 in the backward pass.
// What of keep and segments can rule out whole panels of the block that starts at a key slot.
template <int width>
struct PanelFacts {
  bool any_kept[kMaxPanels];
  int64_t segment_low[kMaxPanels], segment_high[kMaxPanels];

  void read(const Call &x, int64_t batch, int64_t first, int64_t keys) {
    for (int64_t c = 0; c < keys; ++c) {
      int panel = (int)(c / width);
      int64_t j = batch * x.k_len + first + c;
      if (c % width == 0) {
        any_kept[panel] = !x.keep;
        segment_low[panel] = INT64_MAX;
        segment_high[panel] = INT64_MIN;
      }
      if (x.keep && x.keep[j]) any_kept[panel] = true;
      if (x.k_segment && x.k_segment[j] < segment_low[panel]) segment_low[panel] = x.k_segment[j];
      if (x.k_segment && x.k_segment[j] > segment_high[panel]) segment_high[panel] = x.k_segment[j];
    }
  }
  bool alive(const Call &x, const Query *queries, int rows, int panel) const {
    if (!any_kept[panel]) return false;
    if (!x.q_segment) return true;
    for (int r = 0; r < rows; ++r) {
      int64_t own = x.q_segment[queries[r].batch * x.q_len + queries[r].row];
      if (own >= segment_low[panel] && own <= segment_high[panel]) return true;
    }
    return false;
  }
};

// The panels of a block in which listed tiles lie, a bit each.
template <int width>
unsigned listed_panels(const Call &x, const Query *queries, int rows, int64_t first, int keys) {
  unsigned panels = 0;
  for (int r = 0; r < rows; ++r) {
    const Query &q = queries[r];
    bool seen = false;  // in a neighbour that has the same line
    for (int n = 0; n < r && !seen; ++n)
      seen = q.row / REGARD_TILE == queries[n].row / REGARD_TILE && (!x.tile_stride[1] || q.head == queries[n].head);
    if (seen) continue;
    TileLine line = tile_line(x, q.batch, q.head, q.row);
    for (long n = line.from(first); n < line.count && line.begin(n) < first + keys; ++n) {
      int64_t begin = clamp(line.begin(n) - first, 0, keys), end = clamp(line.begin(n) + REGARD_TILE - first, 0, keys);
      for (int64_t panel = begin / width; panel * width < end; ++panel) panels |= 1u << panel;
    }
  }
  return panels;
}

// The ranges of a group in the block of `keys` keys at slot `first`; `facts` is null where panels cannot be ruled out.
template <int width>
REGARD_INLINE void find_ranges(ColumnRanges &ranges, const Call &x, const Group &group, const Query *queries,
                               int64_t first, int keys, const PanelFacts<width> *facts) {
  ranges.count = 0;
  unsigned listed = x.tile_lines ? listed_panels<width>(x, queries, group.rows, first, keys) : ~0u;
  if (!listed) return;
  int prefix = (int)clamp(group.hull.prefix - first, 0, keys);
  int low = (int)clamp(group.hull.low - first, 0, keys), high = (int)clamp(group.hull.high - first, 0, keys);
  for (int panel = 0; panel < keys; panel += width) {
    int end = panel + width < keys ? panel + width : keys;
    bool in_prefix = panel < prefix, in_interval = low < end && high > panel && low < high;
    if (!in_prefix && !in_interval) continue;
    if (!(listed >> panel / width & 1)) continue;
    if (facts && !facts->alive(x, queries, group.rows, panel / width)) continue;
    int begin = in_prefix || low < panel ? panel : low / kUnit * kUnit;
    int cut = in_interval ? (high < end ? high : end) : 0;
    if (in_prefix && cut < (prefix < end ? prefix : end)) cut = prefix < end ? prefix : end;
    ColumnRange *last = ranges.count ? &ranges.range[ranges.count - 1] : nullptr;
    if (last && last->cut == begin)
      last->cut = cut;
    else
      ranges.range[ranges.count++] = {begin, 0, cut};
    ranges.range[ranges.count - 1].end = (int)round_up(cut, kUnit);
  }
}

// Whether `PanelFacts` may rule out panels.
REGARD_INLINE bool is_sparse(const Call &x) { return x.keep || x.q_segment; }

}  // namespace
