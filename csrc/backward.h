// Softmax attention, backward: dQ, dK, dV from recomputed weights.
//
// A task is one block of keys of one kv head: it keeps dK and dV of its keys in the cache and walks blocks of query
// rows, flattened as in the forward pass. dQ gets one contribution from each key block, added in the order of the
// keys: a task waits for its turn at each query block. So every sum has one order, whatever the threads.
#pragma once
#include <sched.h>

#include "backward_tile.h"
#include "weight_sink.h"

namespace {

REGARD_INLINE void wait_for(const int *counter, int turn) {
  for (int spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != turn; ++spins)
    if (spins > 100) sched_yield();
}

// delta = rowsum(dO O) - d_lse for every query row, (B, Hq, Tq).
void row_deltas(const Call &x, const regard_attention_grad &grad, float *delta) {
  int64_t rows = row_count(x);
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < rows; ++n) {
    const float *d_out = grad.d_out + n * x.v_dim, *out = grad.out + n * x.v_dim;
    vf sum = {};
    for (int64_t c = 0; c < x.v_dim; c += kLanes)
      sum += read_words<float, Float32>(d_out + c, x.v_dim - c) * read_words<float, Float32>(out + c, x.v_dim - c);
    delta[n] = sum_lanes(sum) - (grad.d_lse ? grad.d_lse[n] : 0.0f);
  }
}

template <class In, class Op>
class Backward {
  typedef typename Op::Element Element;

 public:
  Backward(const Call &call, const regard_attention_grad &gradients, const float *deltas)
      : x(call), grad(gradients), all_deltas(deltas), group_heads(call.q_heads / call.kv_heads) {
    k_words = words_of<Op>(x.k_dim), v_words = words_of<Op>(x.v_dim);
    q_row = round_up(k_words, kLanes), o_row = round_up(v_words, kLanes);
    k_columns = round_up(x.k_dim, kUnit), v_columns = round_up(x.v_dim, kUnit);
    block = x.k_dim + x.v_dim <= 512 ? 4 * kBackwardWidth : 2 * kBackwardWidth;
    flat = x.q_len * group_heads;
    key_blocks = (x.k_len + block - 1) / block, query_blocks = (flat + kQueryBlock - 1) / kQueryBlock;
  }

