// The recurrence, forward: chunks of tokens in order, a task for every head of every batch row, and for parts of the
// value columns where those are fewer than the threads. A head's arithmetic depends on its own tokens alone.
#pragma once
#include <omp.h>

#include "chunk.h"

namespace {

constexpr long kStepTokens = 4;  // up to so many tokens go one by one: a decode step reads the state once

// Tokens between the states that the forward pass keeps for the backward pass.
REGARD_INLINE long kept_every(int64_t k_dim, int64_t v_dim) { return k_dim * v_dim > 96 * 96 ? 128 : 256; }

template <class In>
class RecurrenceForward {
 public:
  explicit RecurrenceForward(const regard_recurrence &call) : x(call) {
    long threads = omp_get_max_threads(), heads = x.batch * x.heads, panels = (x.v_dim + kPanel - 1) / kPanel;
    long parts = heads >= threads ? 1 : (threads + heads - 1) / heads;
    parts = parts < panels ? parts : panels;
    part = (panels + parts - 1) / parts * kPanel;
    tasks = heads * ((x.v_dim + part - 1) / part);
  }

  int run() {
    int failed = 0;
    long parts = (x.v_dim + part - 1) / part;
#pragma omp parallel for schedule(static) if (tasks > 1)
    for (long task = 0; task < tasks; ++task) {
      long pair = task / parts, column = task % parts * part;
      long columns = x.v_dim - column < part ? x.v_dim - column : part;
      if (!(x.tokens <= kStepTokens && !x.kept ? step(pair, column, columns) : work(pair, column, columns))) {
#pragma omp atomic write
        failed = 1;
      }
    }
    return failed ? REGARD_NO_MEMORY : REGARD_OK;
  }

 private:
  const regard_recurrence &x;
  long part, tasks;

  int64_t place(int64_t batch, int64_t head, long token, long column) const {
    return batch * x.out_stride[0] + head * x.out_stride[1] + token * x.out_stride[2] + column;
  }

  // Writes a row; the sum of its numbers times 0, which is NaN where one of them is not finite.
  vf put(const float *row, int64_t batch, int64_t head, long token, long column, long columns) const {
    int64_t at = place(batch, head, token, column);
    bool wide = sizeof(In) == sizeof(float) || x.out_f32;
    vf nothing = {};
    for (long c = 0; c < columns; c += kLanes) {
      vf value = load(row + c);
      nothing += value * 0.0f;
      if (wide)
        store_some((float *)x.out + at + c, value, columns - c);
      else
        store_some((bf16 *)x.out + at + c, value, columns - c);
    }
    return nothing;
  }

  bool work(long pair, long column, long columns) {
    int64_t batch = pair / x.heads, number = pair % x.heads, at = pair * x.k_dim * x.v_dim + column;
    Sizes z(x, columns);
    Head<In> head(x, batch, number, column);
    Chunk c;
    Panels state = {nullptr, x.k_dim}, walked = {nullptr, x.k_dim}, read = {nullptr, 2 * z.size};
    float *scratch;
    Token token;
    if (!reserve([&](Arrays &arrays) {
          z.take(arrays, c);
          take(arrays, token, columns);
          arrays.take(state.p, panels_size(x.k_dim, columns));
          arrays.take(walked.p, panels_size(x.k_dim, columns));
          arrays.take(read.p, panels_size(read.rows, columns));
          arrays.take(scratch, chunk_scratch(z));
        }))
      return false;
    read_state(z, state, x.state ? x.state + at : nullptr, x.v_dim);
    long every = kept_every(x.k_dim, x.v_dim), count = (x.tokens + every - 1) / every;
    for (long first = 0; first < x.tokens; first += z.size) {
      if (x.kept && first % every == 0)
        write_rows(x.kept + (pair * count + first / every) * x.k_dim * x.v_dim + column, x.v_dim, state, 0, x.k_dim,
                   columns);
      long n = x.tokens - first < z.size ? x.tokens - first : z.size;
      begin_chunk(z, c, head, first, n, x.scale, scratch);
      long next = first + n, after = x.tokens - next < z.size ? x.tokens : next + z.size;
      long element = sizeof(In) == sizeof(float) || x.out_f32 ? 4 : 2;
      const char *out = (const char *)x.out + element * place(batch, number, first, column);
      Ahead<In> ahead = {z, head, out, element * x.out_stride[2], element * columns, next, after, 0, n};
      auto fetch_some = [&]() __attribute__((always_inline)) { ahead.some(); };
      if (z.delta)
        multiply_panels<kZero>(read, 0, c.fading, z.wide, 1, state, x.k_dim, round_up(n, kUnit), columns, nullptr,
                               false, fetch_some);
      multiply_panels<kZero>(read, z.size, c.fading + z.size * z.wide, z.wide, 1, state, x.k_dim, n, columns, nullptr,
                             false, fetch_some);
      correct(z, c, head, first, read);
      multiply_panels<kAdd>(read, z.size, c.pairs + z.size * z.size, z.size, 1, c.update, n, n, columns, nullptr, true,
                            fetch_some);
      if (!put_chunk(z, read, batch, number, first, n, column)) {
        bool opens = head.opens(first, n);
        read_alone(z, c, read, state);
        if (opens) {
          memcpy(walked.p, state.p, panels_size(x.k_dim, columns) * sizeof(float));
          walk(head, token, walked, read, first, n, columns);
        }
        put_chunk(z, read, batch, number, first, n, column);
        carry(z, c, state);
        if (opens) keep_finite(state.p, walked.p, panels_size(x.k_dim, columns));
        continue;
      }
      carry(z, c, state, fetch_some);
    }
    write_rows(x.last + at, x.v_dim, state, 0, x.k_dim, columns);
    return true;
  }

