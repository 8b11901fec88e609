// The kernels for x86-64-v4 with AVX512_BF16.
#define REGARD_NAME(x) x##_v4_bf16
#include "attention.inc"
