// Softmax attention, forward: online softmax over packed key blocks.
//
// The query rows of all heads that share a kv head are flattened, heads inside tokens, and cut into tasks. A task
// walks key blocks at fixed slots (outer) and groups of six rows (inner): scores, softmax, weights times V. A row's
// arithmetic depends only on its own keys' slots, so its bits are the same in any batch, task or thread.
#pragma once
#include "column_ranges.h"

namespace {

// Rows of weights from rows of scores, in place, with the running maximum and sum. Weights are rounded to bfloat16
// into `halves` where the product reads those. The maximum is a score as stored, and what is scaled are differences of
// scores: a rounded product in their place would be off by whole nats from 2^24 nats on.
template <class Op>
struct Softmax {
  float *scores;  // [kTileRows][stride]
  bf16 *halves;   // the same shape
  long stride;
  float scale;  // from differences of scores to base-2 logits

  REGARD_INLINE void weights(const Call &x, const Query *queries, int rows, const ColumnRanges &ranges, int64_t first,
                             float *top, float *sum, float *rescale) const {
    float before[kUnit] = {}, base[kTileRows];
    for (int r = 0; r < rows; ++r) {
      vf most = splat(-INFINITY);
      for (int n = 0; n < ranges.count; ++n)
        for (int c = ranges.range[n].begin; c < ranges.range[n].end; c += kLanes)
          most = vmax(most, load(scores + r * stride + c));
      float now = max_lanes(most);
      now = now > top[r] ? now : top[r];
      base[r] = now == -INFINITY ? 0.0f : now;
      before[r] = (top[r] - base[r]) * scale;
      top[r] = now;
    }
    for (int c = 0; c < kTileRows; c += kLanes) store(before + c, exp2v<false>(load(before + c)));
    for (int r = 0; r < rows; ++r) {
      rescale[r] = before[r];
      sum[r] = sum[r] * before[r] + row(x, queries[r], ranges, first, r, base[r]);
    }
  }

