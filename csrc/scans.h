// Scans: states of independent numbers, channels in lanes, tokens in order. A channel's arithmetic is its own.
#pragma once
#include <omp.h>

#include "panels.h"
#include "recurrent.h"
#include "regard.h"

namespace {

constexpr long kScanColumns = 4096;  // channels of one task at most: their states stay in the nearest cache

// Channels of one task: as many as there may be, so that memory is read from end to end, and a task for every thread.
REGARD_INLINE long scan_columns(const regard_scan &x) {
  long threads = omp_get_max_threads(), parts = x.batch < threads ? (threads + x.batch - 1) / x.batch : 1;
  long columns = round_up((x.width + parts - 1) / parts, kUnit);
  return columns < kScanColumns ? columns : kScanColumns;
}

// ---- scan -----------------------------------------------------------------------------------------------------------

int scan_forward(const regard_scan &x) {
  long most = scan_columns(x), parts = (x.width + most - 1) / most, tasks = x.batch * parts;
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (long task = 0; task < tasks; ++task) {
    long batch = task / parts, begin = task % parts * most;
    long columns = x.width - begin < most ? x.width - begin : most;
    float held[kScanColumns + kLanes] = {};
    for (long c = 0; c < columns; ++c) held[c] = x.state ? x.state[batch * x.width + begin + c] : 0.0f;
    for (long t = 0; t < x.tokens; ++t) {
      long row = (batch * x.tokens + t) * x.width + begin;
      bool opens = x.starts && x.starts[batch * x.tokens + t];
      for (long c = 0; c < columns; c += kLanes) {
        long count = columns - c;
        vf y = load_some(x.x + row + c, count);
        if (!opens) y += decay_exp(load_some(x.log_a + row + c, count)) * load(held + c);
        store(held + c, y);
        store_some(x.y + row + c, y, count);
      }
    }
    for (long c = 0; c < columns; ++c) x.last[batch * x.width + begin + c] = held[c];
  }
  return REGARD_OK;
}

int scan_backward(const regard_scan &x, const regard_scan_grad &g) {
  long most = scan_columns(x), parts = (x.width + most - 1) / most, tasks = x.batch * parts;
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (long task = 0; task < tasks; ++task) {
    long batch = task / parts, begin = task % parts * most;
    long columns = x.width - begin < most ? x.width - begin : most;
    float back[kScanColumns + kLanes] = {};
    for (long c = 0; c < columns; ++c) back[c] = g.d_last ? g.d_last[batch * x.width + begin + c] : 0.0f;
    for (long t = x.tokens - 1; t >= 0; --t) {
      long row = (batch * x.tokens + t) * x.width + begin;
      bool opens = x.starts && x.starts[batch * x.tokens + t];
      const float *before = t ? g.y + row - x.width : x.state ? x.state + batch * x.width + begin : nullptr;
      for (long c = 0; c < columns; c += kLanes) {
        long count = columns - c;
        vf a = opens ? vf{} : decay_exp(load_some(x.log_a + row + c, count));
        vf d = load(back + c) + load_some(g.d_y + row + c, count);
        vf old = before && !opens ? load_some(before + c, count) : vf{};
        vf d_a = d * a;
        store_some(g.d_x + row + c, d, count);
        store_some(g.d_log_a + row + c, d_a * old, count);
        store(back + c, d_a);
      }
    }
    for (long c = 0; c < columns; ++c) g.d_state[batch * x.width + begin + c] = back[c];
  }
  return REGARD_OK;
}

// ---- selective scan -------------------------------------------------------------------------------------------------

constexpr long kSelectiveEvery = 64;   // tokens between the states kept for the backward pass
constexpr long kSelectiveGroup = 256;  // channels whose sums over d are one partial sum

// Sixteen (or eight, four) channels of one batch row; states are [N][kLanes].
struct SelectiveLanes {
  const regard_selective &x;
  long batch, begin, count;

  REGARD_INLINE void read(float *to, const float *from) const {
    for (long n = 0; n < x.states; ++n)
      for (long c = 0; c < kLanes; ++c)
        to[n * kLanes + c] = from && c < count ? from[(begin + c) * x.states + n] : 0.0f;
  }
  REGARD_INLINE void write(float *to, const float *from) const {
    for (long n = 0; n < x.states; ++n)
      for (long c = 0; c < count; ++c) to[(begin + c) * x.states + n] = from[n * kLanes + c];
  }
  REGARD_INLINE long row(long t) const { return (batch * x.tokens + t) * x.width + begin; }
  REGARD_INLINE long small(long t) const { return (batch * x.tokens + t) * x.states; }
  REGARD_INLINE bool opens(long t) const { return x.starts && x.starts[batch * x.tokens + t]; }

