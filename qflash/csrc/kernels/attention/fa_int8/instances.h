// Which instance of `fa_int8`'s kernel serves q and k once they are INT8. Host side: run(p, Instance, Access) starts
// it.
#pragma once

#include "kernels/attention/fa_int8/kernel.cuh"

namespace qf {
namespace fa_int8 {

template <bool kAsync, bool kZeroPoints, bool kIntegerV, class Sums = ExactSums>
struct Instance {
  static constexpr auto kernel = qf_fa_int8_kernel<kAsync, kZeroPoints, kIntegerV, Sums>;
  static constexpr int kBytes = kSharedBytes + (kZeroPoints ? kStartsBytes : 0);  // of shared memory
};

// log2 of the number of tokens that share a scale; 31 where all of them do; -1 for what the kernel cannot serve.
inline int shift_of(const QfScales& scales, int length) {
  if (scales.group >= length) return 31;
  for (int shift = kKeyGroupLog; shift < 31; ++shift)
    if (scales.group == 1 << shift) return shift;
  return -1;
}

inline bool serves_quantized(const QfAttnParams& p) {
  const QfKv& kv = p.kv;
  const bool zero_points = p.q_scales.zero_point, integer_v = kv.v_scales.scale;
  if (kv.kind != QF_KV_QUANTIZED || kv.k_dtype != QF_I8 || kv.v_dtype != (integer_v ? int(QF_I8) : p.dtype))
    return false;
  if (zero_points != bool(kv.k_scales.zero_point)) return false;
  if (zero_points && !(p.q_scales.sums && kv.k_scales.sums)) return false;
  return !p.rope.cos && p.q_scales.scale && kv.k_scales.scale && p.q_scales.group > 0 &&
         shift_of(kv.k_scales, p.k_len) >= 0 && (!integer_v || kv.v_scales.group > 0);
}

// Arrays that are passed quantized, and for which `serves_quantized` returned true.
template <class Run>
int run_quantized(const QfAttnParams& p, Run run) {
  const bool integer_v = p.kv.v_scales.scale, zero_points = p.q_scales.zero_point;
  const Access access = {chunks_aligned(p.q, p.head_dim, 1), chunks_aligned(p.kv.k, p.head_dim, 1),
                         !integer_v && chunks_aligned(p.kv.v, p.head_dim, 2), chunks_aligned(p.out, p.head_dim, 2),
                         shift_of(p.kv.k_scales, p.k_len)};
  if (integer_v)
    return zero_points ? run(p, Instance<false, true, true>{}, access) : run(p, Instance<false, false, true>{}, access);
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (!kCanCopyAsync || !access.q || !access.k || !access.v)
    return zero_points ? run(p, Instance<false, true, false>{}, access)
                       : run(p, Instance<false, false, false>{}, access);
  if (zero_points) return run(p, Instance<kCanCopyAsync, true, false>{}, access);
  return p.lse ? run(p, Instance<kCanCopyAsync, false, false>{}, access)
               : run(p, Instance<kCanCopyAsync, false, false, RoundedSums>{}, access);
}

// q and k as Workspace::place stores them: rows of whole chunks.
template <class Run>
int run_after_quantizing(const QfAttnParams& p, Run run) {
  const Access access = {true, true, chunks_aligned(p.kv.v, p.head_dim, 2), chunks_aligned(p.out, p.head_dim, 2),
                         kKeyGroupLog};
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (!kCanCopyAsync || !access.v) return run(p, Instance<false, false, false>{}, access);
  return p.lse ? run(p, Instance<kCanCopyAsync, false, false>{}, access)
               : run(p, Instance<kCanCopyAsync, false, false, RoundedSums>{}, access);
}

}  // namespace fa_int8
}  // namespace qf
