// Softmax attention, forward, for a few query rows against many keys: reading the cache is the work.
//
// Keys are cut into splits at fixed slots. A task reads one split of one kv head once for all query rows of its heads
// and leaves an unnormalised sum; the splits of a row are then merged in order. Nothing is packed but pairs of
// bfloat16 values, where V is no whole panels wide.
#pragma once
#include "forward.h"

namespace {

constexpr int kDecodeKeys = 1024;  // keys of a task
constexpr int kValueRows = 32;     // rows of V that are read before their sums are put back
constexpr long kAhead = 32 << 10;  // bytes to prefetch ahead

// kLanes vectors -> the vector of their sums.
template <int n = kLanes>
REGARD_INLINE vf sums(vf (&x)[n]) {
  if constexpr (n == 1) {
    return x[0];
  } else {
    vf y[n / 2];
    each<n / 2>(REGARD_EACH {
      y[i] = __builtin_shuffle(x[i], x[i + n / 2], kLowHalves) + __builtin_shuffle(x[i], x[i + n / 2], kHighHalves);
    });
    return sums<n / 2>(y);
  }
}

// C += A V for R rows of weights and 64 columns of V, whose rows are read from memory as they are.
struct Values {
  const word *weights;
  long stride;  // of the weights' rows, in words
  const void *v;
  long v_row, count, ahead;  // rows of V: their stride in elements, how many, and how far to prefetch (0: not)
  float *c;
  long c_row;
};
template <class In, class Op>
struct StreamValues {
  static constexpr bool able = false;
  static void run(const Values &, int) {}
};
#if defined(__AVX512BF16__)
template <>
struct StreamValues<bf16, Bfloat16> {  // pairs of rows are interleaved in registers
  static constexpr bool able = true;

  template <int R>
  static void tile(const Values &a) {
    Tile<Bfloat16, R, 4> sums;
    sums.read(a.c, a.c_row);
    const __m512i low = low_order(), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const word *left = a.weights;
    const bf16 *even = (const bf16 *)a.v;
    for (long n = 0; n < a.count; n += 2, even += 2 * a.v_row, ++left) {
      const bf16 *odd = n + 1 < a.count ? even + a.v_row : even;  // past the last row the weight is 0
      if (a.ahead)
        for (int c = 0; c < 64; c += 32) {
          __builtin_prefetch(even + a.ahead + c, 0, 2);
          __builtin_prefetch(odd + a.ahead + c, 0, 2);
        }
      __m512i a0 = _mm512_loadu_si512(even), a1 = _mm512_loadu_si512(even + 32);
      __m512i b0 = _mm512_loadu_si512(odd), b1 = _mm512_loadu_si512(odd + 32);
      vf right[4] = {(vf)_mm512_permutex2var_epi16(a0, low, b0), (vf)_mm512_permutex2var_epi16(a0, high, b0),
                     (vf)_mm512_permutex2var_epi16(a1, low, b1), (vf)_mm512_permutex2var_epi16(a1, high, b1)};
      vf weight;
      each<R * 4>(REGARD_EACH {
        if (i % 4 == 0) weight = splat(left[i / 4 * a.stride]);
        sums.c[i / 4][i % 4] = Bfloat16::multiply_add(sums.c[i / 4][i % 4], weight, right[i % 4]);
      });
    }
    sums.write(a.c, a.c_row);
  }
  static void run(const Values &a, int rows) {
    switch (rows) {
      case 1: return tile<1>(a);
      case 2: return tile<2>(a);
      case 3: return tile<3>(a);
      case 4: return tile<4>(a);
      case 5: return tile<5>(a);
      default: return tile<6>(a);
    }
  }
};
#endif

template <class In, class Op>
class Decode {
 public:
  explicit Decode(const Call &call)
      : x(call), group_heads(call.q_heads / call.kv_heads), only_scaled(is_only_scaled(call)) {
    k_words = words_of<Op>(x.k_dim);
    q_row = round_up(k_words, kLanes);
    columns = round_up(x.v_dim, kUnit);
    rows = (int)(x.q_len * group_heads);
    splits = (x.k_len + kDecodeKeys - 1) / kDecodeKeys;
  }

