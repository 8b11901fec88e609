// The kernels for x86-64-v3 (AVX2 and FMA).
#define REGARD_NAME(x) x##_v3
#include "attention.inc"