 private:
  REGARD_INLINE float row(const Call &x, const Query &query, const ColumnRanges &ranges, int64_t first, int r,
                          float base) const {
    float *s = scores + r * stride;
    vf total = {}, factor = splat(scale), most = splat(base);
    for (int n = 0; n < ranges.count; ++n) {
      ColumnRange range = ranges.range[n];
      for (int c = range.begin; c < range.end; c += kLanes) {
        vf p = exp2v<Op::coarse>((load(s + c) - most) * factor);
        total += p;
        if (Op::per_word == 2 && x.dropout_p == 0)
          *(vh_any *)(halves + r * stride + c) = to_bf16(p);
        else
          store(s + c, p);
      }
      if (x.dropout_p > 0) {
        drop(x, query, s + range.begin, first + range.begin, range.end - range.begin);
        if (Op::per_word == 2)
          for (int c = range.begin; c < range.end; c += kLanes)
            *(vh_any *)(halves + r * stride + c) = to_bf16(load(s + c));
      }
    }
    return sum_lanes(total);
  }
};

// The output and the log-sum-exp of a row from its sums; `top` is its largest score, as stored.
template <class In>
REGARD_INLINE void write_row(const Call &x, const Query &q, const float *sums, float top, float sum) {
  float factor = sum == 0 ? 0.0f : kept_factor(x) / sum;
  int64_t to = q.batch * x.out_stride[0] + q.head * x.out_stride[1] + q.row * x.out_stride[2];
  if (sizeof(In) == sizeof(float) || x.out_f32) {
    float *out = (float *)x.out + to;
    if (sum == 0) {
      memset(out, 0, x.v_dim * sizeof(float));  // what is in `sums` may be anything
    } else {
      for (long c = 0; c < x.v_dim; c += kLanes) store_some(out + c, load(sums + c) * factor, x.v_dim - c);
    }
  } else {
    bf16 *out = (bf16 *)x.out + to;
    if (sum == 0) {
      memset(out, 0, x.v_dim * sizeof(bf16));
    } else {
      for (long c = 0; c < x.v_dim; c += kLanes) store_some(out + c, load(sums + c) * factor, x.v_dim - c);
    }
  }
  if (!x.lse) return;
  int64_t n = (q.batch * x.q_heads + q.head) * x.q_len + q.row;
  bool dead = sum == 0;
  float nats = nats_of(x), rest = logf(sum), lse = fmaf(top, nats, rest);
  x.lse[n] = dead ? -INFINITY : lse;
  if (!x.kept) return;
  float *low = x.kept + n, *tops = low + row_count(x), *log2_sum = tops + row_count(x);
  *low = dead || lse - lse != 0 ? 0.0f : fmaf(top, nats, -lse) + rest;
  *tops = dead ? 0.0f : top;
  *log2_sum = dead ? INFINITY : log2f(sum);
}

// A row whose keys were read in `count` parts, merged in the order of the keys. `part(n)` is the n-th part's sums of
// weights times V, `top(n)` its maximum, `total(n)` its sum of weights; `out` may be the first part.
template <class In, class Part, class Top, class Total>
void merge_row(const Call &x, const Query &q, int64_t count, long columns, float *out, const Part &part, const Top &top,
               const Total &total) {
  float most = -INFINITY, sum = 0, scale = nats_of(x) * kLog2e;
  for (int64_t n = 0; n < count; ++n) most = top(n) > most ? top(n) : most;
  for (int64_t n = 0; n < count; ++n) {
    float weight = top(n) == -INFINITY ? 0.0f : exp2f((top(n) - most) * scale);
    sum += weight * total(n);
    const float *from = part(n);
    for (long c = 0; c < columns; ++c) {
      float value = weight == 0 ? 0.0f : weight * from[c];
      out[c] = n == 0 ? value : out[c] + value;
    }
  }
  write_row<In>(x, q, out, most, sum);
}

constexpr long kSplitRows = 256;      // query rows of a kv head up to which long rows of keys are read in parts ...
constexpr int64_t kSplitKeys = 4096;  // ... of so many keys: or one head's few rows would be one thread's work

template <class In, class Op>
class Forward {
 public:
  explicit Forward(const Call &call)
      : x(call), group_heads(call.q_heads / call.kv_heads), only_scaled(is_only_scaled(call)) {
    k_words = words_of<Op>(x.k_dim);
    q_words = round_up(k_words, kLanes);
    columns = round_up(x.v_dim, kUnit);
    long per_key = k_words + columns / Op::per_word;
    block = (int)clamp((1 << 17) / (per_key + 1) / kPanel * kPanel, 128, kMaxBlock);
    long longest = round_up(x.k_len, kPanel);
    if (longest < block) block = (int)(longest ? longest : kPanel);
    panels = (columns + kPanel - 1) / kPanel;
    flat = x.q_len * group_heads;
    splits = flat <= kSplitRows && x.k_len > kSplitKeys ? (x.k_len + kSplitKeys - 1) / kSplitKeys : 1;
    // tasks long enough to repay the packing of keys, short enough for 2 MB of rows
    long rows = clamp((1 << 19) / (q_words + columns), 96, 4096);
    int64_t pairs = x.batch * x.kv_heads;
    if (threads() > 1)
      while (rows > 96 && pairs * splits * ((flat + rows - 1) / rows) < 4 * threads()) rows = (rows + 1) / 2;
    slices = (flat + rows - 1) / rows;
  }

  int run() {
    int64_t pairs = x.batch * x.kv_heads, tasks = pairs * splits * slices;
    int failed = 0;
    if (splits > 1 && !(parts = (float *)malloc(pairs * splits * flat * part_row() * sizeof(float)))) return kNoMemory;
#pragma omp parallel for schedule(dynamic, 1) if (tasks > 1)
    for (int64_t task = 0; task < tasks; ++task) {
      int64_t slice = slices - 1 - task / (pairs * splits), split = task / pairs % splits, pair = task % pairs;
      if (!work(pair, split, flat * slice / slices, flat * (slice + 1) / slices)) {
#pragma omp atomic write
        failed = 1;
      }
    }
    if (splits > 1) {
      if (!failed) merge();
      free(parts);
    }
    return failed ? kNoMemory : kOk;
  }

 private:
  const Call &x;
  long group_heads;
  bool only_scaled;
  long k_words, q_words, columns, panels, flat, slices;
  int64_t splits;
  int block;
  float *parts = nullptr;  // of split rows, per pair, split and row: sums, then the maximum and the sum of weights

  long part_row() const { return columns + kUnit; }
  float *part(int64_t pair, int64_t split, long row) const {
    return parts + ((pair * splits + split) * flat + row) * part_row();
  }

