// Copies of q, k, v in the layouts that the tile reads, and the memory they lie in.
#pragma once
#include <stdlib.h>
#if !defined(__GLIBC__)
#include <pthread.h>
#endif

#include "tile.h"

namespace {

constexpr int kPanel = 64;  // columns of one packed right operand

REGARD_INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }
template <class Op>
REGARD_INLINE long words_of(long elements) {
  return (elements + Op::per_word - 1) / Op::per_word;
}

// Hands out arrays of a block one after another; with no block it only counts the bytes.
class Arrays {
 public:
  explicit Arrays(char *base) : base_(base) {}
  template <class T>
  void take(T *&array, size_t count) {
    array = (T *)(base_ + used_);
    used_ += round_up(count * sizeof(T), 64) + 64;  // a line apart: no equal low addresses
  }
  size_t used() const { return used_; }

 private:
  char *base_;
  size_t used_ = 0;
};

// One growing block of memory per thread, kept between calls: fresh pages would cost a short call more than its work.
struct Scratch {
  char *base;
  size_t size;
};
void release(void *scratch) {
  free(((Scratch *)scratch)->base);
  *(Scratch *)scratch = {};
}

// Has `release` called when this thread ends. C++ would do so by a destructor, which needs the C++ runtime library; in
// glibc the function behind it is older than the present versions of those for keys, so the library runs on older
// systems.
#if defined(__GLIBC__)
extern "C" int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
extern "C" void *__dso_handle;
bool release_at_end(Scratch *scratch) { return !__cxa_thread_atexit_impl(release, scratch, &__dso_handle); }
#else
bool release_at_end(Scratch *scratch) {
  static pthread_key_t key;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_key_create(&key, release); });
  return !pthread_setspecific(key, scratch);
}
#endif

// Lays out this thread's block: `take(arrays)` takes what it needs, in the same order each time it is called.
template <class Take>
bool reserve(const Take &take) {
  static thread_local Scratch scratch;
  Arrays count(nullptr);
  take(count);
  if (count.used() > scratch.size) {
    if (!scratch.base && !release_at_end(&scratch)) return false;
    free(scratch.base);
    scratch.size = round_up(count.used(), 1 << 16);
    scratch.base = (char *)aligned_alloc(4096, scratch.size);
    if (!scratch.base) {
      scratch.size = 0;
      return false;
    }
  }
  Arrays arrays(scratch.base);
  take(arrays);
  return true;
}

// kLanes words from an element pointer of type In.
template <class In, class Op>
struct Reader;
template <>
struct Reader<float, Float32> {
  static REGARD_INLINE vf words(const float *p) { return load(p); }
  static REGARD_INLINE vf words(const float *p, long elements) { return load_some(p, elements); }
};
template <>
struct Reader<bf16, Float32> {
  static REGARD_INLINE vf words(const bf16 *p) { return from_bf16(*(const vh_any *)p); }
  static REGARD_INLINE vf words(const bf16 *p, long elements) { return from_bf16(load_some(p, elements)); }
};
#if defined(__AVX512BF16__)
template <>
struct Reader<bf16, Bfloat16> {
  static REGARD_INLINE vf words(const bf16 *p) { return load(p); }
  static REGARD_INLINE vf words(const bf16 *p, long elements) {
    return (vf)_mm512_maskz_loadu_epi16((__mmask32)((1ull << elements) - 1), p);
  }
};
#endif

// The same where only `elements` of them exist; the others are 0.
template <class In, class Op>
REGARD_INLINE vf read_words(const In *p, long elements) {
  if (elements >= kLanes * Op::per_word) return Reader<In, Op>::words(p);
  if (elements < 1) return vf{};
  return Reader<In, Op>::words(p, elements);
}

REGARD_INLINE void fetch(const void *row, long bytes) {
  for (long at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)row + at, 0, 2);
}

// Left operand: one row of `elements` as words, padded with 0 to whole vectors.
template <class In, class Op>
REGARD_INLINE void copy_row(word *to, const In *from, long elements) {
  constexpr long full = kLanes * Op::per_word;
  for (long e = 0; e < elements; e += full, to += kLanes) store(to, read_words<In, Op>(from + e, elements - e));
}

// The same from float32 to the words' own type, up to `padded` elements.
REGARD_INLINE void round_row(float *to, const float *from, long elements, long padded) {
  for (long e = 0; e < padded; e += kLanes) store(to + e, read_words<float, Float32>(from + e, elements - e));
}
REGARD_INLINE void round_row(bf16 *to, const float *from, long elements, long padded) {
  for (long e = 0; e < padded; e += kLanes)
    *(vh_any *)(to + e) = to_bf16(read_words<float, Float32>(from + e, elements - e));
}

