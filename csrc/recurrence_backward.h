// The recurrence, backward: the forward pass kept a state every so many tokens. From the last such stretch to the
// first, its chunks run again and are remembered; then they are walked back with dS, the gradient of the state behind
// them.
//
// With u = beta m, and Y the rows -dr (r what m was solved for) above those of dO:
//   du = P^T dO + (E k) dS,   dm_i = du_i - sum_{j>i} L_ji dr_j,   dr = beta dm,   dbeta = dm . m,   dv = dr
//   d(F k), d(F q) = Y S^T,   d(E k) = U dS^T,   dS <- F_n dS + (F k, F q)^T Y,   dL, dP = Y U^T
// and the log-decays: a weight W_ij = D_ij dD_ij belongs to every token j < l <= i, so each token gets the sums of rows
// from it on, less those of columns from it on. These start again at a reset, so that nothing crosses it.
#pragma once
#include "recurrence_forward.h"

namespace {

template <class In>
class RecurrenceBackward {
 public:
  RecurrenceBackward(const regard_recurrence &call, const regard_recurrence_grad &grad)
      : x(call), g(grad), z(call, call.v_dim), across(round_up(call.v_dim, kUnit)) {}

  int run() {
    int failed = 0;
    long tasks = x.batch * x.key_heads;
#pragma omp parallel for schedule(static) if (tasks > 1)
    for (long task = 0; task < tasks; ++task)
      if (!work(task)) {
#pragma omp atomic write
        failed = 1;
      }
    return failed ? REGARD_NO_MEMORY : REGARD_OK;
  }

 private:
  static constexpr int kMaxChunks = 16;  // of a stretch

  const regard_recurrence &x;
  const regard_recurrence_grad &g;
  Sizes z;
  long across;

  struct Memory {
    Chunk chunks[kMaxChunks];
    Panels states[kMaxChunks];  // before each chunk of a stretch
    Panels d_state, y, dm, read;
    float *d_fading;     // [2 C][wide]
    float *d_ending;     // [C][wide]
    float *d_rows;       // [2 C][wide]: of k and q (scaled)
    float *row_part;     // [2 C][wide], channel decays: what rows i get from pairs, k then q
    float *column_part;  // [C][wide]: what columns j get from pairs
    float *d_pairs;      // [2 C][C]
    float *left;         // [C][2 C]
    float *transposed;   // [Dv][max(wide, C)]
    float *scratch;
  };

  bool work(long task) {
    long every = kept_every(x.k_dim, x.v_dim), count = (x.tokens + every - 1) / every, chunks = every / z.size;
    long group = x.heads / x.key_heads;
    Memory m;
    if (!reserve([&](Arrays &arrays) {
          auto panels = [&](Panels &to, long rows) {
            to.rows = rows;
            arrays.take(to.p, panels_size(rows, x.v_dim));
          };
          for (long n = 0; n < chunks; ++n) {
            z.take(arrays, m.chunks[n]);
            panels(m.states[n], x.k_dim);
          }
          panels(m.d_state, x.k_dim);
          panels(m.y, 2 * z.size);
          panels(m.dm, z.size);
          panels(m.read, z.size);
          arrays.take(m.d_fading, 2 * z.size * z.wide);
          arrays.take(m.d_ending, z.size * z.wide);
          arrays.take(m.d_rows, 2 * z.size * z.wide);
          arrays.take(m.row_part, 2 * z.size * z.wide);
          arrays.take(m.column_part, z.size * z.wide);
          arrays.take(m.d_pairs, 2 * z.size * z.size);
          arrays.take(m.left, 2 * z.size * z.size);
          arrays.take(m.transposed, across * (z.wide > z.size ? z.wide : z.size));
          arrays.take(m.scratch, chunk_scratch(z));
        }))
      return false;
    for (long member = 0; member < group; ++member) {
      long pair = task * group + member, at = pair * x.k_dim * x.v_dim;  // heads of a key head lie together
      Head<In> head(x, pair / x.heads, pair % x.heads, 0);
      read_state(z, m.d_state, g.d_last ? g.d_last + at : nullptr, x.v_dim);
      for (long stretch = count - 1; stretch >= 0; --stretch) {
        long first = stretch * every, end = first + every < x.tokens ? first + every : x.tokens;
        long used = (end - first + z.size - 1) / z.size;
        read_state(z, m.states[0], x.kept + (pair * count + stretch) * x.k_dim * x.v_dim, x.v_dim);
        for (long n = 0; n < used; ++n) again(m, n, used, head, first + n * z.size, end);
        for (long n = used - 1; n >= 0; --n) back(m, m.chunks[n], m.states[n], pair, first + n * z.size, member > 0);
      }
      write_rows(g.d_state + at, x.v_dim, m.d_state, 0, x.k_dim, x.v_dim);
    }
    return true;
  }

