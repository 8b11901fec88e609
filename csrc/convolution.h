// The short convolution: depthwise, causal, over rows of channels that lie next to each other in memory.
#pragma once
#include <omp.h>

#include "panels.h"
#include "recurrent.h"
#include "regard.h"

namespace {

constexpr long kConvTokens = 32, kConvPart = 512;  // tokens of one task, and channels of a part of it

// The inputs that a token's taps read: row t, or a row of the state where t is negative (null: zeros).
struct ConvRows {
  const regard_conv &x;
  long batch, begin;

  REGARD_INLINE const float *operator()(long t) const {
    long past = x.taps - 1;
    if (t >= 0) return x.x + batch * x.x_stride[0] + t * x.x_stride[1] + begin;
    return x.state ? x.state + (batch * past + past + t) * x.channels + begin : nullptr;
  }
};

// The first token whose input token t may read.
REGARD_INLINE long first_read(const regard_conv &x, long batch, long t, long before) {
  return x.starts && x.starts[batch * x.tokens + t] ? t : before;
}

constexpr int kTapGroup = 4;  // taps whose rows are read together

// y = bias, or y where there is none, plus N rows times their weights, in the order of the tokens.
template <int N>
REGARD_INLINE void add_taps(float *y, const float *bias, bool fresh, const float *const *rows,
                            const float *const *weights, long columns) {
  for (long c = 0; c < columns; c += kLanes) {
    long count = columns - c;
    vf sum = !fresh ? load_some(y + c, count) : bias ? load_some(bias + c, count) : vf{};
    each<N>(REGARD_EACH { sum += load_some(rows[i] + c, count) * load_some(weights[i] + c, count); });
    store_some(y + c, sum, count);
  }
}

// Tokens `begin` to `end`, some channels of them.
REGARD_INLINE void convolve(const ConvRows &rows, long begin, long end, long columns) {
  const regard_conv &x = rows.x;
  long past = x.taps - 1, from = -past;
  for (long t = begin > past ? begin - past : 0; t < begin; ++t) from = first_read(x, rows.batch, t, from);
  for (long t = begin; t < end; ++t) {
    from = first_read(x, rows.batch, t, from);
    float *y = x.y + (rows.batch * x.tokens + t) * x.channels + rows.begin;
    const float *bias = x.bias ? x.bias + rows.begin : nullptr, *row[kTapGroup], *weight[kTapGroup];
    bool fresh = true;
    for (long s = t - past > from ? t - past : from; s <= t;) {
      int n = 0;
      for (; n < kTapGroup && s <= t; ++s)
        if ((row[n] = rows(s))) weight[n++] = x.weight + (past - (t - s)) * x.channels + rows.begin;
      switch (n) {
        case 0: continue;
        case 1: add_taps<1>(y, bias, fresh, row, weight, columns); break;
        case 2: add_taps<2>(y, bias, fresh, row, weight, columns); break;
        case 3: add_taps<3>(y, bias, fresh, row, weight, columns); break;
        default: add_taps<4>(y, bias, fresh, row, weight, columns);
      }
      fresh = false;
    }
  }
}

// A task is some tokens, all channels of them in parts: the rows of memory that one part reads go on in the next.
int conv_forward(const regard_conv &x) {
  long parts = blocks_of(x.tokens, kConvTokens), tasks = x.batch * parts;
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (long task = 0; task < tasks; ++task) {
    long begin = task % parts * kConvTokens, end = begin + kConvTokens < x.tokens ? begin + kConvTokens : x.tokens;
    for (long c = 0; c < x.channels; c += kConvPart)
      convolve({x, task / parts, c}, begin, end, x.channels - c < kConvPart ? x.channels - c : kConvPart);
  }
  return REGARD_OK;
}

// d_weights += d_y times N rows.
template <int N>
REGARD_INLINE void add_products(float *const *d_weights, const float *d_y, const float *const *rows, long columns) {
  for (long c = 0; c < columns; c += kLanes) {
    long count = columns - c;
    vf d = load_some(d_y + c, count);
    each<N>(REGARD_EACH {
      store_some(d_weights[i] + c, load_some(d_weights[i] + c, count) + d * load_some(rows[i] + c, count), count);
    });
  }
}

// Some channels of one batch row in the backward pass.
struct ConvGradients {
  const ConvRows &rows;
  const regard_conv_grad &g;
  long columns;

