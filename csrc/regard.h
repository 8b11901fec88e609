// The C interface of regard's CPU kernels: plain pointers, sizes, strides in elements, an int status.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Kinds of q, k, v and out. Sums, scores, bias, lse are float32 in every case.
enum regard_dtype { REGARD_F32 = 0, REGARD_BF16 = 1 };

enum { REGARD_TILE = 64 };

// One attention call. Every tensor's last stride is 1; pointers that may be null say so.
// Query row r of batch row b stands at slot i = q_start[b] + r, key column c at slot j = c.
// A pair is allowed when  (low <= i - j <= high  or  j < prefix[b])  and  j < k_length[b]  and  keep[b, c]
// and  q_segment[b, r] == k_segment[b, c]  and  mask[b, h, r, c]  and the pair is in the lists of tiles; each term only
// where its pointer is not null.
typedef struct regard_attention {
  int64_t batch, q_heads, kv_heads, q_len, k_len, k_dim, v_dim;
  int32_t dtype;
  float scale, softcap;  // softcap 0: none
  const void *q, *k, *v;
  void *out;    // (B, Hq, Tq, Dv): the output in `dtype`, or in float32 when out_f32 is not 0
  float *lse;   // (B, Hq, Tq) contiguous, natural log; -inf where no key is allowed
  float *kept;  // (3, B, Hq, Tq) contiguous, for the set's own backward pass: what `lse` lost by rounding, the row's
                // largest score as the set stores scores, and log2 of its sum over that; or null where none follows
  int32_t out_f32;
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3];  // batch, head, token

  const int64_t *q_start;                // (B)
  int64_t low, high;                     // INT64_MIN / INT64_MAX: open
  const int64_t *prefix, *k_length;      // (B) or null
  const uint8_t *keep;                   // (B, Tk) contiguous or null
  const int64_t *q_segment, *k_segment;  // (B, Tq), (B, Tk) contiguous or null
  const uint8_t *mask;                   // strides below, 0 broadcasts; or null
  int64_t mask_stride[4];
  // The tiles of REGARD_TILE rows by REGARD_TILE columns that hold allowed pairs, in lists: the row of tiles n of a
  // head has tiles tile_lines[2 n] up to tile_lines[2 n + 1], by rising column. Of each, tile_bits is -1 where these
  // lists leave all of its pairs, else the number of its REGARD_TILE words in `bits`: bit c of word r is pair (r, c).
  const int64_t *tile_lines;  // (rows of tiles, 2) of each head, strides below; or null
  int64_t tile_stride[2];     // batch, head; 0 broadcasts
  const int32_t *tile_column, *tile_bits;
  const uint64_t *bits;

  const float *bias;  // dense, strides below, 0 broadcasts; -inf masks; or null
  int64_t bias_stride[4];
  const float *relative;  // bias by distance: relative[h * relative_stride + (j - i) + relative_zero]; or null
  int64_t relative_stride, relative_zero, relative_count;

  float dropout_p;  // kept weights are scaled by 1 / (1 - p); the rule of regard/backends/dropout.py
  int64_t dropout_seed;
} regard_attention;

// Gradients of one call; outputs are float32, contiguous, and set (not added to). Null where not wanted.
typedef struct regard_attention_grad {
  const float *d_out;      // (B, Hq, Tq, Dv) contiguous
  const float *d_lse;      // (B, Hq, Tq) or null
  const float *out;        // (B, Hq, Tq, Dv) contiguous float32, as the forward pass gave it
  float *d_q, *d_k, *d_v;  // (B, Hq, Tq, Dk), (B, Hkv, Tk, Dk), (B, Hkv, Tk, Dv)
  float *d_bias;           // shaped and strided like a contiguous copy of bias at its own (unbroadcast) sizes; or null
  int64_t d_bias_stride[4];  // 0 along broadcast axes
  float *d_relative;         // (Hq, relative_count) contiguous; or null
} regard_attention_grad;

enum regard_status {
  REGARD_OK = 0,
  REGARD_NO_MEMORY = 1,
  REGARD_BAD_DTYPE = 2,
  REGARD_BAD_SIZE = 3,
  REGARD_UNKNOWN_ISA = 4,
  REGARD_SMALL_BUFFER = 5
};

// 0 on success; another number names what was refused (see regard_error).
int regard_attention_forward(const regard_attention *call);
int regard_attention_backward(const regard_attention *call, const regard_attention_grad *grad);
const char *regard_error(int status);

// The instruction set in use ("x86-64-v3", "x86-64-v4", "x86-64-v4+bf16", "aarch64", "portable";
// null where REGARD_ISA, which caps it, names none), and the OpenMP threads.
const char *regard_isa(void);
int regard_threads(void);
// A checksum of the files of csrc/ that the library was built from (finding.py computes the same).
const char *regard_sources(void);

// Does `rounds` times as many multiply-adds as fit into the registers, reading no memory; the floating-point operations
// done, which a benchmark divides by the time they took.
double regard_multiply_adds(int32_t dtype, int64_t rounds);

// Asks the system for large pages under memory that is about to be filled, where it has such pages: the first touch of
// each small one costs as much as filling it several times.
void regard_large_pages(void *memory, int64_t bytes);

// The structs of this interface by number, attention's two first, then those of recurrent.h in its order, as
// "name size field:code:offset:size …" with the codes of Python's struct module: a caller checks that both sides agree.
const char *regard_struct(int which);

#ifdef __cplusplus
}
#endif
