// Attention in plain loops: every option of regard.h, a row at a time, sharing no code with the kernels. check_sets
// compares these with them; the library has no plain loops.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace {

float load(const void *base, int64_t at, int32_t dtype) {
  if (dtype == REGARD_F32) return static_cast<const float *>(base)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t *>(base)[at]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void store(void *base, int64_t at, float value, bool wide) {
  if (wide) {
    static_cast<float *>(base)[at] = value;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const bool nan = value != value;  // else round to nearest even
  static_cast<uint16_t *>(base)[at] =
      static_cast<uint16_t>(nan ? (bits >> 16) | 64 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void load_row(float *to, const void *base, int64_t at, int64_t n, int32_t dtype) {
  for (int64_t d = 0; d < n; ++d) to[d] = load(base, at + d, dtype);
}

uint32_t mix(uint32_t x) {  // as in regard/backends/dropout.py
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// One query row of a call: where it stands, and what it may read.
struct Row {
  const regard_attention &a;
  int64_t b, h, r, i;
  uint32_t line, high_word;
  uint64_t threshold;

  Row(const regard_attention &call, int64_t batch, int64_t head, int64_t row)
      : a(call), b(batch), h(head), r(row), i(call.q_start[batch] + row) {
    const uint64_t seed = static_cast<uint64_t>(a.dropout_seed);
    line = mix(mix(mix(static_cast<uint32_t>(seed) ^ static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(h)) ^
               static_cast<uint32_t>(r));
    high_word = static_cast<uint32_t>(seed >> 32);
    threshold = static_cast<uint64_t>(static_cast<double>(a.dropout_p) * 4294967296.0);
  }

  bool allows(int64_t c) const {
    const int64_t distance = i - c;
    const bool near = a.low <= distance && distance <= a.high;
    if (!near && !(a.prefix && c < a.prefix[b])) return false;
    if (a.k_length && c >= a.k_length[b]) return false;
    if (a.keep && !a.keep[b * a.k_len + c]) return false;
    if (a.q_segment && a.q_segment[b * a.q_len + r] != a.k_segment[b * a.k_len + c]) return false;
    const int64_t *s = a.mask_stride;
    if (a.mask && !a.mask[b * s[0] + h * s[1] + r * s[2] + c * s[3]]) return false;
    return !a.tile_lines || listed(c);
  }

  bool listed(int64_t c) const {
    const int64_t *ends = a.tile_lines + b * a.tile_stride[0] + h * a.tile_stride[1] + r / REGARD_TILE * 2;
    for (int64_t n = ends[0]; n < ends[1]; ++n) {
      if (a.tile_column[n] != c / REGARD_TILE) continue;
      if (a.tile_bits[n] < 0) return true;
      return a.bits[a.tile_bits[n] * REGARD_TILE + r % REGARD_TILE] >> c % REGARD_TILE & 1;
    }
    return false;
  }

  int64_t bias_at(const int64_t *s, int64_t c) const { return b * s[0] + h * s[1] + r * s[2] + c * s[3]; }

  float bias(int64_t c) const {
    float value = 0;
    if (a.bias) value += a.bias[bias_at(a.bias_stride, c)];
    if (a.relative) value += a.relative[h * a.relative_stride + (c - i) + a.relative_zero];
    return value;
  }

  float kept(int64_t c) const {  // the factor that dropout puts on a weight
    if (a.dropout_p <= 0) return 1;
    const uint32_t word = mix(mix(line ^ high_word) ^ static_cast<uint32_t>(c));
    return word >= threshold ? static_cast<float>(1.0 / (1.0 - static_cast<double>(a.dropout_p))) : 0.0f;
  }

  float product(const float *x, int64_t c) const {  // scale * q . k
    const int64_t *s = a.k_stride;
    const int64_t at = b * s[0] + (h / (a.q_heads / a.kv_heads)) * s[1] + c * s[2];
    float sum = 0;
    for (int64_t d = 0; d < a.k_dim; ++d) sum += x[d] * load(a.k, at + d, a.dtype);
    return a.scale * sum;
  }

  float capped(float score) const { return a.softcap > 0 ? a.softcap * tanhf(score / a.softcap) : score; }
};

int64_t at(const int64_t *stride, int64_t b, int64_t h, int64_t t) {
  return b * stride[0] + h * stride[1] + t * stride[2];
}

void forward_row(const regard_attention &a, const Row &row, float *scratch) {
  float *x = scratch, *acc = x + a.k_dim, *scores = acc + a.v_dim;
  const int64_t kv = row.h / (a.q_heads / a.kv_heads);
  load_row(x, a.q, at(a.q_stride, row.b, row.h, row.r), a.k_dim, a.dtype);
  float top = -INFINITY;
  for (int64_t c = 0; c < a.k_len; ++c) {
    scores[c] = row.allows(c) ? row.capped(row.product(x, c)) + row.bias(c) : -INFINITY;
    if (scores[c] > top || scores[c] != scores[c]) top = scores[c];
  }
  float total = 0;
  for (int64_t d = 0; d < a.v_dim; ++d) acc[d] = 0;
  for (int64_t c = 0; c < a.k_len; ++c) {
    if (scores[c] == -INFINITY) continue;
    const float weight = expf(scores[c] - top);
    total += weight;
    const float kept = weight * row.kept(c);
    for (int64_t d = 0; d < a.v_dim; ++d) acc[d] += kept * load(a.v, at(a.v_stride, row.b, kv, c) + d, a.dtype);
  }
  const bool dead = top == -INFINITY;
  const bool wide = a.out_f32 || a.dtype == REGARD_F32;
  for (int64_t d = 0; d < a.v_dim; ++d)
    store(a.out, at(a.out_stride, row.b, row.h, row.r) + d, dead ? 0 : acc[d] / total, wide);
  const int64_t line = (row.b * a.q_heads + row.h) * a.q_len + row.r;
  a.lse[line] = dead ? -INFINITY : top + logf(total);
  if (!a.kept) return;
  const int64_t rows = a.batch * a.q_heads * a.q_len;
  a.kept[line] = dead ? 0 : (top - a.lse[line]) + logf(total);
  a.kept[rows + line] = dead ? 0 : top;
  a.kept[2 * rows + line] = dead ? INFINITY : log2f(total);
}

void backward_row(const regard_attention &a, const regard_attention_grad &g, const Row &row, float *scratch) {
  float *x = scratch, *dx = x + a.k_dim;
  const int64_t kv = row.h / (a.q_heads / a.kv_heads), line = (row.b * a.q_heads + row.h) * a.q_len + row.r;
  const int64_t rows = a.batch * a.q_heads * a.q_len;
  const float top = a.kept[rows + line], log2_sum = a.kept[2 * rows + line];
  const float *d_out = g.d_out + line * a.v_dim, *out = g.out + line * a.v_dim;
  for (int64_t d = 0; d < a.k_dim; ++d) dx[d] = 0;
  if (log2_sum != INFINITY) {
    load_row(x, a.q, at(a.q_stride, row.b, row.h, row.r), a.k_dim, a.dtype);
    float delta = g.d_lse ? -g.d_lse[line] : 0;
    for (int64_t d = 0; d < a.v_dim; ++d) delta += d_out[d] * out[d];
    for (int64_t c = 0; c < a.k_len; ++c) {
      if (!row.allows(c)) continue;
      const float capped = row.capped(row.product(x, c)), score = capped + row.bias(c);
      if (score == -INFINITY) continue;
      const float weight = expf(score - top) / exp2f(log2_sum), kept = row.kept(c);
      const int64_t v_at = at(a.v_stride, row.b, kv, c), key = (row.b * a.kv_heads + kv) * a.k_len + c;
      float dp = 0;
      for (int64_t d = 0; d < a.v_dim; ++d) dp += d_out[d] * load(a.v, v_at + d, a.dtype);
      if (g.d_v) {
        for (int64_t d = 0; d < a.v_dim; ++d) g.d_v[key * a.v_dim + d] += weight * kept * d_out[d];
      }
      float ds = weight * (dp * kept - delta);
      if (g.d_bias) g.d_bias[row.bias_at(g.d_bias_stride, c)] += ds;
      if (g.d_relative) g.d_relative[row.h * a.relative_count + (c - row.i) + a.relative_zero] += ds;
      if (a.softcap > 0) ds *= 1 - (capped / a.softcap) * (capped / a.softcap);
      ds *= a.scale;
      const int64_t k_at = at(a.k_stride, row.b, kv, c);
      for (int64_t d = 0; d < a.k_dim; ++d) dx[d] += ds * load(a.k, k_at + d, a.dtype);
      if (g.d_k) {
        for (int64_t d = 0; d < a.k_dim; ++d) g.d_k[key * a.k_dim + d] += ds * x[d];
      }
    }
  }
  if (g.d_q) memcpy(g.d_q + line * a.k_dim, dx, sizeof(float) * a.k_dim);
}

}  // namespace

namespace regard::REGARD_SET {

int attention_forward(const regard_attention *call) {
  const regard_attention &a = *call;
  const int64_t rows = a.batch * a.q_heads * a.q_len;
  int failed = 0;
#pragma omp parallel reduction(| : failed)
  {
    float *scratch = static_cast<float *>(malloc(sizeof(float) * (a.k_dim + a.v_dim + a.k_len + 1)));
    failed = scratch == nullptr;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
      if (scratch) forward_row(a, Row(a, n / (a.q_heads * a.q_len), n / a.q_len % a.q_heads, n % a.q_len), scratch);
    }
    free(scratch);
  }
  return failed ? REGARD_NO_MEMORY : REGARD_OK;
}

int attention_backward(const regard_attention *call, const regard_attention_grad *grad) {
  const regard_attention &a = *call;
  const regard_attention_grad &g = *grad;
  const int64_t group = a.q_heads / a.kv_heads;
  const auto clear = [](float *to, int64_t n) {
    if (to) memset(to, 0, sizeof(float) * n);
  };
  clear(g.d_k, a.batch * a.kv_heads * a.k_len * a.k_dim);
  clear(g.d_v, a.batch * a.kv_heads * a.k_len * a.v_dim);
  clear(g.d_relative, a.q_heads * a.relative_count);
  if (g.d_bias) {
    const int64_t extent[4] = {a.batch, a.q_heads, a.q_len, a.k_len};
    int64_t size = 1;
    for (int axis = 0; axis < 4; ++axis) size *= g.d_bias_stride[axis] ? extent[axis] : 1;
    clear(g.d_bias, size);
  }
  // What the bias's gradient sums over must be summed by one thread, in one order: a head's batch rows, or everything.
  const int64_t tasks = g.d_bias && g.d_bias_stride[1] == 0 ? 1 : a.kv_heads, heads = a.kv_heads / tasks;
  int failed = 0;
#pragma omp parallel reduction(| : failed)
  {
    float *scratch = static_cast<float *>(malloc(sizeof(float) * (2 * a.k_dim + 1)));
    failed = scratch == nullptr;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      for (int64_t b = 0; b < a.batch && scratch; ++b) {
        for (int64_t h = task * heads * group; h < (task + 1) * heads * group; ++h) {
          for (int64_t r = 0; r < a.q_len; ++r) backward_row(a, g, Row(a, b, h, r), scratch);
        }
      }
    }
    free(scratch);
  }
  return failed ? REGARD_NO_MEMORY : REGARD_OK;
}

}  // namespace regard::REGARD_SET
