// The exported functions: which instruction set runs, and the words for a status.
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_v4_bf16() { return has_v4() && __builtin_cpu_supports("avx512bf16"); }
#endif

}  // namespace

// Every instruction set of the machine's kind by rising power: SET(its name in CMakeLists.txt, its name for REGARD_ISA,
// whether this machine runs it).
#if defined(__x86_64__)
#define REGARD_SETS(SET)            \
  SET(portable, "portable", always) \
  SET(v3, "x86-64-v3", has_v3)      \
  SET(v4, "x86-64-v4", has_v4)      \
  SET(v4_bf16, "x86-64-v4+bf16", has_v4_bf16)
#elif defined(__aarch64__)
#define REGARD_SETS(SET)            \
  SET(portable, "portable", always) \
  SET(aarch64, "aarch64", always)
#else
#define REGARD_SETS(SET) SET(portable, "portable", always)
#endif

#define REGARD_DECLARE(set, name, runs) \
  namespace regard::set {               \
  extern const Kernels kernels;         \
  }
REGARD_SETS(REGARD_DECLARE)

namespace {

struct Set {
  const char *name;
  bool (*runs)();
  const regard::Kernels *kernels;  // null where the compiler could not build them; the name still caps the others
};

// CMake defines REGARD_HAS_<set> as 1 or 0.
#define REGARD_ENTRY(set, name, runs) {name, runs, REGARD_HAS_##set ? &regard::set::kernels : nullptr},
const Set sets[] = {REGARD_SETS(REGARD_ENTRY)};

// The most powerful set that this machine runs, no higher than REGARD_ISA says; null where that names none.
const Set *choose() {
  const char *cap = getenv("REGARD_ISA");
  const Set *best = nullptr;
  for (const Set &set : sets) {
    if (set.kernels && set.runs()) best = &set;
    if (cap && *cap && strcmp(cap, set.name) == 0) return best;
  }
  return cap && *cap ? nullptr : best;
}

const Set *chosen() {
  static const Set *const set = choose();
  return set;
}

int refused(const regard_attention &a) {
  if (!chosen()) return REGARD_UNKNOWN_ISA;
  if (a.dtype != REGARD_F32 && a.dtype != REGARD_BF16) return REGARD_BAD_DTYPE;
  if (a.batch < 1 || a.q_heads < 1 || a.kv_heads < 1 || a.q_len < 1 || a.k_len < 1 || a.k_dim < 1 || a.v_dim < 1)
    return REGARD_BAD_SIZE;
  if (a.q_heads % a.kv_heads) return REGARD_BAD_SIZE;
  return REGARD_OK;
}

}  // namespace

#define REGARD_EXPORT extern "C" __attribute__((visibility("default")))

REGARD_EXPORT int regard_attention_forward(const regard_attention *call) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->attention_forward(call);
}

REGARD_EXPORT int regard_attention_backward(const regard_attention *call, const regard_attention_grad *grad) {
  const int status = refused(*call);
  if (!status && !call->kept) return REGARD_SMALL_BUFFER;
  return status ? status : chosen()->kernels->attention_backward(call, grad);
}

