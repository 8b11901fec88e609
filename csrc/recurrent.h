// The C interface of the kernels that carry a state: `recurrence`, `scan`, `selective_scan`, `conv`. As in regard.h,
// tensors are pointers with strides in elements, the last stride is 1, and null pointers stand for what is absent.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// S_t = a_t S_{t-1} + k_t u_t^T with u_t = v_t, or beta_t (v_t - (a_t S_{t-1})^T k_t) where there is a beta;
// out_t = scale S_t^T q_t; a_t = exp(log_decay_t), and 0 where a segment starts.
typedef struct regard_recurrence {
  int64_t batch, key_heads, heads, tokens, k_dim, v_dim;
  int32_t dtype;    // of q, k, v and out; all else is float32
  int32_t channel;  // whether the decay has a number per key channel
  float scale;
  const void *q, *k, *v;
  void *out;  // (B, Hv, T, Dv): in `dtype`, or in float32 when out_f32 is not 0
  int64_t out_f32;
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3];  // batch, head, token
  const float *beta;                                             // (B, Hv, T) or null
  int64_t beta_stride[3];
  const float *log_decay;  // (B, Hv, T[, Dk]), <= 0, or null
  int64_t decay_stride[3];
  const uint8_t *starts;  // (B, T) contiguous, or null
  const float *state;     // (B, Hv, Dk, Dv) contiguous, or null: zeros
  float *last;            // the same shape; may be `state` itself
  // (B, Hv, stretches, Dk, Dv): a state before each of `regard_recurrence_every` tokens, for the backward pass; or null
  float *kept;
  int64_t kept_size;  // the elements of `kept`
} regard_recurrence;

// Gradients; outputs are float32, contiguous, and set. `kept` of the call is what the forward pass wrote.
typedef struct regard_recurrence_grad {
  const float *d_out;   // (B, Hv, T, Dv) contiguous
  const float *d_last;  // (B, Hv, Dk, Dv) or null
  float *d_q, *d_k;     // (B, Hk, T, Dk)
  float *d_v;           // (B, Hv, T, Dv)
  float *d_beta;        // (B, Hv, T); null without beta
  float *d_log_decay;   // (B, Hv, T[, Dk]); null without a decay
  float *d_state;       // (B, Hv, Dk, Dv)
} regard_recurrence_grad;

// y_t = exp(log_a_t) y_{t-1} + x_t over axis 1 of (B, T, width), all float32 and contiguous.
typedef struct regard_scan {
  int64_t batch, tokens, width;
  const float *log_a, *x;
  const uint8_t *starts;  // (B, T), or null
  const float *state;     // (B, width), or null
  float *y, *last;
} regard_scan;

typedef struct regard_scan_grad {
  const float *y, *d_y;  // (B, T, width)
  const float *d_last;   // (B, width), or null
  float *d_log_a, *d_x;  // (B, T, width)
  float *d_state;        // (B, width)
} regard_scan_grad;

// h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,  y_t = h_t C_t + D x_t; all float32 and contiguous.
typedef struct regard_selective {
  int64_t batch, tokens, width, states;
  const float *x, *dt;    // (B, T, width)
  const float *A;         // (width, states)
  const float *B, *C;     // (B, T, states)
  const float *D;         // (width), or null
  const uint8_t *starts;  // (B, T), or null
  const float *state;     // (B, width, states), or null
  float *y, *last;
  float *kept;        // (B, stretches of regard_selective_every tokens, width, states): for the backward pass; or null
  int64_t kept_size;  // the elements of `kept`
} regard_selective;

typedef struct regard_selective_grad {
  const float *d_y;     // (B, T, width)
  const float *d_last;  // (B, width, states), or null
  float *d_x, *d_dt;    // (B, T, width)
  float *d_A;           // (width, states)
  float *d_B, *d_C;     // (groups, B, T, states): partial sums over groups of regard_selective_group channels
  int64_t groups;
  float *d_D;      // (width), or null
  float *d_state;  // (B, width, states)
} regard_selective_grad;

// y_t = bias + sum_i weight_i x_{t - W + 1 + i}, i from 0 to W - 1, no tap across a segment's start; all float32.
typedef struct regard_conv {
  int64_t batch, tokens, channels, taps;
  const float *x;         // (B, T, C), strides below
  int64_t x_stride[2];    // batch, token
  const float *weight;    // (W, C) contiguous: taps first
  const float *bias;      // (C), or null
  const uint8_t *starts;  // (B, T), or null
  const float *state;     // (B, W - 1, C) contiguous: the inputs before, or null: zeros
  float *y;               // (B, T, C) contiguous
} regard_conv;

typedef struct regard_conv_grad {
  const float *d_y;  // (B, T, C) contiguous
  float *d_x;        // (B, T, C) contiguous
  float *d_weight;   // (W, C)
  float *d_bias;     // (C), or null
  float *d_state;    // (B, W - 1, C)
} regard_conv_grad;

int regard_conv_forward(const regard_conv *call);
int regard_conv_backward(const regard_conv *call, const regard_conv_grad *grad);
int regard_recurrence_forward(const regard_recurrence *call);
int regard_recurrence_backward(const regard_recurrence *call, const regard_recurrence_grad *grad);
int regard_scan_forward(const regard_scan *call);
int regard_scan_backward(const regard_scan *call, const regard_scan_grad *grad);
int regard_selective_forward(const regard_selective *call);
int regard_selective_backward(const regard_selective *call, const regard_selective_grad *grad);

// What the sizes of those buffers follow from: tokens between kept states, channels of a partial sum.
int64_t regard_recurrence_every(int64_t k_dim, int64_t v_dim);
int64_t regard_selective_every(void);
int64_t regard_selective_group(void);

#ifdef __cplusplus
}
#endif