  void merge() {
    int64_t rows = x.batch * x.kv_heads * flat;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
      int64_t pair = n / flat;
      long row = n % flat;
      Query q = query_of(x, pair / x.kv_heads, pair % x.kv_heads * group_heads + row % group_heads, row / group_heads);
      merge_row<In>(
          x, q, splits, columns, part(pair, 0, row), [&](int64_t s) { return part(pair, s, row); },
          [&](int64_t s) { return part(pair, s, row)[columns]; },
          [&](int64_t s) { return part(pair, s, row)[columns + 1]; });
    }
  }

  struct Memory {
    word *q, *k, *v;
    float *out, *top, *sum, *scores;
    bf16 *halves;
    Query *queries;
    Group *groups;
  };

  void take(Arrays &arrays, Memory &m, long rows) {
    size_t strip = (size_t)kTileRows * block;
    arrays.take(m.q, rows * q_words);
    arrays.take(m.k, block * k_words);
    arrays.take(m.v, (size_t)panels * (block / Op::per_word) * kPanel);
    arrays.take(m.out, rows * columns);
    arrays.take(m.top, rows);
    arrays.take(m.sum, rows);
    arrays.take(m.scores, strip);
    arrays.take(m.halves, strip);
    arrays.take(m.queries, rows);
    arrays.take(m.groups, group_count(rows));
  }

  bool work(int64_t pair, int64_t split, int64_t begin, int64_t end) {
    int64_t batch = pair / x.kv_heads, kv_head = pair % x.kv_heads;
    long rows = end - begin, groups = group_count(rows);
    Memory m;
    if (!reserve([&](Arrays &arrays) { take(arrays, m, rows); })) return false;
    int64_t row = begin / group_heads, head = kv_head * group_heads + begin % group_heads;
    for (long r = 0; r < rows; ++r, ++head) {
      if (head == (kv_head + 1) * group_heads) ++row, head = kv_head * group_heads;
      m.queries[r] = query_of(x, batch, head, row);
      copy_row<In, Op>(m.q + r * q_words, (const In *)x.q + at(x.q_stride, batch, head, row), x.k_dim);
      m.top[r] = -INFINITY;
      m.sum[r] = 0;
    }
    for (long g = 0; g < groups; ++g) {
      int first = (int)group_begin(rows, groups, g), count = (int)group_begin(rows, groups, g + 1) - first;
      m.groups[g] = {first, count, hull_of(m.queries + first, count), false};
    }
    KeyRange hull = hull_of(m.queries, (int)rows);
    int64_t last = hull.high > hull.prefix ? hull.high : hull.prefix;
    int64_t origin = split * kSplitKeys, end_of_keys = x.k_len;  // blocks are counted from here, whatever the rows
    if (splits > 1 && end_of_keys > origin + kSplitKeys) end_of_keys = origin + kSplitKeys;
    if (last > end_of_keys) last = end_of_keys;
    int64_t start = hull.prefix > 0 || hull.low < origin ? origin : origin + (hull.low - origin) / block * block;
    int64_t last_row = (end - 1) / group_heads;
    for (int64_t first = start; first < last; first += block) {
      int keys = (int)clamp(end_of_keys - first, 0, block);
      if (!x.tile_lines ||
          tiles_meet(x, batch, kv_head * group_heads, group_heads, begin / group_heads, last_row, first, keys))
        attend(m, batch, kv_head, first, keys, groups);
    }
    for (long r = 0; r < rows; ++r) {
      if (splits == 1) {
        write_row<In>(x, m.queries[r], m.out + r * columns, m.top[r], m.sum[r]);
        continue;
      }
      float *to = part(pair, split, begin + r);
      if (m.sum[r] != 0) memcpy(to, m.out + r * columns, columns * sizeof(float));
      to[columns] = m.top[r], to[columns + 1] = m.sum[r];
    }
    return true;
  }

  static int64_t at(const int64_t *stride, int64_t batch, int64_t head, int64_t token) {
    return batch * stride[0] + head * stride[1] + token * stride[2];
  }

