// Vectors of float32 in GCC's vector extension, with the few operations that need an instruction set's own form.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#define REGARD_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileVectors = 4;  // vectors across a register tile: 6 x 4 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileVectors = 2;  // 6 x 2 accumulators of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kTileVectors = 4;
#endif

constexpr int kUnit = 16;  // columns are cut at multiples of 16 on every instruction set
constexpr int kUnitVectors = kUnit / kLanes;

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef float vf_any __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));
typedef float word __attribute__((aligned(1), may_alias));  // 32 bits: one float32, or two bfloat16

typedef uint16_t bf16;

REGARD_INLINE vf load(const void *p) { return *(const vf_any *)p; }
REGARD_INLINE void store(void *p, vf x) { *(vf_any *)p = x; }
REGARD_INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}

REGARD_INLINE vi lane_numbers() {
  vi n;
  for (int i = 0; i < kLanes; ++i) n[i] = i;
  return n;
}

REGARD_INLINE vf from_bf16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

// To nearest even; NaN stays NaN.
REGARD_INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi number = x == x;
  return __builtin_convertvector((rounded & (vu)number) | (~(vu)number & 0x7fc0), vh);
#endif
}
REGARD_INLINE float from_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
REGARD_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The first `count` lanes alone, all of them where there are more, none where it is below 1: reading leaves zeros in
// the others.
REGARD_INLINE vf load_some(const float *p, long count) {
  if (count >= kLanes) return load(p);
  if (count < 1) return vf{};
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
  float t[kLanes] = {};
  for (long i = 0; i < count; ++i) t[i] = p[i];
  return load(t);
#endif
}
REGARD_INLINE vh load_some(const bf16 *p, long count) {
  if (count >= kLanes) return *(const vh_any *)p;
  if (count < 1) return vh{};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p);
#else
  bf16 t[kLanes] = {};
  for (long i = 0; i < count; ++i) t[i] = p[i];
  return *(const vh_any *)t;
#endif
}
REGARD_INLINE void store_some(float *p, vf x, long count) {
  if (count >= kLanes) return store(p, x);
  if (count < 1) return;
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)x);
#else
  float t[kLanes];
  store(t, x);
  for (long i = 0; i < count; ++i) p[i] = t[i];
#endif
}
REGARD_INLINE void store_some(bf16 *p, vf x, long count) {
  vh_any halves = to_bf16(x);
  if (count >= kLanes) {
    *(vh_any *)p = halves;
    return;
  }
  if (count < 1) return;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1), (__m256i)halves);
#else
  bf16 t[kLanes];
  *(vh_any *)t = halves;
  for (long i = 0; i < count; ++i) p[i] = t[i];
#endif
}

REGARD_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Across lanes, always halved in the same order, so that a row's sum never depends on where it was computed.
REGARD_INLINE float sum_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float t[kLanes];
  store(t, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) t[i] += t[i + n];
  return t[0];
#endif
}
REGARD_INLINE float max_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float t[kLanes];
  store(t, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
#endif
}

// 2^f on [0, 1): minimax in relative error with the constant held at 1, so that exp(0) is exactly 1.
template <bool coarse>
REGARD_INLINE vf exp2_fraction(vf f) {
  if (coarse) {  // 3e-6, for weights that are rounded to bfloat16
    vf p = f * 0.01342669f + 0.05224247f;
    p = p * f + 0.24128021f;
    p = p * f + 0.69304484f;
    return p * f + 1.0f;
  }
  vf p = f * 0.00186713f + 0.00901703f;  // 8e-8
  p = p * f + 0.05579991f;
  p = p * f + 0.24016445f;
  p = p * f + 0.69315131f;
  return p * f + 1.0f;
}

// 2^x; 0 at -inf, NaN at NaN.
template <bool coarse>
REGARD_INLINE vf exp2v(vf x) {
#if defined(__AVX512DQ__)
  vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x), and 0 for an infinity
  return (vf)_mm512_scalef_ps((__m512)exp2_fraction<coarse>(f), (__m512)x);
#else
  vf bounded = x < -127.0f ? splat(-127.0f) : (x > 128.0f ? splat(128.0f) : x);
  vi n = __builtin_convertvector(bounded, vi);  // toward zero
  vf whole = __builtin_convertvector(n, vf);
  vi above = whole > bounded;  // -1 where that was rounded up
  n += above;
  whole += __builtin_convertvector(above, vf);
  vf p = exp2_fraction<coarse>(bounded - whole);
  vf half = (vf)(((n >> 1) + 127) << 23), rest = (vf)((n - (n >> 1) + 127) << 23);
  vf result = p * half * rest;
  return x < -126.0f ? vf{} : (x == x ? result : x);
#endif
}

constexpr float kLog2e = 1.4426950408889634f;

// e^x for x <= 0 to the last bit or so, exactly 1 at 0: decays compound over many tokens. 0 at -inf, NaN at NaN.
REGARD_INLINE vf decay_exp(vf x) {
  x = vmax(splat(-150.0f), x);
  vf n = x * kLog2e;
#if defined(__AVX512F__)
  n = (vf)_mm512_roundscale_ps((__m512)n, 0x08);
#else
  n = (n - 12582912.0f) + 12582912.0f;  // to an integer: the bits below 1 fall off
#endif
  vf r = n * -0.693359375f + x;
  r = n * 2.12194440e-4f + r;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  return p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

REGARD_INLINE vf tanhv(vf x) {
  vf size = x < 0.0f ? -x : x, square = x * x;
  vf small = square * -0.00571704f + 0.02065058f;
  small = small * square + -0.0537435f;
  small = small * square + 0.13331491f;
  small = small * square + -0.33333284f;
  small = x + x * square * small;
  vf e = exp2v<false>(size * -2.885390081777927f);
  vf large = (1.0f - e) / (1.0f + e);
  large = x < 0.0f ? -large : large;
  return size < 0.625f ? small : large;
}

}  // namespace
