// Compares the library's attention with the plain loops on random calls: how the kernels of another machine are tested
// under an emulator (`make check-neon`). REGARD_ISA caps the instruction set, as everywhere. Prints the largest
// relative difference of each kind of call; exit status 1 beyond 1e-4 (float32) or 2e-2 (bfloat16). It is for sets that
// compute in float32: x86-64-v4+bf16 also rounds weights and gradients of scores to bfloat16, the plain loops do not.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "kernels.h"

namespace {

uint32_t state = 1;
uint32_t word() { return state = state * 1664525u + 1013904223u; }
int pick(int n) { return (int)((uint64_t)word() * n >> 32); }
float number() { return (float)(int32_t)word() * (1.0f / 2147483648.0f) * 1.7f; }

std::vector<float> numbers(int64_t n) {
  std::vector<float> x(n);
  for (float &value : x) value = number();
  return x;
}
std::vector<uint16_t> halves(const std::vector<float> &x) {
  std::vector<uint16_t> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    uint32_t bits;
    memcpy(&bits, &x[i], 4);
    y[i] = (uint16_t)(bits >> 16);
  }
  return y;
}

void contiguous(int64_t *stride, int64_t heads, int64_t tokens, int64_t dim) {
  stride[0] = heads * tokens * dim, stride[1] = tokens * dim, stride[2] = dim;
}

double difference(const std::vector<float> &got, const std::vector<float> &want) {
  double most = 0, size = 1;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isfinite(want[i]) != std::isfinite(got[i])) return INFINITY;
    if (!std::isfinite(want[i])) continue;
    most = fmax(most, fabs((double)got[i] - want[i])), size = fmax(size, fabs(want[i]));
  }
  return most / size;
}

enum Kind {
  kFull,
  kCausal,
  kWindow,
  kPrefix,
  kKeep,
  kSegments,
  kMask,
  kTiles,
  kBias,
  kRelative,
  kSoftcap,
  kDropout,
  kKinds
};
const char *const names[kKinds] = {"full", "causal", "window", "prefix",   "keep",    "segments",
                                   "mask", "tiles",  "bias",   "relative", "softcap", "dropout"};