  // Chunk n of a stretch forward, without its output.
  void again(Memory &m, long n, long used, const Head<In> &head, long first, long end) {
    Chunk &c = m.chunks[n];
    begin_chunk(z, c, head, first, end - first < z.size ? end - first : z.size, x.scale, m.scratch);
    if (z.delta)
      multiply_panels<kZero>(m.read, 0, c.fading, z.wide, 1, m.states[n], x.k_dim, round_up(c.n, kUnit), x.v_dim);
    correct(z, c, head, first, m.read);
    if (n + 1 == used) return;
    memcpy(m.states[n + 1].p, m.states[n].p, panels_size(x.k_dim, x.v_dim) * sizeof(float));
    carry(z, c, m.states[n + 1]);
  }

  void back(Memory &m, const Chunk &c, const Panels &state, long pair, long first, bool add) {
    long n = c.n, rows = round_up(n, kUnit), size = z.size, wide = z.wide;
    const float *queries = c.pairs + size * size, *query_rows = c.fading + size * wide;
    Panels gradient = {m.y.p + size * kPanel, m.y.rows};  // the rows of dO
    for (long i = 0; i < size; ++i)
      for (long column = 0; column < across; column += kLanes) {
        const float *from = g.d_out + (pair * x.tokens + first + i) * x.v_dim + column;
        store(gradient.at(i, column), i < n ? read_words<float, Float32>(from, x.v_dim - column) : vf{});
        store(m.y.at(i, column), vf{});
        store(m.dm.at(i, column), vf{});
      }
    multiply_panels<kZero>(m.dm, 0, queries, 1, size, gradient, n, n, x.v_dim);
    multiply_panels<kAdd>(m.dm, 0, c.ending, wide, 1, m.d_state, x.k_dim, n, x.v_dim);
    if (z.delta) solve<true>(z, c, m.dm, m.y, rows, nullptr);
    float *d_v = g.d_v + (pair * x.tokens + first) * x.v_dim;
    write_rows(d_v, x.v_dim, z.delta ? m.y : m.dm, 0, n, x.v_dim);
    transpose_panels(m.transposed, size, c.update, 0, rows, x.v_dim);
    for (long half = z.delta ? 0 : size; half <= size; half += size) {
      if (!half)
        for (long i = 0; i < n; ++i)
          for (long column = 0; column < across; column += kLanes) store(m.y.at(i, column), -load(m.y.at(i, column)));
      multiply_across<kZero>(m.d_pairs + half * size, size, m.y, half, m.transposed, size, x.v_dim, n, rows);
    }
    transpose_panels(m.transposed, wide, state, 0, x.k_dim, x.v_dim);
    for (long half = z.delta ? 0 : size; half <= size; half += size)
      multiply_across<kZero>(m.d_fading + half * wide, wide, m.y, half, m.transposed, wide, x.v_dim, n, wide - kUnit);
    transpose_panels(m.transposed, wide, m.d_state, 0, x.k_dim, x.v_dim);
    multiply_across<kZero>(m.d_ending, wide, c.update, 0, m.transposed, wide, x.v_dim, n, wide - kUnit);
    if (z.delta && g.d_beta) {
      float *d_beta = g.d_beta + pair * x.tokens + first;
      for (long i = 0; i < n; ++i) {
        vf sum = {};
        for (long column = 0; column < across; column += kLanes)
          sum += load(m.dm.at(i, column)) * load(c.residue.at(i, column));
        d_beta[i] = sum_lanes(sum);
      }
    }
    if (z.channel)
      channel_pairs(m, c);
    else
      pairs(m, c);
    if (z.decays && g.d_log_decay) {
      if (z.channel)
        channel_decays(m, c, state, g.d_log_decay + (pair * x.tokens + first) * x.k_dim);
      else
        decays(m, c, state, g.d_log_decay + pair * x.tokens + first);
    }
    if (z.delta)
      multiply_panels<kScaled>(m.d_state, 0, c.fading, 1, wide, m.y, 2 * size, x.k_dim, x.v_dim, c.total);
    else
      multiply_panels<kScaled>(m.d_state, 0, query_rows, 1, wide, gradient, n, x.k_dim, x.v_dim, c.total);
    write_keys(m, c, pair, first, add);
  }

