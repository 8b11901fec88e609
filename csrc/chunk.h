// One chunk of a recurrence: its rows, the products among them, and what it writes to the state.
//
// With a_t the decays, F_i = a_1 ... a_i, E_j = a_{j+1} ... a_n and D_ij = a_{j+1} ... a_i (products, never quotients):
//   A_ij = beta_i (k_i . k_j D_ij) for j < i,    P_ij = q_i . k_j D_ij for j <= i
//   (I + A) U = beta (v - (F k) S),    out = (F q) S + P U,    S <- F_n S + (E k)^T U
#pragma once
#include "panels.h"
#include "recurrent.h"
#include "regard.h"

namespace {

constexpr int kChunkTokens = 32;  // tokens; a decay per channel takes half, whose products fit in registers
constexpr int kChannelChunkTokens = 16;
static_assert(kChannelChunkTokens == kUnit, "a chunk of channel decays is one unit of rows");

// The memory of a chunk. Rows of q stand below those of k, each `wide` floats, 0 behind the head's own.
struct Chunk {
  long n;                  // tokens of this chunk
  float *rows;             // [2 C][wide]: k, q (scaled)
  float *fading;           // [2 C][wide]: F k, F q
  float *ending;           // [C][wide]: E k
  float *total;            // [wide]: F_n, for each channel
  float *decay;            // [C][wide] a_t per channel, or [C] a_t
  float *pairs;            // [2 C][C]: k_i . k_j D_ij for j < i, and P; else 0
  float *pair_decay;       // [C][C]: D_ij for j <= i; a decay per channel has none
  float *fade, *end;       // [C]: F_i, E_j of a decay per head
  float *beta;             // [C]
  Panels residue, update;  // [C]: v - (F k) S, and U
};

struct Sizes {
  long k_dim, v_dim, wide, size;
  bool delta, channel, decays;

  explicit Sizes(const regard_recurrence &x, long columns)
      : k_dim(x.k_dim), v_dim(columns), wide(round_up(x.k_dim, kUnit) + kUnit),
        size(x.channel ? kChannelChunkTokens : kChunkTokens), delta(x.beta != nullptr), channel(x.channel != 0),
        decays(x.log_decay != nullptr || x.starts != nullptr) {}

  void take(Arrays &arrays, Chunk &chunk) const {
    arrays.take(chunk.rows, 2 * size * wide);
    arrays.take(chunk.fading, 2 * size * wide);
    arrays.take(chunk.ending, size * wide);
    arrays.take(chunk.total, wide);
    arrays.take(chunk.decay, channel ? size * wide : size);
    arrays.take(chunk.pairs, 2 * size * size);
    arrays.take(chunk.pair_decay, size * size);
    arrays.take(chunk.fade, size);
    arrays.take(chunk.end, size);
    arrays.take(chunk.beta, size);
    chunk.residue.rows = chunk.update.rows = size;
    arrays.take(chunk.residue.p, panels_size(size, v_dim));
    arrays.take(chunk.update.p, panels_size(size, v_dim));
  }
};

// Where one head of one batch row lies.
template <class In>
struct Head {
  const In *q, *k, *v;
  const float *beta, *log_decay;
  const uint8_t *starts;
  long q_step, k_step, v_step, beta_step, decay_step;

  Head(const regard_recurrence &x, int64_t batch, int64_t head, long column) {
    int64_t key = head / (x.heads / x.key_heads);
    q = (const In *)x.q + batch * x.q_stride[0] + key * x.q_stride[1];
    k = (const In *)x.k + batch * x.k_stride[0] + key * x.k_stride[1];
    v = (const In *)x.v + batch * x.v_stride[0] + head * x.v_stride[1] + column;
    beta = x.beta ? x.beta + batch * x.beta_stride[0] + head * x.beta_stride[1] : nullptr;
    log_decay = x.log_decay ? x.log_decay + batch * x.decay_stride[0] + head * x.decay_stride[1] : nullptr;
    starts = x.starts ? x.starts + batch * x.tokens : nullptr;
    q_step = x.q_stride[2], k_step = x.k_stride[2], v_step = x.v_stride[2];
    beta_step = x.beta_stride[2], decay_step = x.decay_stride[2];
  }