  int run() {
    int64_t pairs = x.batch * x.kv_heads, tasks = pairs * splits;
    int failed = 0;
    // per task and row: the sum of weights times V, then the running maximum and the sum of weights
    float *parts = (float *)malloc((tasks * rows * (columns + 2) + 1) * sizeof(float));
    if (!parts) return kNoMemory;
#pragma omp parallel if (tasks > 1)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < tasks; ++task)
        if (!work(task / splits, task % splits, parts + task * rows * (columns + 2)))
          __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
#pragma omp for schedule(static)
      for (int64_t n = 0; n < pairs * rows; ++n)
        if (!failed) merge(n / rows, (int)(n % rows), parts + n / rows * splits * rows * (columns + 2));
    }
    free(parts);
    return failed ? kNoMemory : kOk;
  }

 private:
  const Call &x;
  long group_heads, k_words, q_row, columns;
  bool only_scaled;
  int rows;
  int64_t splits;

  struct Memory {
    word *q, *v;
    float *scores;
    bf16 *halves;
    Query *queries;
  };

  Query query(int64_t pair, int row) const {
    return query_of(x, pair / x.kv_heads, pair % x.kv_heads * group_heads + row % group_heads, row / group_heads);
  }

  bool work(int64_t pair, int64_t split, float *part) {
    Memory m;
    bool fits = reserve([&](Arrays &arrays) {
      arrays.take(m.q, kFewRows * q_row);
      arrays.take(m.v, kValueRows / Op::per_word * round_up(columns, kPanel));
      arrays.take(m.scores, kFewRows * kDecodeKeys);
      arrays.take(m.halves, kFewRows * kDecodeKeys);
      arrays.take(m.queries, kFewRows);
    });
    if (!fits) return false;
    float *top = part + rows * columns, *sum = top + rows;
    for (int r = 0; r < rows; ++r) {
      const Query &q = m.queries[r] = query(pair, r);
      copy_row<In, Op>(m.q + r * q_row,
                       (const In *)x.q + q.batch * x.q_stride[0] + q.head * x.q_stride[1] + q.row * x.q_stride[2],
                       x.k_dim);
      top[r] = -INFINITY;
      sum[r] = 0;
    }
    memset(m.q + rows * q_row, 0, (kFewRows - rows) * q_row * sizeof(word));  // products take rows in fours
    memset(part, 0, rows * columns * sizeof(float));
    int64_t first = split * kDecodeKeys, batch = pair / x.kv_heads, kv_head = pair % x.kv_heads;
    KeyRange hull = hull_of(m.queries, rows);
    int64_t low = hull.prefix > 0 ? 0 : hull.low, high = hull.high > hull.prefix ? hull.high : hull.prefix;
    int begin = (int)(clamp(low - first, 0, kDecodeKeys) / kUnit * kUnit),
        cut = (int)clamp(high - first, 0, kDecodeKeys);
    if (x.tile_lines) narrow(m.queries, first, begin, cut);
    if (begin >= cut) return true;
    const In *k = (const In *)x.k + batch * x.k_stride[0] + kv_head * x.k_stride[1] + (first + begin) * x.k_stride[2];
    const In *v = (const In *)x.v + batch * x.v_stride[0] + kv_head * x.v_stride[1] + (first + begin) * x.v_stride[2];
    multiply_keys(m, k, begin, cut);
    weigh(m, first, begin, cut, top, sum);
    multiply_values(m, v, begin, cut, part, false, batch, first + begin);
    // a weight of 0 does not silence NaN or infinity: where one came in, keys that nobody reads are left out
    if (!are_finite(part, columns, rows, columns)) {
      memset(part, 0, rows * columns * sizeof(float));
      multiply_values(m, v, begin, cut, part, true, batch, first + begin);
    }
    return true;
  }