  // Sums of d_fading and d_ending, weighted back, and the pairs' own gradients, into d_rows.
  void pairs(Memory &m, const Chunk &c) {
    long size = z.size, wide = z.wide, n = c.n;
    for (long i = 0; i < n; ++i)
      for (long d = 0; d < wide - kUnit; d += kLanes) {
        vf key = load(m.d_ending + i * wide + d) * c.end[i];
        if (z.delta) key += load(m.d_fading + i * wide + d) * c.fade[i];
        store(m.d_rows + i * wide + d, key);
        store(m.d_rows + (size + i) * wide + d, load(m.d_fading + (size + i) * wide + d) * c.fade[i]);
      }
    // left = [dL D + (dL D)^T | (dP D)^T]
    for (long i = 0; i < n; ++i) {
      float *to = m.left + i * 2 * size;
      for (long j = 0; j < n; ++j) {
        long late = i > j ? i : j, early = i > j ? j : i;
        float weight = c.pair_decay[late * size + early];
        to[j] = z.delta && late > early ? m.d_pairs[late * size + early] * weight : 0.0f;
        to[size + j] = j >= i ? m.d_pairs[(size + j) * size + i] * weight : 0.0f;
      }
    }
    for (long column = 0; column < wide - kUnit; column += kPanel) {
      long width = wide - kUnit - column < kPanel ? wide - kUnit - column : kPanel;
      float *keys = m.d_rows + column, *queries = keys + size * wide;
      if (z.delta) multiply<kAdd>(keys, wide, m.left, 2 * size, 1, c.rows + column, wide, n, n, width);
      multiply<kAdd>(keys, wide, m.left + size, 2 * size, 1, c.rows + size * wide + column, wide, n, n, width);
      multiply<kAdd>(queries, wide, m.left + size, 1, 2 * size, c.rows + column, wide, n, n, width);
    }
  }

  // The same with decays per channel, sixteen in lanes: for each row i, D_ij for falling j is a running product.
  void channel_pairs(Memory &m, const Chunk &c) {
    long size = z.size, wide = z.wide, n = c.n;
    for (long d = 0; d < wide - kUnit; d += kLanes) {
      vf columns[kChannelChunkTokens];
      each<kChannelChunkTokens>(REGARD_EACH { columns[i] = vf{}; });
      for (long i = 0; i < n; ++i) {
        vf k = load(c.rows + i * wide + d), q = load(c.rows + (size + i) * wide + d);
        vf product = splat(1), key_row = {}, query_row = {};
        for (long j = i - 1; j >= 0; --j) {
          product *= load(c.decay + (j + 1) * wide + d);
          vf from_queries = product * m.d_pairs[(size + i) * size + j];
          vf key = load(c.rows + j * wide + d);
          query_row += from_queries * key;
          vf column = from_queries * q;
          if (z.delta) {
            vf from_keys = product * m.d_pairs[i * size + j];
            key_row += from_keys * key;
            column += from_keys * k;
          }
          columns[j] += column;
        }
        store(m.row_part + i * wide + d, key_row);
        store(m.row_part + (size + i) * wide + d, query_row);
      }
      vf fading = splat(1), ending = splat(1);
      for (long i = 0; i < n; ++i) {
        fading *= load(c.decay + i * wide + d);
        float own = m.d_pairs[(size + i) * size + i];
        vf key = load(m.row_part + i * wide + d) + columns[i] + own * load(c.rows + (size + i) * wide + d);
        if (z.delta) key += load(m.d_fading + i * wide + d) * fading;
        store(m.d_rows + i * wide + d, key);
        vf query = load(m.row_part + (size + i) * wide + d) + own * load(c.rows + i * wide + d);
        store(m.d_rows + (size + i) * wide + d, query + load(m.d_fading + (size + i) * wide + d) * fading);
        store(m.column_part + i * wide + d, columns[i]);
      }
      for (long i = n - 1; i >= 0; --i) {
        store(m.d_rows + i * wide + d, load(m.d_rows + i * wide + d) + load(m.d_ending + i * wide + d) * ending);
        ending *= load(c.decay + i * wide + d);
      }
    }
  }

