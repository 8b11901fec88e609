// Softmax attention of one instruction set. Where the set adds to another one bfloat16 products alone (REGARD_BASE),
// the rest is that one's, and its table stands here.
#include "bias_gradient.h"
#include "decode.h"
#include "kernels.h"

namespace {

template <class Op>
double run_multiply_adds(int64_t rounds) {
  Tile<Op, kTileRows, kTileVectors> tile;  // starts that differ, and chains through the factor: nothing to simplify
  each<kTileRows * kTileVectors>(REGARD_EACH { tile.c[i / kTileVectors][i % kTileVectors] = splat((float)i); });
  vf half = splat(0.5f), one = splat(1.0f);
  for (int64_t n = 0; n < rounds; ++n)
    each<kTileRows * kTileVectors>(REGARD_EACH {
      vf &c = tile.c[i / kTileVectors][i % kTileVectors];
      c = Op::multiply_add(one, c, half);
    });
  vf total = {};
  each<kTileRows * kTileVectors>(REGARD_EACH { total += tile.c[i / kTileVectors][i % kTileVectors]; });
  volatile float sink = sum_lanes(total);  // so that the work is done
  (void)sink;
  return 2.0 * rounds * kTileRows * kTileVectors * kLanes * Op::per_word;
}

#ifdef REGARD_BASE
constexpr const regard::Kernels &base = regard::REGARD_BASE::kernels;

double multiply_adds_f32(int64_t rounds) { return base.multiply_adds(REGARD_F32, rounds); }
int forward_f32(const regard_attention &call) { return base.attention_forward(&call); }
int backward_f32(const regard_attention &call, const regard_attention_grad &grad) {
  return base.attention_backward(&call, &grad);
}
#else
double multiply_adds_f32(int64_t rounds) { return run_multiply_adds<Float32>(rounds); }
int forward_f32(const regard_attention &call) { return forward<float, Float32>(call); }
int backward_f32(const regard_attention &call, const regard_attention_grad &grad) {
  return backward<float, Float32>(call, grad);
}
#endif

}  // namespace

namespace regard::REGARD_SET {

double multiply_adds(int32_t dtype, int64_t rounds) {
#if defined(__AVX512BF16__)
  if (dtype == REGARD_BF16) return run_multiply_adds<Bfloat16>(rounds);
#endif
  (void)dtype;
  return multiply_adds_f32(rounds);
}

int attention_forward(const regard_attention *call) {
  if (call->dtype == REGARD_F32) return forward_f32(*call);
#if defined(__AVX512BF16__)
  return forward<bf16, Bfloat16>(*call);
#else
  return forward<bf16, Float32>(*call);
#endif
}

int attention_backward(const regard_attention *call, const regard_attention_grad *grad) {
  if (call->dtype == REGARD_F32) return backward_f32(*call, *grad);
#if defined(__AVX512BF16__)
  return backward<bf16, Bfloat16>(*call, *grad);
#else
  return backward<bf16, Float32>(*call, *grad);
#endif
}

#ifdef REGARD_BASE
static Kernels with_own_attention(Kernels kernels) {
  kernels.attention_forward = attention_forward;
  kernels.attention_backward = attention_backward;
  kernels.multiply_adds = multiply_adds;
  return kernels;
}
const Kernels kernels = with_own_attention(base);
#endif

}  // namespace regard::REGARD_SET