  int run() {
    int64_t pairs = x.batch * x.kv_heads, tasks = pairs * key_blocks, next = 0;
    int *turns = (int *)calloc(pairs * query_blocks + 1, sizeof(int)), failed = 0;
    if (!turns) return kNoMemory;
    if (grad.d_q) memset(grad.d_q, 0, x.batch * x.q_heads * x.q_len * x.k_dim * sizeof(float));
#pragma omp parallel if (tasks > 1)
    // tasks start in order, so that the one whose turn it is always runs
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) {
      int64_t pair = task / key_blocks;
      if (!work(pair / x.kv_heads, pair % x.kv_heads, (int)(task % key_blocks), turns + pair * query_blocks))
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    }
    free(turns);
    return failed ? kNoMemory : kOk;
  }

 private:
  const Call &x;
  const regard_attention_grad &grad;
  const float *all_deltas;
  long group_heads, k_words, v_words, q_row, o_row, k_columns, v_columns, flat, key_blocks, query_blocks;
  int block;

  struct Memory {
    word *k_transposed, *v_transposed, *k_rows;  // the key block, packed
    word *q, *d_out, *q_panels, *d_out_panels;   // the query block: rows, and packed as right operands
    float *d_k, *d_v, *d_q, *delta;
    RowSum *sums;
    Query *queries;
    WeightSink<Op> sink;
    TileScores<Op> scores;
    ColumnRanges ranges[kQueryBlock / kTileRows];
    unsigned covered[kQueryBlock / kTileRows];  // panels that a group has written, a bit each
  };

  void take(Arrays &arrays, Memory &m) {
    long word_rows = kQueryBlock / Op::per_word;
    arrays.take(m.k_transposed, block * k_words);
    arrays.take(m.v_transposed, block * v_words);
    arrays.take(m.k_rows, block / Op::per_word * round_up(k_columns, kPanel));
    arrays.take(m.q, kQueryBlock * q_row);
    arrays.take(m.d_out, kQueryBlock * o_row);
    arrays.take(m.q_panels, word_rows * round_up(k_columns, kPanel));
    arrays.take(m.d_out_panels, word_rows * round_up(v_columns, kPanel));
    arrays.take(m.d_k, block * k_columns);
    arrays.take(m.d_v, block * v_columns);
    arrays.take(m.d_q, kQueryBlock * k_columns);
    arrays.take(m.sums, kQueryBlock);
    arrays.take(m.delta, kQueryBlock);
    arrays.take(m.queries, kQueryBlock);
    WeightSink<Op>::take(arrays, m.sink, block);
    TileScores<Op>::take(arrays, m.scores);
  }

  bool work(int64_t batch, int64_t kv_head, int key_block, int *turns) {
    Memory m;
    bool fits = reserve([&](Arrays &arrays) { take(arrays, m); });
    m.scores.only_scaled = is_only_scaled(x);
    int64_t first = (int64_t)key_block * block;
    int keys = (int)(x.k_len - first < block ? x.k_len - first : block);
    PanelFacts<kBackwardWidth> facts;
    bool sparse = is_sparse(x), packed = false;
    if (fits) {
      if (sparse) facts.read(x, batch, first, keys);
      memset(m.d_k, 0, block * k_columns * sizeof(float));
      memset(m.d_v, 0, block * v_columns * sizeof(float));
    }
    for (int64_t b = 0; b < query_blocks; ++b) {
      int64_t begin = b * kQueryBlock, end = begin + kQueryBlock < flat ? begin + kQueryBlock : flat;
      KeyRange span = key_range_of_rows(x, batch, begin / group_heads, (end - 1) / group_heads);
      bool meets = fits && (first < span.prefix || (first < span.high && first + keys > span.low));
      if (meets && x.tile_lines)
        meets = tiles_meet(x, batch, kv_head * group_heads, group_heads, begin / group_heads, (end - 1) / group_heads,
                           first, keys);
      if (meets) {
        if (!packed) pack_keys(m, batch, kv_head, first, keys);
        packed = true;
        meets = load_queries(m, batch, kv_head, begin, (int)(end - begin), first, keys, sparse ? &facts : nullptr);
      }
      if (meets) {
        weigh(m, batch, kv_head, begin, (int)(end - begin), first);
        add_keys(m, (int)(end - begin), keys);
      }
      if (!grad.d_q) continue;
      if (meets) multiply_queries(m, (int)(end - begin));
      wait_for(turns + b, key_block);
      if (meets) add_queries(m, (int)(end - begin));
      __atomic_store_n(turns + b, key_block + 1, __ATOMIC_RELEASE);
    }
    if (fits) write_keys(m, batch, kv_head, first, keys);
    return fits;
  }

  void pack_keys(const Memory &m, int64_t batch, int64_t kv_head, int64_t first, int keys) {
    const In *k = (const In *)x.k + batch * x.k_stride[0] + kv_head * x.k_stride[1] + first * x.k_stride[2];
    const In *v = (const In *)x.v + batch * x.v_stride[0] + kv_head * x.v_stride[1] + first * x.v_stride[2];
    for (int c = 0; c < keys; c += kBackwardWidth) {
      long count = keys - c < kBackwardWidth ? keys - c : kBackwardWidth;
      pack_transposed<In, Op>(m.k_transposed + c * k_words, k + c * x.k_stride[2], x.k_stride[2], count, x.k_dim,
                              kBackwardWidth);
      pack_transposed<In, Op>(m.v_transposed + c * v_words, v + c * x.v_stride[2], x.v_stride[2], count, x.v_dim,
                              kBackwardWidth);
    }
    bool finite = are_finite(k, x.k_stride[2], keys, x.k_dim);
    auto row = [&](long n) -> const In * {
      const In *from = k + n * x.k_stride[2];
      if (n >= keys) return nullptr;
      return finite || are_finite(from, 0, 1, x.k_dim) || is_read(x, batch, first + n) ? from : nullptr;
    };
    Rows<In, Op>::pack(m.k_rows, block / Op::per_word * kPanel, round_up(keys, kUnit), x.k_dim, row);
  }

  // False where no group reads a key of the block.
  bool load_queries(Memory &m, int64_t batch, int64_t kv_head, int64_t begin, int rows, int64_t first, int keys,
                    const PanelFacts<kBackwardWidth> *facts) {
    bool any = false;
    for (int r = 0; r < rows; ++r)
      m.queries[r] = query_of(x, batch, kv_head * group_heads + (begin + r) % group_heads, (begin + r) / group_heads);
    for (int r = 0, g = 0; r < rows; r += kTileRows, ++g) {
      Group group = {r, rows - r < kTileRows ? rows - r : kTileRows, {}, true};
      group.hull = hull_of(m.queries + r, group.rows);
      find_ranges<kBackwardWidth>(m.ranges[g], x, group, m.queries + r, first, keys, facts);
      any |= m.ranges[g].count > 0;
    }
    if (!any) return false;
    for (int r = 0; r < rows; ++r) {
      const Query &q = m.queries[r];
      int64_t n = (q.batch * x.q_heads + q.head) * x.q_len + q.row;
      const In *from = (const In *)x.q + q.batch * x.q_stride[0] + q.head * x.q_stride[1] + q.row * x.q_stride[2];
      copy_row<In, Op>(m.q + r * q_row, from, x.k_dim);
      round_row((Element *)(m.d_out + r * o_row), grad.d_out + n * x.v_dim, x.v_dim, o_row * Op::per_word);
      m.sums[r] = row_sum(x, n);
      m.delta[r] = all_deltas[n];
    }
    long words = round_up(rows, Op::per_word), panel = kQueryBlock / Op::per_word * kPanel;
    auto q = [&](long r) { return r < rows ? (const Element *)(m.q + r * q_row) : nullptr; };
    auto d_out = [&](long r) { return r < rows ? (const Element *)(m.d_out + r * o_row) : nullptr; };
    Rows<Element, Op>::pack(m.q_panels, panel, words, x.k_dim, q);
    Rows<Element, Op>::pack(m.d_out_panels, panel, words, x.v_dim, d_out);
    return true;
  }

  // Asks for what is read soon: dQ of these rows, Q and dO of the next block's.
  void fetch_rows(int64_t batch, int64_t kv_head, int64_t begin, int count) const {
    for (int64_t f = begin; f < begin + count; ++f) {
      int64_t head = kv_head * group_heads + f % group_heads, first_row = (batch * x.q_heads + head) * x.q_len;
      if (grad.d_q) fetch(grad.d_q + (first_row + f / group_heads) * x.k_dim, x.k_dim * sizeof(float));
      if (f + kQueryBlock >= flat) continue;
      int64_t next = (f + kQueryBlock) / group_heads;
      head = kv_head * group_heads + (f + kQueryBlock) % group_heads;
      fetch((const In *)x.q + batch * x.q_stride[0] + head * x.q_stride[1] + next * x.q_stride[2],
            x.k_dim * sizeof(In));
      fetch(grad.d_out + ((batch * x.q_heads + head) * x.q_len + next) * x.v_dim, x.v_dim * sizeof(float));
    }
  }

  // P and dS of the query block, 0 in the rest of each panel that a group touches.
  void weigh(Memory &m, int64_t batch, int64_t kv_head, int64_t begin_row, int rows, int64_t first) {
    float factor = nats_of(x) * kLog2e;
    for (int r = 0, g = 0; r < rows; r += kTileRows, ++g) {
      int count = rows - r < kTileRows ? rows - r : kTileRows;
      fetch_rows(batch, kv_head, begin_row + r, count);
      m.sink.begin = r;
      m.covered[g] = 0;
      BackwardTile tile = {m.d_out + r * o_row,
                           nullptr,
                           o_row,
                           v_words,
                           m.scores.s,
                           x.dropout_p > 0 ? m.scores.kept : nullptr,
                           has_slope(x) ? m.scores.slope : nullptr,
                           m.sums + r,
                           m.delta + r,
                           factor};
      for (int n = 0; n < m.ranges[g].count; ++n) {
        ColumnRange range = m.ranges[g].range[n];
        for (int panel = range.begin / kBackwardWidth; panel * kBackwardWidth < range.end; ++panel) {
          int column = panel * kBackwardWidth;
          int begin = range.begin > column ? range.begin - column : 0;
          int end = range.end < column + kBackwardWidth ? range.end - column : kBackwardWidth;
          m.scores.compute(x, m.queries + r, m.q + r * q_row, q_row, m.k_transposed + column * k_words, k_words, count,
                           first + column, begin, end);
          tile.v = m.v_transposed + column * v_words;
          backward_tiles<Op>(tile, m.sink, count, column, begin, (end - begin) / kUnit);
          m.covered[g] |= 1u << panel;
          for (int c = 0; c < kBackwardWidth; c += kLanes)
            for (int i = 0; i < count && (c < begin || c >= end); i += 2)
              m.sink.put(i, count, column + c, vf{}, vf{}, vf{}, vf{});
        }
      }
    }
  }

  // dV += P^T dO, dK += dS^T Q
  void add_keys(const Memory &m, int rows, int keys) {
    int groups = (int)group_count(rows);
    if (grad.d_v) add_keys(m, rows, keys, groups, m.sink.p, m.d_out_panels, m.d_v, v_columns);
    if (grad.d_k) add_keys(m, rows, keys, groups, m.sink.ds, m.q_panels, m.d_k, k_columns);
  }
  void add_keys(const Memory &m, int rows, int keys, int groups, const word *weights, const word *panels, float *sum,
                long columns) {
    for (long c = 0; c < columns; c += kPanel)
      for (int key = 0; key < keys; key += kTileRows) {
        unsigned bit = 1u << (key / kBackwardWidth);
        for (int g = 0, end; g < groups; g = end + 1) {
          for (end = g; end < groups && (m.covered[end] & bit);) ++end;
          if (end == g) continue;
          long begin = g * kTileRows, stop = end * kTileRows < rows ? end * kTileRows : rows,
               skip = begin / Op::per_word;
          const word *right = panels + c / kPanel * (kQueryBlock / Op::per_word * kPanel) + skip * kPanel;
          product<Op, kAdd>({weights + skip * block + key, 1, block, right, kPanel, words_of<Op>(stop - begin),
                             sum + key * columns + c, columns, nullptr, 0},
                            kTileRows, (int)((columns - c < kPanel ? columns - c : kPanel) / kUnit));
        }
      }
  }

  // dQ = dS K of the query block
  void multiply_queries(const Memory &m, int rows) {
    long stride = block / Op::per_word, panel = stride * kPanel;
    for (int r = 0, g = 0; r < rows; r += kTileRows, ++g) {
      int count = rows - r < kTileRows ? rows - r : kTileRows;
      for (long c = 0; c < k_columns; c += kPanel)
        for (int n = 0; n < m.ranges[g].count; ++n) {
          ColumnRange range = m.ranges[g].range[n];
          long begin = range.begin / Op::per_word, words = words_of<Op>(range.cut) - begin;
          Product p = {m.sink.ds_rows + r * stride + begin,
                       stride,
                       1,
                       m.k_rows + c / kPanel * panel + begin * kPanel,
                       kPanel,
                       words,
                       m.d_q + r * k_columns + c,
                       k_columns,
                       nullptr,
                       0};
          int units = (int)((k_columns - c < kPanel ? k_columns - c : kPanel) / kUnit);
          if (n == 0)
            product<Op, kZero>(p, count, units);
          else
            product<Op, kAdd>(p, count, units);
        }
    }
  }
  void add_queries(const Memory &m, int rows) {
    for (int r = 0; r < rows; ++r) {
      if (!m.ranges[r / kTileRows].count) continue;
      const Query &q = m.queries[r];
      float *to = grad.d_q + ((q.batch * x.q_heads + q.head) * x.q_len + q.row) * x.k_dim;
      const float *from = m.d_q + r * k_columns;
      for (long c = 0; c < x.k_dim; ++c) to[c] += from[c] * x.scale;
    }
  }

  void write_keys(const Memory &m, int64_t batch, int64_t kv_head, int64_t first, int keys) {
    int64_t row = (batch * x.kv_heads + kv_head) * x.k_len + first;
    for (int n = 0; n < keys; ++n) {
      for (long c = 0; grad.d_k && c < x.k_dim; ++c)
        grad.d_k[(row + n) * x.k_dim + c] = m.d_k[n * k_columns + c] * x.scale;
      if (grad.d_v) memcpy(grad.d_v + (row + n) * x.v_dim, m.d_v + n * v_columns, x.v_dim * sizeof(float));
    }
  }
};

}  // namespace
