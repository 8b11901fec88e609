// What one instruction set gives of recurrent.h.
#pragma once
#include "recurrent.h"
#include "regard.h"

typedef struct regard_state_kernels {
  int (*recurrence_forward)(const regard_recurrence *);
  int (*recurrence_backward)(const regard_recurrence *, const regard_recurrence_grad *);
  int (*scan_forward)(const regard_scan *);
  int (*scan_backward)(const regard_scan *, const regard_scan_grad *);
  int (*selective_forward)(const regard_selective *);
  int (*selective_backward)(const regard_selective *, const regard_selective_grad *);
  int (*conv_forward)(const regard_conv *);
  int (*conv_backward)(const regard_conv *, const regard_conv_grad *);
  int64_t (*recurrence_every)(int64_t k_dim, int64_t v_dim);
  int64_t selective_every, selective_group;
} regard_state_kernels;
