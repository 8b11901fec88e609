// The kernels that carry a state, compiled once for each instruction set (REGARD_SET names it) from the same source.
#include "convolution.inc"
#include "recurrence_grad.inc"
#include "scans.inc"
#include "states.h"

#define REGARD_JOIN(a, b) a##b
#define REGARD_TABLE(set) REGARD_JOIN(regard_states_, set)

namespace {

int recurrence_forward(const regard_recurrence *call) {
  return call->dtype == REGARD_F32 ? RecurrenceForward<float>(*call).run() : RecurrenceForward<bf16>(*call).run();
}
int recurrence_backward(const regard_recurrence *call, const regard_recurrence_grad *grad) {
  if (call->dtype == REGARD_F32) return RecurrenceBackward<float>(*call, *grad).run();
  return RecurrenceBackward<bf16>(*call, *grad).run();
}

int scan_forward_of(const regard_scan *call) { return scan_forward(*call); }
int scan_backward_of(const regard_scan *call, const regard_scan_grad *grad) { return scan_backward(*call, *grad); }
int selective_forward_of(const regard_selective *call) { return selective_forward(*call); }
int selective_backward_of(const regard_selective *call, const regard_selective_grad *grad) {
  return selective_backward(*call, *grad);
}
int conv_forward_of(const regard_conv *call) { return conv_forward(*call); }
int conv_backward_of(const regard_conv *call, const regard_conv_grad *grad) { return conv_backward(*call, *grad); }
int64_t recurrence_every(int64_t k_dim, int64_t v_dim) { return kept_every(k_dim, v_dim); }

}  // namespace

extern "C" const regard_state_kernels REGARD_TABLE(REGARD_SET) = {
    recurrence_forward,   recurrence_backward,   scan_forward_of,  scan_backward_of,
    selective_forward_of, selective_backward_of, conv_forward_of,  conv_backward_of,
    recurrence_every,     kSelectiveEvery,       kSelectiveGroup,
};