  void decays(Memory &m, const Chunk &c, const Panels &state, float *to) {
    long size = z.size, wide = z.wide, n = c.n;
    float rows[kChunkTokens], columns[kChunkTokens] = {}, ends[kChunkTokens], whole = 0;
    for (long i = 0; i < n; ++i) {
      vf near = {}, far = {};
      for (long d = 0; d < wide - kUnit; d += kLanes) {
        near += load(m.d_fading + (size + i) * wide + d) * load(c.fading + (size + i) * wide + d);
        if (z.delta) near += load(m.d_fading + i * wide + d) * load(c.fading + i * wide + d);
        far += load(m.d_ending + i * wide + d) * load(c.ending + i * wide + d);
      }
      rows[i] = sum_lanes(near), ends[i] = sum_lanes(far);
      for (long j = 0; j < i; ++j) {
        float weight = m.d_pairs[(size + i) * size + j] * c.pairs[(size + i) * size + j];
        if (z.delta) weight += m.d_pairs[i * size + j] * c.pairs[i * size + j];
        rows[i] += weight, columns[j] += weight;
      }
    }
    if (c.total[0] != 0) {
      vf sum = {};
      for (long column = 0; column < across; column += kLanes)
        for (long r = 0; r < x.k_dim; ++r) sum += load(state.at(r, column)) * load(m.d_state.at(r, column));
      whole = sum_lanes(sum) * c.total[0];
    }
    double before[kChunkTokens + 1] = {}, later = 0;  // long sums that nearly cancel
    for (long i = 0; i < n; ++i) before[i + 1] = before[i] + ends[i];
    for (long l = n - 1; l >= 0; --l) {
      bool reset = c.decay[l] == 0;
      later += (double)rows[l] - columns[l];
      to[l] = reset ? 0.0f : (float)(later + before[l] + whole);
      if (reset) later = 0;
    }
  }

  void channel_decays(Memory &m, const Chunk &c, const Panels &state, float *to) {
    long size = z.size, wide = z.wide, n = c.n;
    for (long d = 0; d < wide - kUnit; d += kLanes) {
      float sums[kLanes] = {};
      for (long lane = 0; lane < kLanes && d + lane < x.k_dim; ++lane) {
        vf sum = {};
        for (long column = 0; column < across; column += kLanes)
          sum += load(state.at(d + lane, column)) * load(m.d_state.at(d + lane, column));
        sums[lane] = sum_lanes(sum);
      }
      vf before[kChannelChunkTokens + 1], later = {}, whole = load(sums) * load(c.total + d);
      before[0] = vf{};
      for (long i = 0; i < n; ++i)
        before[i + 1] = before[i] + load(m.d_ending + i * wide + d) * load(c.ending + i * wide + d);
      for (long l = n - 1; l >= 0; --l) {
        long key = l * wide + d, query = (size + l) * wide + d;
        vf a = load(c.decay + key);
        later += load(m.d_fading + query) * load(c.fading + query) + load(m.row_part + query) * load(c.rows + query);
        vf keys = load(m.row_part + key) - load(m.column_part + key);
        later += keys * load(c.rows + key);
        if (z.delta) later += load(m.d_fading + key) * load(c.fading + key);
        float out[kLanes];
        store(out, a == 0.0f ? vf{} : later + before[l] + whole);
        for (long lane = 0; lane < kLanes && d + lane < x.k_dim; ++lane) to[l * x.k_dim + d + lane] = out[lane];
        later = a == 0.0f ? vf{} : later;
      }
    }
  }

  // Value heads of one key head add up, in their order.
  void write_keys(const Memory &m, const Chunk &c, long pair, long first, bool add) {
    long key_head = pair % x.heads / (x.heads / x.key_heads), batch = pair / x.heads;
    for (int half = 0; half < 2; ++half) {
      float *to = (half ? g.d_q : g.d_k) + ((batch * x.key_heads + key_head) * x.tokens + first) * x.k_dim;
      float factor = half ? x.scale : 1.0f;
      for (long i = 0; i < c.n; ++i) {
        const float *from = m.d_rows + (half * z.size + i) * z.wide;
        for (long d = 0; d < x.k_dim; ++d) to[i * x.k_dim + d] = from[d] * factor + (add ? to[i * x.k_dim + d] : 0.0f);
      }
    }
  }
};

}  // namespace
