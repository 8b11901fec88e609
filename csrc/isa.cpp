// The kernels for one instruction set: compiled once for each, with REGARD_SET the set's suffix and the set's flags.
#define REGARD_PASTE(name, set) name##_##set
#define REGARD_PASTE_SET(name, set) REGARD_PASTE(name, set)
#define REGARD_NAME(name) REGARD_PASTE_SET(name, REGARD_SET)

#ifdef REGARD_PORTABLE
#include "plain.inc"
#else
#include "attention.inc"
#endif
