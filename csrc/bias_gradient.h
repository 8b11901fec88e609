// Gradients of the dense and the relative bias: sums of dS over the axes along which the bias was broadcast.
//
// A pass of its own, which recomputes dS: one task owns each place of the result and adds to it in one order, so the
// result does not depend on threads.
#pragma once
#include "backward.h"
#include "forward.h"

namespace {

// dS of one tile, [kTileRows][kBackwardWidth].
struct GradientSink {
  float *ds;
  REGARD_INLINE void put(int r, int rows, int column, vf, vf, vf ds0, vf ds1) const {
    store(ds + r * kBackwardWidth + column, ds0);
    if (r + 1 < rows) store(ds + (r + 1) * kBackwardWidth + column, ds1);
  }
};

template <class In, class Op>
class BiasGradient {
  typedef typename Op::Element Element;

 public:
  BiasGradient(const Call &call, const regard_attention_grad &gradients, const float *deltas)
      : x(call), grad(gradients), all_deltas(deltas) {
    k_words = words_of<Op>(x.k_dim), v_words = words_of<Op>(x.v_dim);
    q_row = round_up(k_words, kLanes), o_row = round_up(v_words, kLanes);
  }

  int dense() {
    const int64_t *stride = grad.d_bias_stride, size[4] = {x.batch, x.q_heads, x.q_len, x.k_len};
    int64_t last = 0;
    for (int d = 0; d < 4; ++d) {
      if (size[d] == 0) return kOk;
      last += (size[d] - 1) * stride[d];
    }
    memset(grad.d_bias, 0, (last + 1) * sizeof(float));
    int64_t batches = stride[0] ? x.batch : 1, heads = stride[1] ? x.q_heads : 1;
    int64_t blocks = stride[2] ? (x.q_len + kQueryBlock - 1) / kQueryBlock : 1;
    auto add = [&](const Query &q, int64_t column, const float *ds, int count) {
      float *to = grad.d_bias + q.batch * stride[0] + q.head * stride[1] + q.row * stride[2] + column * stride[3];
      for (int c = 0; c < count; ++c) to[c * stride[3]] += ds[c];
    };
    return for_owners(batches, heads, blocks, add);
  }

  int relative() {
    memset(grad.d_relative, 0, x.q_heads * x.relative_count * sizeof(float));
    auto add = [&](const Query &q, int64_t column, const float *ds, int count) {
      int64_t index = column - q.slot + x.relative_zero;
      float *to = grad.d_relative + q.head * x.relative_count + index;
      int64_t begin = clamp(-index, 0, count), end = clamp(x.relative_count - index, 0, count);
      for (int64_t c = begin; c < end; ++c) to[c] += ds[c];
    };
    return for_owners(1, x.q_heads, 1, add);
  }

 private:
  const Call &x;
  const regard_attention_grad &grad;
  const float *all_deltas;
  long k_words, v_words, q_row, o_row;

  struct Memory {
    word *k_transposed, *v_transposed, *q, *d_out;
    float *delta;
    RowSum *sums;
    Query *queries;
    TileScores<Op> scores;
    GradientSink sink;
  };
  void take(Arrays &arrays, Memory &m) {
    arrays.take(m.k_transposed, kBackwardWidth * k_words);
    arrays.take(m.v_transposed, kBackwardWidth * v_words);
    arrays.take(m.q, kQueryBlock * q_row);
    arrays.take(m.d_out, kQueryBlock * o_row);
    arrays.take(m.sums, kQueryBlock);
    arrays.take(m.delta, kQueryBlock);
    arrays.take(m.queries, kQueryBlock);
    arrays.take(m.sink.ds, kTileRows * kBackwardWidth);
    TileScores<Op>::take(arrays, m.scores);
  }

  // Calls `work` on every block of query rows; those that share an owner run in order on one thread.
  template <class Add>
  int for_owners(int64_t batches, int64_t heads, int64_t blocks, const Add &add) {
    int failed = 0;
    int64_t all_blocks = (x.q_len + kQueryBlock - 1) / kQueryBlock;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t owner = 0; owner < batches * heads * blocks; ++owner) {
      int64_t block = owner % blocks, head = owner / blocks % heads, batch = owner / blocks / heads;
      for (int64_t b = batch; b < (batches > 1 ? batch + 1 : x.batch); ++b)
        for (int64_t h = head; h < (heads > 1 ? head + 1 : x.q_heads); ++h)
          for (int64_t c = block; c < (blocks > 1 ? block + 1 : all_blocks); ++c)
            if (!work(b, h, c * kQueryBlock, add)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    }
    return failed ? kNoMemory : kOk;
  }