  // Whether a segment opens at one of n tokens.
  REGARD_INLINE bool opens(long first, long n) const { return starts && memchr(starts + first, 1, n); }
};

// ---- decays ---------------------------------------------------------------------------------------------------------

// Rows of k and q, from row `first` of the head; rows from n on are 0.
template <class In>
void read_rows(const Sizes &z, Chunk &c, const Head<In> &head, long first, float scale) {
  for (int half = 0; half < 2; ++half)
    for (long i = 0; i < z.size; ++i) {
      float *to = c.rows + (half * z.size + i) * z.wide;
      const In *from = half ? head.q + (first + i) * head.q_step : head.k + (first + i) * head.k_step;
      for (long d = 0; d < z.wide - kUnit; d += kLanes) {
        vf x = i < c.n ? read_words<In, Float32>(from + d, z.k_dim - d) : vf{};
        store(to + d, half ? x * scale : x);
      }
    }
}

// a_t, and everything that products of them give, for a decay per head (or none).
template <class In>
void read_decay(const Sizes &z, Chunk &c, const Head<In> &head, long first) {
  float now[kChunkTokens], sums[kChunkTokens], sum = 0;
  for (long i = 0; i < z.size; ++i) {
    bool opens = head.starts && i < c.n && head.starts[first + i];
    now[i] = opens ? -INFINITY : head.log_decay && i < c.n ? head.log_decay[(first + i) * head.decay_step] : 0.0f;
    sums[i] = sum += now[i];
  }
  for (long i = 0; i < z.size; i += kLanes) {
    store(c.decay + i, decay_exp(load(now + i)));
    store(c.fade + i, decay_exp(load(sums + i)));
  }
  // a row's sums are those of the row before and its own decay: no difference of long sums loses digits
  vf logs[kChunkTokens / kLanes] = {};
  for (long i = 0; i < z.size; ++i)
    for (long j = 0; j < z.size; j += kLanes) {
      vi late = lane_numbers() + (int32_t)j;
      vf &log = logs[j / kLanes];
      log = late < (int32_t)i ? log + now[i] : vf{};
      store(c.pair_decay + i * z.size + j, j > i ? vf{} : late <= (int32_t)i ? decay_exp(log) : vf{});
    }
  memcpy(c.end, c.pair_decay + (z.size - 1) * z.size, z.size * sizeof(float));
  for (long i = 0; i < z.size; ++i)
    for (long d = 0; d < z.wide - kUnit; d += kLanes) {
      long key = i * z.wide + d, query = (z.size + i) * z.wide + d;
      store(c.fading + key, load(c.rows + key) * c.fade[i]);
      store(c.fading + query, load(c.rows + query) * c.fade[i]);
      store(c.ending + key, load(c.rows + key) * c.end[i]);
    }
  for (long d = 0; d < z.wide; d += kLanes) store(c.total + d, splat(c.fade[z.size - 1]));
}

// The same for a decay per channel.
template <class In>
void read_channel_decay(const Sizes &z, Chunk &c, const Head<In> &head, long first) {
  for (long i = 0; i < z.size; ++i) {
    const float *from = head.log_decay + (first + i) * head.decay_step;
    bool opens = head.starts && i < c.n && head.starts[first + i];
    for (long d = 0; d < z.wide - kUnit; d += kLanes) {
      vf x = i < c.n ? read_words<float, Float32>(from + d, z.k_dim - d) : vf{};
      x = opens ? splat(-INFINITY) : x;
      store(c.decay + i * z.wide + d, decay_exp(x));
      store(c.total + d, i ? load(c.total + d) + x : x);
    }
  }
  for (long d = 0; d < z.wide - kUnit; d += kLanes) {
    store(c.total + d, decay_exp(load(c.total + d)));  // not a product: it is what compounds from chunk to chunk
    vf fading = splat(1), ending = splat(1);
    for (long i = 0; i < z.size; ++i) {
      fading *= load(c.decay + i * z.wide + d);
      for (int half = 0; half < 2; ++half) {
        long at = (half * z.size + i) * z.wide + d;
        store(c.fading + at, load(c.rows + at) * fading);
      }
    }
    for (long i = z.size - 1; i >= 0; --i) {
      long at = i * z.wide + d;
      store(c.ending + at, load(c.rows + at) * ending);
      ending *= load(c.decay + at);
    }
  }
}

// ---- products inside the chunk --------------------------------------------------------------------------------------

// `columns` is memory for [wide][2 C]: k and q transposed.
REGARD_INLINE void pair_products(const Sizes &z, Chunk &c, float *columns) {
  pack_transposed<float, Float32>((word *)columns, c.rows, z.wide, c.n, z.k_dim, z.size);
  long first = z.delta ? 0 : z.size;  // without a correction, keys meet queries only
  int units = (int)((c.n + kUnit - 1) / kUnit);
  for (long half = first; half <= z.size; half += z.size)
    for (long i = 0; i < c.n; i += kUnit)  // sixteen rows and the columns up to their own
      multiply<kZero>(c.pairs + (half + i) * z.size, z.size, c.rows + (half + i) * z.wide, z.wide, 1, columns, z.size,
                      z.k_dim, c.n - i < kUnit ? c.n - i : kUnit, i + kUnit);
  for (long half = first; half <= z.size; half += z.size)
    for (long i = 0; i < units * kUnit; ++i) {
      float *row = c.pairs + (half + i) * z.size;
      for (long j = 0; j < z.size; j += kLanes)
        store(row + j, j <= i && i < c.n ? load(row + j) * load(c.pair_decay + i * z.size + j) : vf{});
      if (!half) row[i] = 0;
    }
}

// The sums over channels of x_ic k_jc D_ijc, for sixteen rows i in lanes: for each channel, D_ij for falling j is a
// running product, masked to i >= j. Two passes of eight columns j keep their sums in registers.
template <bool upper>
REGARD_INLINE void channel_columns(const Sizes &z, const Chunk &c, const float *columns, float *running, float *out) {
  constexpr int top = upper ? 15 : 7;
  vf keys[8][kUnitVectors], queries[8][kUnitVectors];
  each<8 * kUnitVectors>(REGARD_EACH { keys[i / kUnitVectors][i % kUnitVectors] = vf{}; });
  each<8 * kUnitVectors>(REGARD_EACH { queries[i / kUnitVectors][i % kUnitVectors] = vf{}; });
  vi lane[kUnitVectors];
  each<kUnitVectors>(REGARD_EACH { lane[i] = lane_numbers() + i * kLanes; });
  for (long d = 0; d < z.k_dim; ++d) {
    const float *k = columns + d * kUnit, *q = k + z.wide * kUnit, *a = c.decay + d;
    vf product[kUnitVectors];
    each<kUnitVectors>(REGARD_EACH { product[i] = upper ? vf{} : load(running + d * kUnit + i * kLanes); });
    each<8>([&](auto back) __attribute__((always_inline)) {
      constexpr int j = top - back;
      float next = j + 1 < kUnit ? a[(j + 1) * z.wide] : 1.0f;
      each<kUnitVectors>(REGARD_EACH {
        product[i] = lane[i] == j ? splat(1) : product[i] * next;
        vf key = product[i] * k[j];
        keys[back][i] += key * load(k + i * kLanes);
        queries[back][i] += key * load(q + i * kLanes);
      });
    });
    if (upper) each<kUnitVectors>(REGARD_EACH { store(running + d * kUnit + i * kLanes, product[i]); });
  }
  for (int step = 0; step < 8; ++step)
    for (int v = 0; v < kUnitVectors; ++v) {
      store(out + (top - step) * kUnit + v * kLanes, keys[step][v]);
      store(out + (kUnit + top - step) * kUnit + v * kLanes, queries[step][v]);
    }
}

// `columns` is memory for [2][wide][16], `running` for [wide + 32][16].
REGARD_INLINE void channel_pair_products(const Sizes &z, Chunk &c, float *columns, float *running) {
  for (int half = 0; half < 2; ++half)
    pack_transposed<float, Float32>((word *)columns + half * z.wide * kUnit, c.rows + half * z.size * z.wide, z.wide,
                                    kUnit, z.k_dim, kUnit);
  float *out = running + z.wide * kUnit;
  channel_columns<true>(z, c, columns, running, out);
  channel_columns<false>(z, c, columns, running, out);
  for (int half = 0; half < 2; ++half)
    pack_transposed<float, Float32>((word *)c.pairs + half * kUnit * kUnit, out + half * kUnit * kUnit, kUnit, kUnit,
                                    kUnit, kUnit);
  for (long i = 0; i < kUnit; ++i) c.pairs[i * kUnit + i] = 0;
}

// ---- the correction -------------------------------------------------------------------------------------------------

// Forward: m_i = r_i - s_i - sum_{j<i} L_ij u_j and u_i = beta_i m_i, r read from `m` and m put in its place.
// Backward: m_i = r_i - sum_{j>i} L_ji u_j. `rows` is a multiple of 16, L is c.pairs, 0 on and above its diagonal.
template <bool backward>
REGARD_INLINE void solve(const Sizes &z, const Chunk &c, const Panels &m, const Panels &u, long rows, const Panels *s) {
  for (long column = 0; column < round_up(z.v_dim, kUnit); column += kLanes)
    for (long n = 0; n < rows; n += kUnit) {
      long begin = backward ? rows - kUnit - n : n;
      float *at = m.at(begin, column), *to = u.at(0, column);
      const float *weights = c.pairs, *less = backward ? nullptr : s->at(begin, column);
      vf x[kUnit];
      each<kUnit>(
          REGARD_EACH { x[i] = backward ? load(at + i * kPanel) : load(at + i * kPanel) - load(less + i * kPanel); });
      for (long j = backward ? begin + kUnit : 0; j < (backward ? rows : begin); ++j) {
        vf done = load(to + j * kPanel);
        each<kUnit>(REGARD_EACH {
          x[i] -= done * (backward ? weights[j * z.size + begin + i] : weights[(begin + i) * z.size + j]);
        });
      }
      each<kUnit>([&](auto order) __attribute__((always_inline)) {
        constexpr int r = backward ? kUnit - 1 - order : (int)order;
        store(at + r * kPanel, x[r]);
        vf done = x[r] * c.beta[begin + r];
        store(to + (begin + r) * kPanel, done);
        each<kUnit>(REGARD_EACH {
          if (backward ? i < r : i > r)
            x[i] -= done *
                    (backward ? weights[(begin + r) * z.size + begin + i] : weights[(begin + i) * z.size + begin + r]);
        });
      });
    }
}

// Rows of values, 0 from row n on.
template <class In>
REGARD_INLINE void read_values(const Sizes &z, const Panels &to, long n, long rows, const In *v, long step) {
  Rows<In, Float32>::pack((word *)to.p, to.rows * kPanel, rows, z.v_dim,
                          [&](long i) { return i < n ? v + i * step : nullptr; });
}

// What a chunk is made of, but for what it reads from the state. `scratch` is for [2][wide][16] and [wide + 32][16].
template <class In>
REGARD_INLINE void begin_chunk(const Sizes &z, Chunk &c, const Head<In> &head, long first, long n, float scale,
                               float *scratch) {
  c.n = n;
  read_rows(z, c, head, first, scale);
  if (z.channel) {
    read_channel_decay(z, c, head, first);
    channel_pair_products(z, c, scratch, scratch + 2 * z.wide * kUnit);
  } else {
    read_decay(z, c, head, first);
    pair_products(z, c, scratch);
  }
  for (long i = 0; i < z.size; ++i) c.beta[i] = head.beta && i < n ? head.beta[(first + i) * head.beta_step] : 0.0f;
}
REGARD_INLINE long chunk_scratch(const Sizes &z) { return z.wide * 2 * kChunkTokens + (z.wide + 2 * kUnit) * kUnit; }

// Asks for the rows that the next chunk will read, and for those that this one will write, some at a time: a core can
// wait for a few lines of memory without stopping.
template <class In>
struct Ahead {
  const Sizes &z;
  const Head<In> &head;
  const char *out;  // the first row to write; rows are out_step bytes apart
  long out_step, out_bytes;
  long read, last;  // the rows to read: the next one, and where they end
  long wrote, writes;