  // From begin ... cut, which count from key `first`, the tiles at the ends that no row lists are taken away.
  void narrow(const Query *queries, int64_t first, int &begin, int &cut) const {
    int64_t low = first + cut, high = first + begin;
    for (int r = 0; r < rows; ++r) {
      TileLine line = tile_line(x, queries[r].batch, queries[r].head, queries[r].row);
      long n = line.from(first + begin), last = line.from(first + cut - 1);
      if (n < line.count && line.begin(n) < low) low = line.begin(n);
      if (last == line.count || line.begin(last) >= first + cut) --last;
      if (last >= 0 && line.begin(last) + REGARD_TILE > high) high = line.begin(last) + REGARD_TILE;
    }
    begin = (int)clamp(low - first, begin, cut), cut = (int)clamp(high - first, begin, cut);
  }

  // From one row of k or v to the one that is kAhead bytes of content behind it.
  static long ahead_of(int64_t elements, int64_t stride) { return kAhead / (elements * (long)sizeof(In) + 1) * stride; }

  void multiply_keys(const Memory &m, const In *k, int begin, int cut) const {
    long ahead = ahead_of(x.k_dim, x.k_stride[2]);
    for (int c = 0; c < cut - begin; c += kUnit) {
      int count = cut - begin - c < kUnit ? cut - begin - c : kUnit;
      const In *unit = k + c * x.k_stride[2];
      for (int r = 0; r < rows; r += 4) {
        const word *q = m.q + r * q_row;
        float *s = m.scores + r * kDecodeKeys + begin + c;
        if (rows - r == 1)
          unit_scores<1>(q, unit, count, s, ahead);
        else if (rows - r == 2)
          unit_scores<2>(q, unit, count, s, ahead);
        else
          unit_scores<4>(q, unit, count, s, ahead);
      }
    }
  }

  // R rows times the keys of a unit; where there are fewer keys, the last one again.
  template <int R>
  void unit_scores(const word *q, const In *k, int count, float *s, long ahead) const {
    constexpr int keys = kLanes / R;
    constexpr long full = kLanes * Op::per_word;
    for (int c = 0; c < kUnit; c += keys) {
      const In *key[keys];
      for (int n = 0; n < keys; ++n) key[n] = k + (c + n < count ? c + n : count - 1) * x.k_stride[2];
      vf dot[kLanes];
      each<kLanes>(REGARD_EACH { dot[i] = vf{}; });
      long e = 0;
      const word *at = q;
      for (; e + full <= x.k_dim; e += full, at += kLanes) {
        vf left[R];
        each<R>(REGARD_EACH { left[i] = load(at + i * q_row); });
        each<keys>(REGARD_EACH {
          vf right = Reader<In, Op>::words(key[i] + e);
          __builtin_prefetch(key[i] + e + ahead, 0, 2);
          constexpr int n = i;
          each<R>(REGARD_EACH { dot[i * keys + n] = Op::multiply_add(dot[i * keys + n], left[i], right); });
        });
      }
      if (e < x.k_dim)
        for (int n = 0; n < keys; ++n) {
          vf right = read_words<In, Op>(key[n] + e, x.k_dim - e);
          for (int r = 0; r < R; ++r)
            dot[r * keys + n] = Op::multiply_add(dot[r * keys + n], load(at + r * q_row), right);
        }
      vf total = sums(dot);
      for (int r = 0; r < R; ++r)
        memcpy(s + r * kDecodeKeys + c, (const float *)&total + r * keys, keys * sizeof(float));
    }
  }