  // One token: h in place; the output without D x.
  REGARD_INLINE vf step(long t, const float *a, float *h) const {
    vf dt = load_some(x.dt + row(t), count), input = dt * load_some(x.x + row(t), count), y = {};
    const float *b = x.B + small(t), *c = x.C + small(t);
    if (opens(t)) memset(h, 0, x.states * kLanes * sizeof(float));
    for (long n = 0; n < x.states; ++n) {
      vf now = decay_exp(dt * load(a + n * kLanes)) * load(h + n * kLanes) + input * b[n];
      store(h + n * kLanes, now);
      y += now * c[n];
    }
    return y;
  }
};

int selective_forward(const regard_selective &x) {
  long parts = blocks_of(x.width, kLanes), tasks = x.batch * parts, kept = blocks_of(x.tokens, kSelectiveEvery);
  int failed = 0;
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (long task = 0; task < tasks; ++task) {
    long begin = task % parts * kLanes;
    SelectiveLanes lanes = {x, task / parts, begin, x.width - begin < kLanes ? x.width - begin : kLanes};
    float *a, *h;
    if (!reserve([&](Arrays &arrays) {
          arrays.take(a, x.states * kLanes);
          arrays.take(h, x.states * kLanes);
        })) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    long whole = x.width * x.states;
    lanes.read(a, x.A);
    lanes.read(h, x.state ? x.state + lanes.batch * whole : nullptr);
    vf skip = x.D ? load_some(x.D + begin, lanes.count) : vf{};
    for (long t = 0; t < x.tokens; ++t) {
      if (x.kept && t % kSelectiveEvery == 0)
        lanes.write(x.kept + (lanes.batch * kept + t / kSelectiveEvery) * whole, h);
      vf y = lanes.step(t, a, h);
      if (x.D) y += skip * load_some(x.x + lanes.row(t), lanes.count);
      store_some(x.y + lanes.row(t), y, lanes.count);
    }
    lanes.write(x.last + lanes.batch * whole, h);
  }
  return failed ? REGARD_NO_MEMORY : REGARD_OK;
}

// A task is a group of channels in every batch row: dA and dD sum over tokens and rows, dB and dC over its channels, in
// one order.
int selective_backward(const regard_selective &x, const regard_selective_grad &g) {
  long groups = blocks_of(x.width, kSelectiveGroup), kept = blocks_of(x.tokens, kSelectiveEvery);
  long whole = x.width * x.states, size = x.states * kLanes;
  int failed = 0;
#pragma omp parallel for schedule(static) if (groups > 1)
  for (long group = 0; group < groups; ++group) {
    float *a, *d_a, *d_h, *h;
    if (!reserve([&](Arrays &arrays) {
          arrays.take(a, size);
          arrays.take(d_a, size);
          arrays.take(d_h, size);
          arrays.take(h, (kSelectiveEvery + 1) * size);  // before each token of a stretch, and after the last
        })) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    long small = x.batch * x.tokens * x.states;
    float *d_b = g.d_B + group * small, *d_c = g.d_C + group * small;
    memset(d_b, 0, small * sizeof(float));
    memset(d_c, 0, small * sizeof(float));
    long end = (group + 1) * kSelectiveGroup < x.width ? (group + 1) * kSelectiveGroup : x.width;
    for (long begin = group * kSelectiveGroup; begin < end; begin += kLanes) {
      long count = x.width - begin < kLanes ? x.width - begin : kLanes;
      vf d_skip = {}, skip = x.D ? load_some(x.D + begin, count) : vf{};
      for (long i = 0; i < size; ++i) d_a[i] = 0;
      for (long batch = 0; batch < x.batch; ++batch) {
        SelectiveLanes lanes = {x, batch, begin, count};
        lanes.read(a, x.A);
        lanes.read(d_h, g.d_last ? g.d_last + batch * whole : nullptr);
        for (long stretch = kept - 1; stretch >= 0; --stretch) {
          long first = stretch * kSelectiveEvery;
          long stop = first + kSelectiveEvery < x.tokens ? first + kSelectiveEvery : x.tokens;
          lanes.read(h, x.kept + (batch * kept + stretch) * whole);
          for (long t = first; t < stop; ++t) {
            float *now = h + (t - first) * size;
            memcpy(now + size, now, size * sizeof(float));
            lanes.step(t, a, now + size);
          }
          for (long t = stop - 1; t >= first; --t) {
            const float *before = h + (t - first) * size, *after = before + size;
            long row = lanes.row(t), at = lanes.small(t);
            vf dt = load_some(x.dt + row, count), input = load_some(x.x + row, count);
            vf d_y = load_some(g.d_y + row, count), d_input = {}, d_dt = {};
            bool opens = lanes.opens(t);  // then nothing of the state before is read, whatever it is
            for (long n = 0; n < x.states; ++n) {
              vf decay = load(a + n * kLanes), factor = opens ? vf{} : decay_exp(dt * decay);
              vf d = load(d_h + n * kLanes) + d_y * x.C[at + n];
              vf fading = d * factor, grown = opens ? vf{} : fading * load(before + n * kLanes);
              d_c[at + n] += sum_lanes(d_y * load(after + n * kLanes));
              d_b[at + n] += sum_lanes(d * dt * input);
              d_input += d * x.B[at + n];
              d_dt += grown * decay;
              store(d_a + n * kLanes, load(d_a + n * kLanes) + grown * dt);
              store(d_h + n * kLanes, fading);
            }
            store_some(g.d_x + row, d_input * dt + d_y * skip, count);
            store_some(g.d_dt + row, d_dt + d_input * input, count);
            d_skip += d_y * input;
          }
        }
        lanes.write(g.d_state + batch * whole, d_h);
      }
      SelectiveLanes{x, 0, begin, count}.write(g.d_A, d_a);
      if (g.d_D) store_some(g.d_D + begin, d_skip, count);
    }
  }
  return failed ? REGARD_NO_MEMORY : REGARD_OK;
}

}  // namespace