  // One token: its rows, and what it reads and writes of the state.
  struct Token {
    float *k, *q, *a, *value, *out;  // a: decays; value: v, then the columns of what is written
    float beta;
    bool opens;  // a segment: what was before, whatever it is, is not read
  };
  void take(Arrays &arrays, Token &token, long columns) const {
    long wide = round_up(x.k_dim, kUnit), across = round_up(columns, kUnit);
    arrays.take(token.k, wide);
    arrays.take(token.q, wide);
    arrays.take(token.a, wide);
    arrays.take(token.value, across);
    arrays.take(token.out, across);
  }

  // The rows of a chunk; false where a number is not finite.
  bool put_chunk(const Sizes &z, const Panels &read, int64_t batch, int64_t head, long first, long n,
                 long column) const {
    vf nothing = {};
    for (long i = 0; i < n; ++i)
      for (long c = 0; c < z.v_dim; c += kPanel) {
        long width = z.v_dim - c < kPanel ? z.v_dim - c : kPanel;
        nothing += put(read.at(z.size + i, c), batch, head, first + i, column + c, width);
      }
    return sum_lanes(nothing) == 0.0f;
  }

  // What queries read where something is not finite: a tile of rows ends at its last one's token, and there 0 times NaN
  // would pair_decay the rows above. Each row by itself, to the same bits.
  void read_alone(const Sizes &z, const Chunk &c, const Panels &read, const Panels &state) const {
    multiply_panels<kZero>(read, z.size, c.fading + z.size * z.wide, z.wide, 1, state, z.k_dim, c.n, z.v_dim);
    for (long i = 0; i < c.n; ++i)
      multiply_panels<kAdd>(read, z.size + i, c.pairs + (z.size + i) * z.size, z.size, 1, c.update, i + 1, 1, z.v_dim);
  }

  // Token by token: the state is read and written once for each, from `state` to `last`.
  bool step(long pair, long column, long columns) {
    int64_t batch = pair / x.heads, number = pair % x.heads, at = pair * x.k_dim * x.v_dim + column;
    Head<In> head(x, batch, number, column);
    Token token;
    if (!reserve([&](Arrays &arrays) { take(arrays, token, columns); })) return false;
    const float *from = x.state ? x.state + at : nullptr;
    float *to = x.last + at;
    for (long t = 0; t < x.tokens; ++t, from = to) {
      read_token(head, t, token, columns);
      advance(token, from, to, x.v_dim, 0, columns);
      put(token.out, batch, number, t, column, columns);
    }
    if (!x.tokens)
      for (long d = 0; d < x.k_dim; ++d)
        for (long c = 0; c < columns; ++c) to[d * x.v_dim + c] = from ? from[d * x.v_dim + c] : 0.0f;
    return true;
  }

