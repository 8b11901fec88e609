// The kernels for aarch64, whose NEON every such machine has.
#define REGARD_NAME(x) x##_aarch64
#include "attention.inc"