  REGARD_INLINE const float *d_y(long t) const {
    return g.d_y + (rows.batch * rows.x.tokens + t) * rows.x.channels + rows.begin;
  }
  REGARD_INLINE long weight_at(long tap) const { return tap * rows.x.channels + rows.begin; }

  // The gradient of input s (below 0: of the state): the outputs from it on that read it, in their order.
  void input(long s) const {
    const regard_conv &x = rows.x;
    long past = x.taps - 1, row = s < 0 ? rows.batch * past + past + s : rows.batch * x.tokens + s;
    float *to = (s < 0 ? g.d_state : g.d_x) + row * x.channels + rows.begin;
    const uint8_t *starts = x.starts ? x.starts + rows.batch * x.tokens : nullptr;
    const float *from[kTapGroup], *weight[kTapGroup];
    bool fresh = true;
    for (long t = s < 0 ? 0 : s, open = 1; open;) {
      int n = 0;
      for (; n < kTapGroup && open; ++t) {
        open = t < x.tokens && t <= s + past && !(starts && t > s && starts[t]);
        if (open) from[n] = d_y(t), weight[n++] = x.weight + weight_at(past - (t - s));
      }
      switch (n) {
        case 0: break;
        case 1: add_taps<1>(to, nullptr, fresh, from, weight, columns); break;
        case 2: add_taps<2>(to, nullptr, fresh, from, weight, columns); break;
        case 3: add_taps<3>(to, nullptr, fresh, from, weight, columns); break;
        default: add_taps<4>(to, nullptr, fresh, from, weight, columns);
      }
      fresh = fresh && n == 0;
    }
    if (fresh) memset(to, 0, columns * sizeof(float));
  }

  // What output t adds to the gradients of the weights; `first` is the first input that it read.
  void weights(long t, long first) const {
    const regard_conv &x = rows.x;
    const float *row[kTapGroup];
    float *to[kTapGroup];
    for (long s = first; s <= t;) {
      int n = 0;
      for (; n < kTapGroup && s <= t; ++s)
        if ((row[n] = rows(s))) to[n++] = g.d_weight + weight_at(x.taps - 1 - (t - s));
      switch (n) {
        case 0: break;
        case 1: add_products<1>(to, d_y(t), row, columns); break;
        case 2: add_products<2>(to, d_y(t), row, columns); break;
        case 3: add_products<3>(to, d_y(t), row, columns); break;
        default: add_products<4>(to, d_y(t), row, columns);
      }
    }
  }
};

// A task is some channels in every batch row, so that a weight's gradient is one sum in one order.
int conv_backward(const regard_conv &x, const regard_conv_grad &g) {
  long threads = omp_get_max_threads(), even = round_up((x.channels + threads - 1) / threads, kUnit);
  long part = even < kConvPart ? even : kConvPart, tasks = blocks_of(x.channels, part), past = x.taps - 1;
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (long task = 0; task < tasks; ++task) {
    long begin = task * part, columns = x.channels - begin < part ? x.channels - begin : part;
    for (long tap = 0; tap < x.taps; ++tap) memset(g.d_weight + tap * x.channels + begin, 0, columns * sizeof(float));
    if (g.d_bias) memset(g.d_bias + begin, 0, columns * sizeof(float));
    for (long batch = 0; batch < x.batch; ++batch) {
      ConvRows rows = {x, batch, begin};
      ConvGradients gradients = {rows, g, columns};
      for (long s = -past; s < 0; ++s) gradients.input(s);
      long from = -past;
      for (long t = 0; t < x.tokens; ++t) {
        from = first_read(x, batch, t, from);
        gradients.weights(t, t - past > from ? t - past : from);
        gradients.input(t);
        for (long c = 0; g.d_bias && c < columns; c += kLanes) {
          float *sum = g.d_bias + begin + c;
          store_some(sum, load_some(sum, columns - c) + load_some(gradients.d_y(t) + c, columns - c), columns - c);
        }
      }
    }
  }
  return REGARD_OK;
}

}  // namespace
