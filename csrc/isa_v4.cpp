// The kernels for x86-64-v4 (AVX-512).
#define REGARD_NAME(x) x##_v4
#include "attention.inc"
