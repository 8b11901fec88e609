// What every instruction set provides. attention.cpp and states.cpp are compiled once a set, with REGARD_SET naming it;
// all that a set exports stands in a namespace of its own.
#pragma once
#include "recurrent.h"
#include "regard.h"

namespace regard {

// The kernels of one set, as dispatch.cpp calls them.
struct Kernels {
  int (*attention_forward)(const regard_attention *);
  int (*attention_backward)(const regard_attention *, const regard_attention_grad *);
  double (*multiply_adds)(int32_t dtype, int64_t rounds);
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
};

}  // namespace regard

#ifdef REGARD_BASE
namespace regard::REGARD_BASE {
extern const Kernels kernels;
}
#endif

#ifdef REGARD_SET
namespace regard::REGARD_SET {

int attention_forward(const regard_attention *call);  // attention.cpp
int attention_backward(const regard_attention *call, const regard_attention_grad *grad);
double multiply_adds(int32_t dtype, int64_t rounds);
extern const Kernels kernels;  // states.cpp, or attention.cpp where the states are those of REGARD_BASE

}  // namespace regard::REGARD_SET
#endif