namespace {

int64_t stretches(int64_t count, int64_t size) { return (count + size - 1) / size; }
int has_room(const void *buffer, int64_t size, int64_t needed) {
  return buffer && size < needed ? REGARD_SMALL_BUFFER : REGARD_OK;
}

int refused(const regard_recurrence &x) {
  if (!chosen()) return REGARD_UNKNOWN_ISA;
  if (x.dtype != REGARD_F32 && x.dtype != REGARD_BF16) return REGARD_BAD_DTYPE;
  if (x.batch < 1 || x.key_heads < 1 || x.heads < 1 || x.tokens < 1 || x.k_dim < 1 || x.v_dim < 1)
    return REGARD_BAD_SIZE;
  if (x.heads % x.key_heads) return REGARD_BAD_SIZE;
  const int64_t every = chosen()->kernels->recurrence_every(x.k_dim, x.v_dim);
  return has_room(x.kept, x.kept_size, x.batch * x.heads * stretches(x.tokens, every) * x.k_dim * x.v_dim);
}
int refused(const regard_scan &x) {
  if (!chosen()) return REGARD_UNKNOWN_ISA;
  return x.batch < 1 || x.tokens < 1 || x.width < 1 ? REGARD_BAD_SIZE : REGARD_OK;
}
int refused(const regard_conv &x) {
  if (!chosen()) return REGARD_UNKNOWN_ISA;
  return x.batch < 1 || x.tokens < 1 || x.channels < 1 || x.taps < 1 ? REGARD_BAD_SIZE : REGARD_OK;
}
int refused(const regard_selective &x) {
  if (!chosen()) return REGARD_UNKNOWN_ISA;
  if (x.batch < 1 || x.tokens < 1 || x.width < 1 || x.states < 1) return REGARD_BAD_SIZE;
  const int64_t every = chosen()->kernels->selective_every;
  return has_room(x.kept, x.kept_size, x.batch * stretches(x.tokens, every) * x.width * x.states);
}
int refused(const regard_selective &x, const regard_selective_grad &grad) {
  const int status = refused(x);
  if (status) return status;
  return grad.groups < stretches(x.width, chosen()->kernels->selective_group) ? REGARD_SMALL_BUFFER : REGARD_OK;
}

}  // namespace

REGARD_EXPORT int regard_recurrence_forward(const regard_recurrence *call) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->recurrence_forward(call);
}
REGARD_EXPORT int regard_recurrence_backward(const regard_recurrence *call, const regard_recurrence_grad *grad) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->recurrence_backward(call, grad);
}
REGARD_EXPORT int regard_scan_forward(const regard_scan *call) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->scan_forward(call);
}
REGARD_EXPORT int regard_scan_backward(const regard_scan *call, const regard_scan_grad *grad) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->scan_backward(call, grad);
}
REGARD_EXPORT int regard_selective_forward(const regard_selective *call) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->selective_forward(call);
}
REGARD_EXPORT int regard_selective_backward(const regard_selective *call, const regard_selective_grad *grad) {
  const int status = refused(*call, *grad);
  return status ? status : chosen()->kernels->selective_backward(call, grad);
}
REGARD_EXPORT int regard_conv_forward(const regard_conv *call) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->conv_forward(call);
}
REGARD_EXPORT int regard_conv_backward(const regard_conv *call, const regard_conv_grad *grad) {
  const int status = refused(*call);
  return status ? status : chosen()->kernels->conv_backward(call, grad);
}
REGARD_EXPORT int64_t regard_recurrence_every(int64_t k_dim, int64_t v_dim) {
  return chosen() ? chosen()->kernels->recurrence_every(k_dim, v_dim) : 1;
}
REGARD_EXPORT int64_t regard_selective_every(void) { return chosen() ? chosen()->kernels->selective_every : 1; }
REGARD_EXPORT int64_t regard_selective_group(void) { return chosen() ? chosen()->kernels->selective_group : 1; }

REGARD_EXPORT double regard_multiply_adds(int32_t dtype, int64_t rounds) {
  return chosen() ? chosen()->kernels->multiply_adds(dtype, rounds) : 0;
}

REGARD_EXPORT const char *regard_error(int status) {
  switch (status) {
    case REGARD_OK: return "no error";
    case REGARD_NO_MEMORY: return "out of memory";
    case REGARD_BAD_DTYPE: return "a dtype other than float32 and bfloat16";
    case REGARD_BAD_SIZE: return "an empty size, or query heads that are no multiple of the key heads";
    case REGARD_UNKNOWN_ISA: return "REGARD_ISA names no instruction set";
    case REGARD_SMALL_BUFFER: return "a buffer smaller than the kernel needs";
    default: return "an unknown status";
  }
}

REGARD_EXPORT const char *regard_isa(void) { return chosen() ? chosen()->name : nullptr; }

// CMake defines it: a checksum of every file of csrc/.
REGARD_EXPORT const char *regard_sources(void) { return REGARD_SOURCES; }

REGARD_EXPORT int regard_threads(void) { return omp_get_max_threads(); }

REGARD_EXPORT void regard_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 1 << 21;
  const uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1), end = ((uintptr_t)memory + bytes) & ~(page - 1);
  if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);  // advice: where it is refused nothing is lost
#else
  (void)memory, (void)bytes;
#endif
}