  template <class Add>
  bool work(int64_t batch, int64_t head, int64_t begin, const Add &add) {
    Memory m;
    if (!reserve([&](Arrays &arrays) { take(arrays, m); })) return false;
    m.scores.only_scaled = is_only_scaled(x);
    int rows = (int)(x.q_len - begin < kQueryBlock ? x.q_len - begin : kQueryBlock);
    for (int r = 0; r < rows; ++r) {
      int64_t row = begin + r, n = (batch * x.q_heads + head) * x.q_len + row;
      const In *from = (const In *)x.q + batch * x.q_stride[0] + head * x.q_stride[1] + row * x.q_stride[2];
      m.queries[r] = query_of(x, batch, head, row);
      copy_row<In, Op>(m.q + r * q_row, from, x.k_dim);
      round_row((Element *)(m.d_out + r * o_row), grad.d_out + n * x.v_dim, x.v_dim, o_row * Op::per_word);
      m.sums[r] = row_sum(x, n);
      m.delta[r] = all_deltas[n];
    }
    int64_t kv_head = head / (x.q_heads / x.kv_heads);
    KeyRange span = key_range_of_rows(x, batch, begin, begin + rows - 1);
    for (int64_t first = 0; first < x.k_len; first += kBackwardWidth) {
      int keys = (int)(x.k_len - first < kBackwardWidth ? x.k_len - first : kBackwardWidth);
      bool meets = first < span.prefix || (first < span.high && first + keys > span.low);
      if (meets && (!x.tile_lines || tiles_meet(x, batch, head, 1, begin, begin + rows - 1, first, keys)))
        add_panel(m, batch, kv_head, rows, first, keys, add);
    }
    return true;
  }

  template <class Add>
  void add_panel(const Memory &m, int64_t batch, int64_t kv_head, int rows, int64_t first, int keys, const Add &add) {
    const In *k = (const In *)x.k + batch * x.k_stride[0] + kv_head * x.k_stride[1] + first * x.k_stride[2];
    const In *v = (const In *)x.v + batch * x.v_stride[0] + kv_head * x.v_stride[1] + first * x.v_stride[2];
    pack_transposed<In, Op>(m.k_transposed, k, x.k_stride[2], keys, x.k_dim, kBackwardWidth);
    pack_transposed<In, Op>(m.v_transposed, v, x.v_stride[2], keys, x.v_dim, kBackwardWidth);
    PanelFacts<kBackwardWidth> facts;
    if (is_sparse(x)) facts.read(x, batch, first, keys);
    for (int r = 0; r < rows; r += kTileRows) {
      Group group = {r, rows - r < kTileRows ? rows - r : kTileRows, {}, true};
      group.hull = hull_of(m.queries + r, group.rows);
      ColumnRanges ranges;
      find_ranges<kBackwardWidth>(ranges, x, group, m.queries + r, first, keys, is_sparse(x) ? &facts : nullptr);
      if (!ranges.count) continue;
      ColumnRange range = ranges.range[0];
      m.scores.compute(x, m.queries + r, m.q + r * q_row, q_row, m.k_transposed, k_words, group.rows, first,
                       range.begin, range.end);
      // without the cap's slope: the bias is added after it
      BackwardTile tile = {m.d_out + r * o_row,
                           m.v_transposed,
                           o_row,
                           v_words,
                           m.scores.s,
                           x.dropout_p > 0 ? m.scores.kept : nullptr,
                           nullptr,
                           m.sums + r,
                           m.delta + r,
                           nats_of(x) * kLog2e};
      backward_tiles<Op>(tile, m.sink, group.rows, 0, range.begin, (range.end - range.begin) / kUnit);
      for (int i = 0; i < group.rows; ++i)
        add(m.queries[r + i], first + range.begin, m.sink.ds + i * kBackwardWidth + range.begin,
            range.cut - range.begin);
    }
  }
};

// Few rows went through the decode kernel, which adds products in another order than the backward pass does: with large
// scores its maxima and outputs would not fit the weights. So they are computed anew in the backward pass's order, into
// `room`, for (v_dim + 4) floats a row.
template <class In, class Op>
int repeat_few_rows(Call &call, regard_attention_grad &grad, float *room) {
  int64_t rows = row_count(call);
  call.lse = room, call.kept = room + rows, call.out = room + 4 * rows, call.out_f32 = 1;
  call.out_stride[2] = call.v_dim, call.out_stride[1] = call.q_len * call.v_dim;
  call.out_stride[0] = call.q_heads * call.out_stride[1];
  grad.out = (const float *)call.out;
  return Forward<In, Op>(call).run();
}

template <class In, class Op>
int backward(Call call, regard_attention_grad grad) {
  int64_t rows = row_count(call);
  bool few = has_few_rows(call);
  float *delta = (float *)malloc(rows * (few ? call.v_dim + 5 : 1) * sizeof(float));
  if (!delta) return kNoMemory;
  int status = few ? repeat_few_rows<In, Op>(call, grad, delta + rows) : kOk;
  if (status == kOk) row_deltas(call, grad, delta);
  if (status == kOk && (grad.d_q || grad.d_k || grad.d_v)) status = Backward<In, Op>(call, grad, delta).run();
  if (status == kOk && grad.d_bias) status = BiasGradient<In, Op>(call, grad, delta).dense();
  if (status == kOk && grad.d_relative) status = BiasGradient<In, Op>(call, grad, delta).relative();
  free(delta);
  return status;
}

}  // namespace
