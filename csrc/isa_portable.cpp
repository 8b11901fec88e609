// The kernels for any machine, in plain loops.
#define REGARD_NAME(name) name##_portable
#include "plain.inc"