  void weigh(const Memory &m, int64_t first, int begin, int cut, float *top, float *sum) const {
    ColumnRanges ranges = {1, {{begin, (int)round_up(cut, kUnit), cut}}};
    int count = ranges.range[0].end - begin;
    for (int r = 0; r < rows; ++r) {
      float *s = m.scores + r * kDecodeKeys + begin;
      if (!only_scaled) shape(x, m.queries[r], s, nullptr, first + begin, count);
      hide(x, m.queries[r], s, first + begin, count);
    }
    float rescale[kTileRows];
    for (int r = 0; r < rows; r += kTileRows) {
      Softmax<Op> softmax = {m.scores + r * kDecodeKeys, m.halves + r * kDecodeKeys, kDecodeKeys, nats_of(x) * kLog2e};
      softmax.weights(x, m.queries + r, rows - r < kTileRows ? rows - r : kTileRows, ranges, first, top + r, sum + r,
                      rescale);
    }
  }

  void multiply_values(const Memory &m, const In *v, int begin, int cut, float *part, bool choose, int64_t batch,
                       int64_t slot) const {
    const word *weights = Op::per_word == 2 ? (const word *)m.halves : (const word *)m.scores;
    bool in_place = sizeof(In) == sizeof(word) && x.v_dim % kUnit == 0 && !choose;
    long ahead = ahead_of(x.v_dim, x.v_stride[2]), stride = kDecodeKeys / Op::per_word;
    if (StreamValues<In, Op>::able && x.v_dim % kPanel == 0 && !choose) {
      for (int c = begin; c < cut; c += kValueRows, v += kValueRows * x.v_stride[2])
        for (long column = 0; column < columns; column += kPanel)
          for (int r = 0; r < rows; r += kTileRows)
            StreamValues<In, Op>::run(
                {weights + r * stride + c / Op::per_word, stride, v + column, x.v_stride[2],
                 cut - c < kValueRows ? cut - c : kValueRows, r == 0 ? ahead : 0, part + r * columns + column, columns},
                rows - r < kTileRows ? rows - r : kTileRows);
      return;
    }
    for (int c = begin; c < cut; c += kValueRows, v += kValueRows * x.v_stride[2], slot += kValueRows) {
      int count = cut - c < kValueRows ? cut - c : kValueRows;
      auto row = [&](long n) -> const In * {
        const In *from = v + n * x.v_stride[2];
        for (long e = 0; e < x.v_dim; e += 64 / (long)sizeof(In)) __builtin_prefetch(from + ahead + e, 0, 2);
        return n < count && (!choose || are_finite(from, 0, 1, x.v_dim) || is_read(x, batch, slot + n)) ? from
                                                                                                        : nullptr;
      };
      long panel = kValueRows / Op::per_word * kPanel;
      if (!in_place) Rows<In, Op>::pack(m.v, panel, round_up(count, Op::per_word), x.v_dim, row);
      for (long column = 0; column < columns; column += kPanel) {
        const word *right = in_place ? (const word *)v + column : m.v + column / kPanel * panel;
        int units = (int)((columns - column < kPanel ? columns - column : kPanel) / kUnit);
        for (int r = 0; r < rows; r += kTileRows) {
          Product p = {weights + r * stride + c / Op::per_word,
                       stride,
                       1,
                       right,
                       in_place ? x.v_stride[2] : kPanel,
                       words_of<Op>(count),
                       part + r * columns + column,
                       columns,
                       nullptr,
                       ahead};
          int group = rows - r < kTileRows ? rows - r : kTileRows;
          if (in_place && r == 0)
            product<Op, kAddAhead>(p, group, units);
          else
            product<Op, kAdd>(p, group, units);
        }
      }
    }
  }

  void merge(int64_t pair, int row, float *parts) {
    long size = rows * (columns + 2);
    const float *top = parts + rows * columns + row, *sum = top + rows;
    merge_row<In>(
        x, query(pair, row), splits, columns, parts + row * columns,
        [&](int64_t n) { return parts + n * size + row * columns; }, [&](int64_t n) { return top[n * size]; },
        [&](int64_t n) { return sum[n * size]; });
  }
};

template <class In, class Op>
int forward(const Call &call) {
  return has_few_rows(call) ? Decode<In, Op>(call).run() : Forward<In, Op>(call).run();
}

}  // namespace