double compare(Kind kind, bool low_precision) {
  const int sizes[] = {1, 2, 5, 7, 16, 17, 33, 64, 65, 130}, dims[] = {1, 3, 8, 16, 17, 33, 64, 80};
  int64_t batch = 1 + pick(2), kv_heads = 1 + pick(2), heads = kv_heads * (1 + pick(3));
  int64_t q_len = sizes[pick(10)], k_len = sizes[pick(10)], k_dim = dims[pick(8)], v_dim = dims[pick(8)];
  int64_t rows = batch * heads * q_len;
  std::vector<float> q = numbers(rows * k_dim), k = numbers(batch * kv_heads * k_len * k_dim);
  std::vector<float> v = numbers(batch * kv_heads * k_len * v_dim), d_out = numbers(rows * v_dim),
                     d_lse = numbers(rows);
  std::vector<uint16_t> q_low = halves(q), k_low = halves(k), v_low = halves(v);
  std::vector<int64_t> start(batch, k_len - q_len), prefix(batch, k_len / 2), q_segment(batch * q_len),
      k_segment(batch * k_len);
  std::vector<uint8_t> keep(batch * k_len), mask(heads * q_len * k_len);
  std::vector<float> bias = numbers(heads * q_len * k_len), relative = numbers(heads * (q_len + k_len));
  for (uint8_t &x : keep) x = pick(3) > 0;
  for (uint8_t &x : mask) x = pick(3) > 0;
  for (int64_t n = 0; n < batch * q_len; ++n) q_segment[n] = n % q_len / 20;
  for (int64_t n = 0; n < batch * k_len; ++n) k_segment[n] = n % k_len / 20;

  regard_attention call = {};
  call.batch = batch, call.q_heads = heads, call.kv_heads = kv_heads, call.q_len = q_len, call.k_len = k_len;
  call.k_dim = k_dim, call.v_dim = v_dim, call.scale = 0.5f, call.out_f32 = 1, call.dtype = low_precision;
  call.q = low_precision ? (void *)q_low.data() : q.data(), call.k = low_precision ? (void *)k_low.data() : k.data();
  call.v = low_precision ? (void *)v_low.data() : v.data();
  contiguous(call.q_stride, heads, q_len, k_dim), contiguous(call.k_stride, kv_heads, k_len, k_dim);
  contiguous(call.v_stride, kv_heads, k_len, v_dim), contiguous(call.out_stride, heads, q_len, v_dim);
  call.q_start = start.data(), call.low = INT64_MIN, call.high = INT64_MAX;
  if (kind == kCausal || kind == kWindow || kind == kPrefix) call.low = 0;
  if (kind == kWindow) call.high = 9;
  if (kind == kPrefix) call.prefix = prefix.data();
  if (kind == kKeep) call.keep = keep.data();
  if (kind == kSegments) call.q_segment = q_segment.data(), call.k_segment = k_segment.data();
  if (kind == kSoftcap) call.softcap = 0.8f;
  if (kind == kDropout) call.dropout_p = 0.3f, call.dropout_seed = 0x123456789abcdll;
  const int64_t square[4] = {0, q_len * k_len, k_len, 1};
  if (kind == kMask) call.mask = mask.data(), memcpy(call.mask_stride, square, sizeof square);
  if (kind == kBias) call.bias = bias.data(), memcpy(call.bias_stride, square, sizeof square);
  if (kind == kRelative) {
    call.relative = relative.data(), call.relative_stride = call.relative_count = q_len + k_len;
    call.relative_zero = k_len;
  }

  std::vector<int64_t> lines;
  std::vector<int32_t> columns, numbered;
  std::vector<uint64_t> bits;
  for (int64_t head = 0, n = 0; head < heads; ++head)
    for (int64_t row = 0; row < q_len; row += REGARD_TILE) {
      lines.push_back((int64_t)columns.size());
      for (int64_t column = 0; column < k_len; column += REGARD_TILE) {
        const int how = (int)pick(3);  // not listed, whole, by bits
        if (!how) continue;
        columns.push_back((int32_t)(column / REGARD_TILE)), numbered.push_back(how == 1 ? -1 : (int32_t)n++);
        for (int r = 0; how == 2 && r < REGARD_TILE; ++r) bits.push_back((uint64_t)pick(1 << 30) << 30 | pick(1 << 30));
      }
      lines.push_back((int64_t)columns.size());
    }
  if (kind == kTiles) {
    call.tile_lines = lines.data(), call.tile_column = columns.data(), call.tile_bits = numbered.data();
    call.bits = bits.data(), call.tile_stride[1] = (q_len + REGARD_TILE - 1) / REGARD_TILE * 2;
  }

  const auto run = [&](auto forward, auto backward) {
    std::vector<std::vector<float>> x;
    for (int64_t n : {rows * v_dim, rows, 3 * rows, rows * k_dim, batch * kv_heads * k_len * k_dim,
                      batch * kv_heads * k_len * v_dim, heads * q_len * k_len, heads * (q_len + k_len)})
      x.emplace_back(n, 0.0f);
    regard_attention own = call;
    own.out = x[0].data(), own.lse = x[1].data(), own.kept = x[2].data();
    int failed = forward(&own);
    regard_attention_grad grad = {};
    grad.d_out = d_out.data(), grad.d_lse = d_lse.data(), grad.out = x[0].data();
    for (int64_t n = 0; n < rows; ++n)
      if (x[1][n] == -INFINITY) d_lse[n] = 0;
    grad.d_q = x[3].data(), grad.d_k = x[4].data(), grad.d_v = x[5].data();
    if (call.bias) grad.d_bias = x[6].data(), memcpy(grad.d_bias_stride, square, sizeof square);
    if (call.relative) grad.d_relative = x[7].data();
    failed |= backward(&own, &grad);
    x[2].assign(x[2].size(), failed ? INFINITY : 0.0f);  // what is kept belongs to a set
    return x;
  };
  const auto want = run(regard::plain::attention_forward, regard::plain::attention_backward);
  const auto got = run(regard_attention_forward, regard_attention_backward);
  double most = 0;
  for (size_t n = 0; n < want.size(); ++n) most = fmax(most, difference(got[n], want[n]));
  return most;
}

}  // namespace

int main() {
  const char *isa = regard_isa();
  printf("%s\n", isa ? isa : "REGARD_ISA names no instruction set");
  bool bad = !isa;
  for (int low = 0; low < 2; ++low)
    for (int kind = 0; kind < kKinds; ++kind) {
      double most = 0;
      for (int n = 0; n < 40; ++n) most = fmax(most, compare((Kind)kind, low));
      bool right = most < (low ? 2e-2 : 1e-4);
      printf("%-8s %-9s %.1e%s\n", low ? "bfloat16" : "float32", names[kind], most, right ? "" : "  WRONG");
      bad |= !right;
    }
  return bad;
}
