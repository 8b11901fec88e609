// The structs of the C interface as text, so that a caller in another language can check every field it writes.
#include <stddef.h>
#include <stdio.h>

#include "recurrent.h"
#include "regard.h"

namespace {

struct Field {
  const char *name;
  char code;  // as in Python's struct module: q int64, i int32, f float, P pointer
  size_t offset, size;
};

template <class T>
struct Code;
template <>
struct Code<int64_t> {
  static constexpr char value = 'q';
};
template <>
struct Code<int32_t> {
  static constexpr char value = 'i';
};
template <>
struct Code<float> {
  static constexpr char value = 'f';
};
template <class T>
struct Code<T *> {
  static constexpr char value = 'P';
};
template <class T, size_t n>
struct Code<T[n]> : Code<T> {};

#define FIELD(name) {#name, Code<decltype(S::name)>::value, offsetof(S, name), sizeof(S::name)}

template <class T>
struct Fields;

#define DESCRIBE(type, ...)                        \
  template <>                                      \
  struct Fields<type> {                            \
    typedef type S;                                \
    static constexpr const char *name = #type;     \
    static constexpr Field list[] = {__VA_ARGS__}; \
  };                                               \
  constexpr Field Fields<type>::list[];

DESCRIBE(regard_attention, FIELD(batch), FIELD(q_heads), FIELD(kv_heads), FIELD(q_len), FIELD(k_len), FIELD(k_dim),
         FIELD(v_dim), FIELD(dtype), FIELD(scale), FIELD(softcap), FIELD(q), FIELD(k), FIELD(v), FIELD(out), FIELD(lse),
         FIELD(kept), FIELD(out_f32), FIELD(q_stride), FIELD(k_stride), FIELD(v_stride), FIELD(out_stride),
         FIELD(q_start), FIELD(low), FIELD(high), FIELD(prefix), FIELD(k_length), FIELD(keep), FIELD(q_segment),
         FIELD(k_segment), FIELD(mask), FIELD(mask_stride), FIELD(tile_lines), FIELD(tile_stride), FIELD(tile_column),
         FIELD(tile_bits), FIELD(bits), FIELD(bias), FIELD(bias_stride), FIELD(relative), FIELD(relative_stride),
         FIELD(relative_zero), FIELD(relative_count), FIELD(dropout_p), FIELD(dropout_seed))
DESCRIBE(regard_attention_grad, FIELD(d_out), FIELD(d_lse), FIELD(out), FIELD(d_q), FIELD(d_k), FIELD(d_v),
         FIELD(d_bias), FIELD(d_bias_stride), FIELD(d_relative))
DESCRIBE(regard_recurrence, FIELD(batch), FIELD(key_heads), FIELD(heads), FIELD(tokens), FIELD(k_dim), FIELD(v_dim),
         FIELD(dtype), FIELD(channel), FIELD(scale), FIELD(q), FIELD(k), FIELD(v), FIELD(out), FIELD(out_f32),
         FIELD(q_stride), FIELD(k_stride), FIELD(v_stride), FIELD(out_stride), FIELD(beta), FIELD(beta_stride),
         FIELD(log_decay), FIELD(decay_stride), FIELD(starts), FIELD(state), FIELD(last), FIELD(kept), FIELD(kept_size))
DESCRIBE(regard_recurrence_grad, FIELD(d_out), FIELD(d_last), FIELD(d_q), FIELD(d_k), FIELD(d_v), FIELD(d_beta),
         FIELD(d_log_decay), FIELD(d_state))
DESCRIBE(regard_scan, FIELD(batch), FIELD(tokens), FIELD(width), FIELD(log_a), FIELD(x), FIELD(starts), FIELD(state),
         FIELD(y), FIELD(last))
DESCRIBE(regard_scan_grad, FIELD(y), FIELD(d_y), FIELD(d_last), FIELD(d_log_a), FIELD(d_x), FIELD(d_state))
DESCRIBE(regard_selective, FIELD(batch), FIELD(tokens), FIELD(width), FIELD(states), FIELD(x), FIELD(dt), FIELD(A),
         FIELD(B), FIELD(C), FIELD(D), FIELD(starts), FIELD(state), FIELD(y), FIELD(last), FIELD(kept),
         FIELD(kept_size))
DESCRIBE(regard_selective_grad, FIELD(d_y), FIELD(d_last), FIELD(d_x), FIELD(d_dt), FIELD(d_A), FIELD(d_B), FIELD(d_C),
         FIELD(groups), FIELD(d_D), FIELD(d_state))
DESCRIBE(regard_conv, FIELD(batch), FIELD(tokens), FIELD(channels), FIELD(taps), FIELD(x), FIELD(x_stride),
         FIELD(weight), FIELD(bias), FIELD(starts), FIELD(state), FIELD(y))
DESCRIBE(regard_conv_grad, FIELD(d_y), FIELD(d_x), FIELD(d_weight), FIELD(d_bias), FIELD(d_state))

// "name size" and then "field:code:offset:size" for every field.
template <class T>
struct Text {
  char text[4096];

  Text() {
    size_t used = (size_t)snprintf(text, sizeof text, "%s %zu", Fields<T>::name, sizeof(T));
    for (const Field &f : Fields<T>::list)
      if (used < sizeof text)
        used += (size_t)snprintf(text + used, sizeof text - used, " %s:%c:%zu:%zu", f.name, f.code, f.offset, f.size);
  }
  static const char *get() {
    static const Text one;
    return one.text;
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char *regard_struct(int which) {
  switch (which) {
    case 0: return Text<regard_attention>::get();
    case 1: return Text<regard_attention_grad>::get();
    case 2: return Text<regard_recurrence>::get();
    case 3: return Text<regard_recurrence_grad>::get();
    case 4: return Text<regard_scan>::get();
    case 5: return Text<regard_scan_grad>::get();
    case 6: return Text<regard_selective>::get();
    case 7: return Text<regard_selective_grad>::get();
    case 8: return Text<regard_conv>::get();
    case 9: return Text<regard_conv_grad>::get();
    default: return nullptr;
  }
}