  // The same for a chunk that is not finite and in which a segment opens: products carry that across. What they found
  // finite stays to the bit.
  void walk(const Head<In> &head, Token &token, const Panels &state, const Panels &read, long first, long n,
            long columns) const {
    for (long i = 0; i < n; ++i) {
      read_token(head, first + i, token, columns);
      for (long c = 0; c < columns; c += kPanel) {
        long width = round_up(columns - c < kPanel ? columns - c : kPanel, kUnit);
        advance(token, state.panel(c), state.panel(c), kPanel, c, width);
        keep_finite(read.at(read.rows / 2 + i, c), token.out + c, width);
      }
    }
  }
  static void keep_finite(float *found, const float *other, long count) {
    for (long c = 0; c < count; c += kLanes) {
      vf value = load(found + c);
      store(found + c, value - value == 0.0f ? value : load(other + c));
    }
  }

  void read_token(const Head<In> &head, long t, Token &token, long columns) const {
    copy_row<In, Float32>((word *)token.k, head.k + t * head.k_step, x.k_dim);
    copy_row<In, Float32>((word *)token.q, head.q + t * head.q_step, x.k_dim);
    copy_row<In, Float32>((word *)token.value, head.v + t * head.v_step, columns);
    token.beta = head.beta ? head.beta[t * head.beta_step] : 1.0f;
    token.opens = head.starts && head.starts[t];
    const float *decay = head.log_decay ? head.log_decay + t * head.decay_step : nullptr;
    for (long d = 0; d < x.k_dim; d += kLanes) {
      vf now = splat(decay && !x.channel ? *decay : 0.0f);
      if (decay && x.channel) now = read_words<float, Float32>(decay + d, x.k_dim - d);
      store(token.a + d, decay_exp(now));
      store(token.q + d, load(token.q + d) * x.scale);
    }
  }

  // Columns of the state, rows `step` apart, from `from` (null: zeros) to `to`; they are `first` and on of the token's.
  void advance(const Token &token, const float *from, float *to, long step, long first, long columns) const {
    if (token.opens) from = nullptr;
    long c = 0;  // a strip of columns at a time stays in registers and cache
    for (; c + 8 * kLanes <= columns; c += 8 * kLanes)
      strip<8>(token, from ? from + c : nullptr, to + c, step, first + c);
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
      strip<4>(token, from ? from + c : nullptr, to + c, step, first + c);
    for (; c + kLanes <= columns; c += kLanes) strip<1>(token, from ? from + c : nullptr, to + c, step, first + c);
    for (; c < columns; ++c) single(token, from ? from + c : nullptr, to + c, step, first + c);
  }

  // V vectors of columns: decay and what the key reads, then write and what the query reads.
  template <int V>
  REGARD_INLINE void strip(const Token &token, const float *from, float *to, long step, long column) const {
    vf held[V], sum[V];
    each<V>(REGARD_EACH { held[i] = vf{}, sum[i] = vf{}; });
    if (x.beta && from)
      for (long d = 0; d < x.k_dim; ++d) {
        vf key = splat(token.k[d] * token.a[d]);
        each<V>(REGARD_EACH { held[i] += key * load(from + d * step + i * kLanes); });
      }
    each<V>(REGARD_EACH { held[i] = (load(token.value + column + i * kLanes) - held[i]) * token.beta; });
    for (long d = 0; d < x.k_dim; ++d) {
      vf key = splat(token.k[d]), query = splat(token.q[d]), decay = splat(token.a[d]);
      each<V>(REGARD_EACH {
        vf s = from ? load(from + d * step + i * kLanes) * decay : vf{};
        s += key * held[i];
        store(to + d * step + i * kLanes, s);
        sum[i] += query * s;
      });
    }
    each<V>(REGARD_EACH { store(token.out + column + i * kLanes, sum[i]); });
  }

  REGARD_INLINE void single(const Token &token, const float *from, float *to, long step, long column) const {
    float held = 0, sum = 0;
    for (long d = 0; x.beta && from && d < x.k_dim; ++d) held += token.k[d] * token.a[d] * from[d * step];
    held = (token.value[column] - held) * token.beta;
    for (long d = 0; d < x.k_dim; ++d) {
      float s = (from ? from[d * step] * token.a[d] : 0.0f) + token.k[d] * held;
      to[d * step] = s;
      sum += token.q[d] * s;
    }
    token.out[column] = sum;
  }
};

}  // namespace