  void attend(const Memory &m, int64_t batch, int64_t kv_head, int64_t first, int keys, long groups) {
    bool packed[kMaxPanels] = {};
    PanelFacts<kPanel> facts;
    bool sparse = is_sparse(x), only_cut = is_only_cut(x);
    if (sparse) facts.read(x, batch, first, keys);
    Softmax<Op> softmax = {m.scores, m.halves, block, nats_of(x) * kLog2e};
    ColumnRanges ranges;
    for (long g = 0; g < groups; ++g) {
      Group &group = m.groups[g];
      const Query *queries = m.queries + group.begin;
      find_ranges<kPanel>(ranges, x, group, queries, first, keys, sparse ? &facts : nullptr);
      if (!ranges.count) continue;
      const word *q = m.q + group.begin * q_words;
      for (int n = 0; n < ranges.count; ++n) {
        ColumnRange range = ranges.range[n];
        for (int c = range.begin; c < range.end;) {
          int panel = c / kPanel, end = (panel + 1) * kPanel < range.end ? (panel + 1) * kPanel : range.end;
          if (!packed[panel]) pack(m, batch, kv_head, first, panel, keys);
          packed[panel] = true;
          const word *k = m.k + panel * kPanel * k_words + c % kPanel;
          product<Op, kZero>({q, q_words, 1, k, kPanel, k_words, m.scores + c, block, nullptr, 0}, group.rows,
                             (end - c) / kUnit);
          c = end;
        }
        for (int r = 0; r < group.rows; ++r) {
          float *s = m.scores + r * block + range.begin;
          if (!only_scaled) shape(x, queries[r], s, nullptr, first + range.begin, range.end - range.begin);
          if (only_cut)
            cut(queries[r].keys, s, first + range.begin, range.end - range.begin);
          else
            hide(x, queries[r], s, first + range.begin, range.end - range.begin);
        }
      }
      float rescale[kTileRows];
      softmax.weights(x, queries, group.rows, ranges, first, m.top + group.begin, m.sum + group.begin, rescale);
      accumulate(m, group, ranges, rescale);
      group.started = true;
    }
  }

  void pack(const Memory &m, int64_t batch, int64_t kv_head, int64_t first, int panel, int keys) {
    int64_t slot = first + panel * kPanel;
    long count = keys - panel * kPanel < kPanel ? keys - panel * kPanel : kPanel;
    const In *k = (const In *)x.k + at(x.k_stride, batch, kv_head, slot);
    const In *v = (const In *)x.v + at(x.v_stride, batch, kv_head, slot);
    pack_transposed<In, Op>(m.k + panel * kPanel * k_words, k, x.k_stride[2], count, x.k_dim, kPanel);
    // a weight of 0 does not silence NaN or infinity: where nobody reads the key, its values become 0
    KeyRange span = key_range_of_rows(x, batch, 0, x.q_len - 1);
    bool all_read = !has_mask(x) && slot >= span.low && slot + count <= span.high;
    bool finite = all_read || are_finite(v, x.v_stride[2], count, x.v_dim);
    auto row = [&](long n) -> const In * {
      const In *from = v + n * x.v_stride[2];
      if (n >= count) return nullptr;
      return finite || are_finite(from, 0, 1, x.v_dim) || is_read(x, batch, slot + n) ? from : nullptr;
    };
    long panel_words = (long)block / Op::per_word * kPanel;
    Rows<In, Op>::pack(m.v + panel * kPanel / Op::per_word * kPanel, panel_words, round_up(count, Op::per_word),
                       x.v_dim, row);
  }

  // out = diag(rescale) out + weights V
  void accumulate(const Memory &m, const Group &group, const ColumnRanges &ranges, const float *rescale) {
    const word *weights = Op::per_word == 2 ? (const word *)m.halves : (const word *)m.scores;
    long stride = block / Op::per_word, panel_words = stride * kPanel;
    for (int n = 0; n < ranges.count; ++n) {
      long begin = ranges.range[n].begin / Op::per_word, words = words_of<Op>(ranges.range[n].cut) - begin;
      for (long c = 0; c < columns; c += kPanel) {
        int units = (int)((columns - c < kPanel ? columns - c : kPanel) / kUnit);
        const word *v = m.v + c / kPanel * panel_words + begin * kPanel;
        Product p = {weights + begin, stride,  1, v, kPanel, words, m.out + group.begin * columns + c,
                     columns,         rescale, 0};
        if (n > 0)
          product<Op, kAdd>(p, group.rows, units);
        else if (group.started)
          product<Op, kScaled>(p, group.rows, units);
        else
          product<Op, kZero>(p, group.rows, units);
      }
    }
  }
};

}  // namespace
