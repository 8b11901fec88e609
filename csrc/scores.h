// Which keys a query may attend to, and what a raw product becomes before the softmax.
#pragma once
#include <omp.h>

#include "pack.h"
#include "regard.h"

namespace {

typedef regard_attention Call;

enum Status { kOk = 0, kNoMemory = 1 };

REGARD_INLINE int threads() { return omp_get_max_threads(); }

constexpr int kFewRows = 16;  // query rows of a kv head, all its heads together, that count as few

// The choice of kernel depends on the shape of one row's work alone, never on the batch or the number of keys.
REGARD_INLINE bool has_few_rows(const Call &x) { return x.q_len * (x.q_heads / x.kv_heads) <= kFewRows; }

// Key columns that the interval, the prefix and the length leave to a row: [0, prefix) and [low, high).
struct KeyRange {
  int64_t prefix, low, high;
  bool contains(int64_t j) const { return j < prefix || (j >= low && j < high); }
};

// One query row of one head.
struct Query {
  int64_t batch, head, row, slot;
  KeyRange keys;
  uint32_t line;  // the dropout rule's word for the row
};

REGARD_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : (x > high ? high : x); }

REGARD_INLINE KeyRange key_range_of(const Call &x, int64_t batch, int64_t slot) {
  int64_t length = x.k_length ? clamp(x.k_length[batch], 0, x.k_len) : x.k_len;
  int64_t low, high;
  // i - j <= x.high  and  i - j >= x.low, without leaving 64 bits at the open ends
  low = __builtin_sub_overflow(slot, x.high, &low) ? (x.high > 0 ? 0 : length) : clamp(low, 0, length);
  high = __builtin_sub_overflow(slot, x.low, &high) ? (x.low > 0 ? -1 : length) : clamp(high, -1, length);
  high = clamp(high + 1, 0, length);
  int64_t prefix = x.prefix ? clamp(x.prefix[batch], 0, length) : 0;
  if (prefix >= low && low < high) return {0, 0, prefix > high ? prefix : high};
  return {prefix, low, high > low ? high : low};
}