  REGARD_INLINE void some() {
    if (wrote < writes) {
      for (long at = 0; at < out_bytes; at += 64) __builtin_prefetch(out + wrote * out_step + at, 1, 3);
      ++wrote;
    }
    if (read >= last) return;
    long i = read++;
    fetch(head.k + i * head.k_step, z.k_dim * sizeof(In));
    fetch(head.q + i * head.q_step, z.k_dim * sizeof(In));
    fetch(head.v + i * head.v_step, z.v_dim * sizeof(In));
    if (z.channel) fetch(head.log_decay + i * head.decay_step, z.k_dim * sizeof(float));
  }
};

// U, from what (F k) S is (rows 0 ... of `read`, up to a multiple of 16).
template <class In>
REGARD_INLINE void correct(const Sizes &z, Chunk &c, const Head<In> &head, long first, const Panels &read) {
  long rows = round_up(c.n, kUnit);
  const In *v = head.v + first * head.v_step;
  if (!z.delta) return read_values(z, c.update, c.n, rows, v, head.v_step);
  read_values(z, c.residue, c.n, rows, v, head.v_step);
  solve<false>(z, c, c.residue, c.update, rows, &read);
}

// S <- F_n S + (E k)^T U
template <class Between = Nothing>
REGARD_INLINE void carry(const Sizes &z, const Chunk &c, const Panels &state, Between &&between = {}) {
  multiply_panels<kScaled>(state, 0, c.ending, 1, z.wide, c.update, c.n, z.k_dim, z.v_dim, c.total, false, between);
}

// ---- states ---------------------------------------------------------------------------------------------------------

// Between rows `step` apart in memory and panels; missing rows (null) are zeros.
REGARD_INLINE void read_state(const Sizes &z, const Panels &to, const float *from, long step) {
  Rows<float, Float32>::pack((word *)to.p, to.rows * kPanel, z.k_dim, z.v_dim,
                             [&](long r) { return from ? from + r * step : nullptr; });
}
REGARD_INLINE void write_rows(float *to, long step, const Panels &from, long first, long rows, long columns) {
  for (long r = 0; r < rows; ++r)
    for (long column = 0; column < columns; column += kPanel) {
      long count = columns - column < kPanel ? columns - column : kPanel;
      memcpy(to + r * step + column, from.panel(column) + (first + r) * kPanel, count * sizeof(float));
    }
}

}  // namespace