// A square of kLanes vectors, transposed by repeatedly interleaving its first half with its second.
#if defined(__AVX512F__)
constexpr vi kLowHalves = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
constexpr vi kHighHalves = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#elif defined(__AVX2__)
constexpr vi kLowHalves = {0, 8, 1, 9, 2, 10, 3, 11};
constexpr vi kHighHalves = {4, 12, 5, 13, 6, 14, 7, 15};
#else
constexpr vi kLowHalves = {0, 4, 1, 5};
constexpr vi kHighHalves = {2, 6, 3, 7};
#endif
template <int stage = 1>
REGARD_INLINE void transpose(vf (&x)[kLanes]) {
  if constexpr (stage < kLanes) {
    vf y[kLanes];
    each<kLanes>(
        REGARD_EACH { y[i] = __builtin_shuffle(x[i / 2], x[i / 2 + kLanes / 2], i % 2 ? kHighHalves : kLowHalves); });
    transpose<2 * stage>(y);
    each<kLanes>(REGARD_EACH { x[i] = y[i]; });
  }
}

// Right operand X^T: `rows` rows of X become the columns of words_of(elements) rows of `width` words, 0 past the last.
template <class In, class Op>
void pack_transposed(word *to, const In *from, long row_stride, long rows, long elements, long width) {
  constexpr long full = kLanes * Op::per_word;
  for (long first = 0; first < width; first += kLanes)
    for (long e = 0; e < elements; e += full) {
      vf square[kLanes];
      const In *corner = from + first * row_stride + e;
      word *target = to + e / Op::per_word * width + first;
      if (first + kLanes <= rows && e + full <= elements) {
        each<kLanes>(REGARD_EACH { square[i] = Reader<In, Op>::words(corner + i * row_stride); });
        transpose(square);
        each<kLanes>(REGARD_EACH { store(target + i * width, square[i]); });
        continue;
      }
      for (int i = 0; i < kLanes; ++i)
        square[i] = first + i < rows ? read_words<In, Op>(corner + i * row_stride, elements - e) : vf{};
      transpose(square);
      long words = words_of<Op>(elements - e);
      for (int i = 0; i < kLanes && i < words; ++i) store(target + i * width, square[i]);
    }
}

// Whether all values of the rows are finite: x - x is 0 for those and NaN for the others.
template <class In>
bool are_finite(const In *row, long row_stride, long rows, long elements) {
  vf differences = {};
  for (long n = 0; n < rows; ++n, row += row_stride)
    for (long e = 0; e < elements; e += kLanes) {
      vf x = read_words<In, Float32>(row + e, elements - e);
      differences += x - x;
    }
  return sum_lanes(differences) == 0;
}

// Right operand X: rows of X, in panels of kPanel columns `panel_stride` words apart, each row kPanel words.
// bfloat16 pairs interleave rows 2n and 2n + 1. `row(n)` is the n-th row, or null for a row of zeros.
template <class In, class Op>
struct Rows;
template <class In>
struct Rows<In, Float32> {
  template <class Row>
  static void pack(word *to, long panel_stride, long rows, long columns, const Row &row) {
    for (long n = 0; n < rows; ++n) {
      const In *from = row(n);
      for (long c = 0; c < columns; c += kUnit) {
        word *unit = to + c / kPanel * panel_stride + n * kPanel + c % kPanel;
        for (int v = 0; v < kUnit; v += kLanes)
          store(unit + v, from && c + v < columns ? read_words<In, Float32>(from + c + v, columns - c - v) : vf{});
      }
    }
  }
};
#if defined(__AVX512BF16__)
REGARD_INLINE __m512i read_halves(const bf16 *from, long columns) {
  if (!from) return _mm512_setzero_si512();
  __mmask16 exist = columns >= kLanes ? 0xffff : (__mmask16)((1u << columns) - 1);
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(exist, from));
}
REGARD_INLINE __m512i low_order() {  // 0, 32, 1, 33, ... 15, 47
  __m512i even = _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
}
template <>
struct Rows<bf16, Bfloat16> {
  template <class Row>
  static void pack(word *to, long panel_stride, long rows, long columns, const Row &row) {
    for (long n = 0; n < rows; n += 2) {
      const bf16 *even = row(n), *odd = n + 1 < rows ? row(n + 1) : nullptr;
      long c = 0;
      for (; even && odd && c + 2 * kUnit <= columns; c += 2 * kUnit) {  // both halves of 32 columns at once
        word *unit = to + c / kPanel * panel_stride + n / 2 * kPanel + c % kPanel;
        __m512i a = _mm512_loadu_si512(even + c), b = _mm512_loadu_si512(odd + c);
        store(unit, (vf)_mm512_permutex2var_epi16(a, low_order(), b));
        store(unit + kUnit, (vf)_mm512_permutex2var_epi16(a, _mm512_add_epi16(low_order(), _mm512_set1_epi16(16)), b));
      }
      for (; c < columns; c += kUnit) {
        word *unit = to + c / kPanel * panel_stride + n / 2 * kPanel + c % kPanel;
        __m512i low = read_halves(even ? even + c : even, columns - c);
        __m512i high = read_halves(odd ? odd + c : odd, columns - c);
        store(unit, (vf)_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }
};
#endif

}  // namespace