// Hull of the key ranges of query rows first ... last: the bounds only grow with the slot.
REGARD_INLINE KeyRange key_range_of_rows(const Call &x, int64_t batch, int64_t first, int64_t last) {
  KeyRange a = key_range_of(x, batch, x.q_start[batch] + first), b = key_range_of(x, batch, x.q_start[batch] + last);
  return {a.prefix > b.prefix ? a.prefix : b.prefix, a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

// Wellons' lowbias32, as in regard/backends/dropout.py.
REGARD_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

REGARD_INLINE Query query_of(const Call &x, int64_t batch, int64_t head, int64_t row) {
  int64_t slot = x.q_start[batch] + row;
  uint32_t line = 0;
  if (x.dropout_p > 0)
    line = mix(mix(mix((uint32_t)x.dropout_seed ^ (uint32_t)batch) ^ (uint32_t)head) ^ (uint32_t)row);
  return {batch, head, row, slot, key_range_of(x, batch, slot), line};
}

// Whether a term other than the interval, the prefix and the length decides which keys are read.
REGARD_INLINE bool has_mask(const Call &x) { return x.keep || x.q_segment || x.mask || x.tile_lines || x.bias; }
// Whether `hide` does no more than `cut`.
REGARD_INLINE bool is_only_cut(const Call &x) { return !(x.keep || x.q_segment || x.mask || x.tile_lines); }
// Whether `shape` has a step whose derivative is not the scale alone.
REGARD_INLINE bool has_slope(const Call &x) { return x.softcap > 0; }
// Whether scores are only scaled: then they stay raw products, and the softmax takes the scale on its way.
REGARD_INLINE bool is_only_scaled(const Call &x) {
  return !x.bias && !x.relative && !has_slope(x) && x.scale > 0 && x.scale * kLog2e < INFINITY;
}
// The factor from scores as they are stored, raw products or logits, to logits in nats.
REGARD_INLINE float nats_of(const Call &x) { return is_only_scaled(x) ? x.scale : 1.0f; }

// What the forward pass leaves of a row for the backward pass: weights are 2 to the (score - top) factor - log2_sum, as
// the softmax formed them. No log-sum-exp could stand for the two: in float32 it is rounded, where scores are large by
// many nats. For a row that attends to nothing they are 0 and +inf: then weights are 0.
struct RowSum {
  float top, log2_sum;  // the row's largest score, as stored; and of the sum of 2 to the (score - top) factor
};
REGARD_INLINE int64_t row_count(const Call &x) { return x.batch * x.q_heads * x.q_len; }
REGARD_INLINE RowSum row_sum(const Call &x, int64_t n) {
  const float *tops = x.kept + row_count(x);
  return {tops[n], tops[row_count(x) + n]};
}

// The listed tiles of one row of tiles.
struct TileLine {
  const int32_t *columns, *bits;
  long count;

  // The first tile of the line that does not end before a column.
  long from(int64_t column) const {
    int32_t least = (int32_t)(column / REGARD_TILE);
    long low = 0, high = count;
    while (low < high) {
      long middle = (low + high) / 2;
      if (columns[middle] < least)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  int64_t begin(long n) const { return (int64_t)columns[n] * REGARD_TILE; }
};
REGARD_INLINE TileLine tile_line(const Call &x, int64_t batch, int64_t head, int64_t row) {
  const int64_t *ends = x.tile_lines + batch * x.tile_stride[0] + head * x.tile_stride[1] + row / REGARD_TILE * 2;
  return {x.tile_column + ends[0], x.tile_bits + ends[0], (long)(ends[1] - ends[0])};
}
// The tile's word for a row, a bit for each column.
REGARD_INLINE uint64_t tile_word(const Call &x, const TileLine &line, long n, int64_t row) {
  return line.bits[n] < 0 ? ~(uint64_t)0 : x.bits[(int64_t)line.bits[n] * REGARD_TILE + row % REGARD_TILE];
}
// Whether any row `first_row` ... `last_row` of heads `head` ... `head` + `heads` has a tile that meets `keys` keys.
REGARD_INLINE bool tiles_meet(const Call &x, int64_t batch, int64_t head, long heads, int64_t first_row,
                              int64_t last_row, int64_t first, int keys) {
  if (x.tile_stride[1] == 0) heads = 1;
  for (int64_t row = first_row / REGARD_TILE * REGARD_TILE; row <= last_row; row += REGARD_TILE)
    for (long h = 0; h < heads; ++h) {
      TileLine line = tile_line(x, batch, head + h, row);
      long n = line.from(first);
      if (n < line.count && line.begin(n) < first + keys) return true;
    }
  return false;
}

// -inf in columns begin ... end of whole vectors.
REGARD_INLINE void conceal(float *s, int begin, int end) {
  vf never = splat(-INFINITY);
  for (int c = begin / kLanes * kLanes; c < end; c += kLanes) {
    vi column = lane_numbers() + c;
    vi hidden = (column >= begin) & (column < end);
    store(s + c, hidden ? never : load(s + c));
  }
}

// -inf where the key range ends, in columns first ... first + n of the row; n is a multiple of kUnit.
REGARD_INLINE void cut(const KeyRange &range, float *s, int64_t first, int64_t n) {
  bool interval = range.low < range.high;  // a prefix ends before it
  if (!interval || range.low > first)
    conceal(s, (int)clamp(range.prefix - first, 0, n), interval ? (int)clamp(range.low - first, 0, n) : (int)n);
  if (interval && range.high < first + n) conceal(s, (int)clamp(range.high - first, 0, n), (int)n);
}

// Raw products of one row in columns first ... first + n become logits in nats, in place: scaled, capped, biased. Nats,
// as the caller's: the largest finite bias would not fit float32 in any smaller unit.
// `slope`, where not null, takes the derivative of the cap.
void shape(const Call &x, const Query &q, float *s, float *slope, int64_t first, int64_t n) {
  int64_t exist = clamp(x.k_len - first, 0, n);  // columns past the last key are cut, and have no mask or bias
  if (x.softcap > 0) {
    vf inner = splat(x.scale / x.softcap), outer = splat(x.softcap);
    for (int64_t c = 0; c < n; c += kLanes) {
      vf t = tanhv(load(s + c) * inner);
      store(s + c, t * outer);
      if (slope) store(slope + c, 1.0f - t * t);
    }
  } else {
    for (int64_t c = 0; c < n; ++c) s[c] *= x.scale;
  }
  if (x.bias) {
    const int64_t *stride = x.bias_stride;
    const float *bias = x.bias + q.batch * stride[0] + q.head * stride[1] + q.row * stride[2] + first * stride[3];
    if (stride[3] == 1)
      for (int64_t c = 0; c < exist; ++c) s[c] += bias[c];
    else
      for (int64_t c = 0; c < exist; ++c) s[c] += bias[c * stride[3]];
  }
  if (x.relative) {
    int64_t index = first - q.slot + x.relative_zero;  // of column `first`; only allowed pairs need to lie inside
    const float *bias = x.relative + q.head * x.relative_stride + index;
    int64_t begin = clamp(-index, 0, exist), end = clamp(x.relative_count - index, 0, exist);
    for (int64_t c = begin; c < end; ++c) s[c] += bias[c];
  }
}

// -inf outside of the listed tiles, and where their bits are 0. Tiles end at whole units of columns.
void hide_by_tiles(const Call &x, const Query &q, float *s, int64_t first, int64_t n) {
  TileLine line = tile_line(x, q.batch, q.head, q.row);
  long at = line.from(first);
  vf never = splat(-INFINITY);
  for (int64_t c = 0; c < n;) {
    int64_t end = clamp(((first + c) / REGARD_TILE + 1) * REGARD_TILE - first, 0, n);
    bool listed = at < line.count && line.begin(at) <= first + c;
    uint64_t word = listed ? tile_word(x, line, at, q.row) >> (first + c) % REGARD_TILE : 0;
    if (listed && line.bits[at++] < 0) c = end;
    for (; c < end; c += kLanes) {
      vi allowed = (vi)(((int)(word & ((1u << kLanes) - 1)) >> lane_numbers()) & 1) != 0;
      store(s + c, allowed ? load(s + c) : never);
      word >>= kLanes;
    }
  }
}

// -inf for the pairs that may not attend, after `shape`.
void hide(const Call &x, const Query &q, float *s, int64_t first, int64_t n) {
  int64_t exist = clamp(x.k_len - first, 0, n);
  if (x.keep) {
    const uint8_t *keep = x.keep + q.batch * x.k_len + first;
    for (int64_t c = 0; c < exist; ++c) s[c] = keep[c] ? s[c] : -INFINITY;
  }
  if (x.q_segment) {
    int64_t own = x.q_segment[q.batch * x.q_len + q.row];
    const int64_t *segment = x.k_segment + q.batch * x.k_len + first;
    for (int64_t c = 0; c < exist; ++c) s[c] = segment[c] == own ? s[c] : -INFINITY;
  }
  if (x.mask) {
    const int64_t *stride = x.mask_stride;
    const uint8_t *mask = x.mask + q.batch * stride[0] + q.head * stride[1] + q.row * stride[2] + first * stride[3];
    if (stride[3] == 1)
      for (int64_t c = 0; c < exist; ++c) s[c] = mask[c] ? s[c] : -INFINITY;
    else
      for (int64_t c = 0; c < exist; ++c) s[c] = mask[c * stride[3]] ? s[c] : -INFINITY;
  }
  if (x.tile_lines) hide_by_tiles(x, q, s, first, n);
  cut(q.keys, s, first, n);
}

// Weights of one row times 1 where they are kept and 0 where they are dropped.
void drop(const Call &x, const Query &q, float *p, int64_t first, int64_t n) {
  uint64_t threshold = (uint64_t)((double)x.dropout_p * 4294967296.0);
  uint32_t line = mix(q.line ^ (uint32_t)((uint64_t)x.dropout_seed >> 32));
  if (threshold > 0xffffffffu) {
    memset(p, 0, n * sizeof(float));
    return;
  }
  uint32_t least = (uint32_t)threshold, column = (uint32_t)first;
  for (int64_t c = 0; c < n; ++c) p[c] = mix(line ^ (column + (uint32_t)c)) >= least ? p[c] : 0.0f;
}
REGARD_INLINE float kept_factor(const Call &x) { return x.dropout_p < 1 ? 1.0f / (1.0f - x.dropout_p) : 0.0f; }

bool is_listed(const Call &x, const Query &q, int64_t column) {
  TileLine line = tile_line(x, q.batch, q.head, q.row);
  long n = line.from(column);
  if (n == line.count || line.begin(n) > column) return false;
  return tile_word(x, line, n, q.row) >> column % REGARD_TILE & 1;
}

// Whether any query row of the batch row may read the key: asked only of keys with a value that is not finite.
bool is_read(const Call &x, int64_t batch, int64_t column) {
  if (x.keep && !x.keep[batch * x.k_len + column]) return false;
  if (!key_range_of_rows(x, batch, 0, x.q_len - 1).contains(column)) return false;
  for (int64_t row = 0; row < x.q_len; ++row) {
    Query q = query_of(x, batch, 0, row);
    if (!q.keys.contains(column)) continue;
    if (x.q_segment && x.q_segment[batch * x.q_len + row] != x.k_segment[batch * x.k_len + column]) continue;
    if (!x.mask && !x.tile_lines) return true;
    for (q.head = 0; q.head < x.q_heads; ++q.head) {
      if (x.tile_lines && !is_listed(x, q, column)) continue;
      const int64_t *stride = x.mask_stride;
      if (!x.mask || x.mask[batch * stride[0] + q.head * stride[1] + row * stride[2] + column * stride[3]]) return true;
    }
  }
  return false;
}

}  // namespace
