// The kernels that carry a state, of one instruction set, and the table of all that the set provides.
#include "convolution.h"
#include "kernels.h"
#include "recurrence_backward.h"
#include "scans.h"

namespace {

int recurrence_forward(const regard_recurrence *call) {
  return call->dtype == REGARD_F32 ? RecurrenceForward<float>(*call).run() : RecurrenceForward<bf16>(*call).run();
}
int recurrence_backward(const regard_recurrence *call, const regard_recurrence_grad *grad) {
  if (call->dtype == REGARD_F32) return RecurrenceBackward<float>(*call, *grad).run();
  return RecurrenceBackward<bf16>(*call, *grad).run();
}
int64_t recurrence_every(int64_t k_dim, int64_t v_dim) { return kept_every(k_dim, v_dim); }

// From a kernel that takes references to one that takes pointers, as the C interface does.
template <class Call, int (*kernel)(const Call &)>
int forward(const Call *call) {
  return kernel(*call);
}
template <class Call, class Grad, int (*kernel)(const Call &, const Grad &)>
int backward(const Call *call, const Grad *grad) {
  return kernel(*call, *grad);
}

}  // namespace

namespace regard::REGARD_SET {

const Kernels kernels = {
    attention_forward,
    attention_backward,
    multiply_adds,
    recurrence_forward,
    recurrence_backward,
    forward<regard_scan, scan_forward>,
    backward<regard_scan, regard_scan_grad, scan_backward>,
    forward<regard_selective, selective_forward>,
    backward<regard_selective, regard_selective_grad, selective_backward>,
    forward<regard_conv, conv_forward>,
    backward<regard_conv, regard_conv_grad, conv_backward>,
    recurrence_every,
    kSelectiveEvery,
    kSelectiveGroup,
};

}  // namespace regard::REGARD_SET
