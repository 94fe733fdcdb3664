// Which instance of `fa_int8`'s kernel attends to arrays that are INT8 already. Host side.
#pragma once

#include "kernels/fa_int8/kernel.cuh"

namespace qf {
namespace fa_int8 {

template <bool kAsync, bool kZeroPoints, bool kIntegerV, class Sums = ExactSums>
struct Instance {
  static constexpr auto kernel = qf_fa_int8_kernel<kAsync, kZeroPoints, kIntegerV, Sums>;
  static constexpr int kBytes = kSharedBytes + (kZeroPoints ? kStartsBytes : 0);  // of shared memory
};

// log2 of how many tokens share a scale; 31 where all of them do; -1 for what the kernel cannot serve.
inline int shift_of(const QfScales& scales, int length) {
  if (scales.group >= length) return 31;
  for (int shift = kKeyGroupLog; shift < 31; ++shift)
    if (scales.group == 1 << shift) return shift;
  return -1;
}

inline bool serves(const QfInt8AttnParams& p) {
  const bool zero_points = p.q_scales.zero_point;
  if (zero_points != bool(p.k_scales.zero_point)) return false;
  if (zero_points && !(p.q_scales.sums && p.k_scales.sums)) return false;
  return !p.attn.rope.cos && p.q_scales.scale && p.k_scales.scale && p.q_scales.group > 0 &&
         shift_of(p.k_scales, p.attn.k_len) >= 0 && (!p.v_scales.scale || p.v_scales.group > 0);
}

// run(Instance, Access) with the instance for `p`, which `serves` was asked about.
template <class Run>
int run_quantized(const QfInt8AttnParams& p, Run run) {
  const QfAttnParams& a = p.attn;
  const bool integer_v = p.v_scales.scale, zero_points = p.q_scales.zero_point;
  const Access access = {chunks_aligned(a.q, a.head_dim, 1), chunks_aligned(a.k, a.head_dim, 1),
                         !integer_v && chunks_aligned(a.v, a.head_dim, 2), chunks_aligned(a.out, a.head_dim, 2),
                         shift_of(p.k_scales, a.k_len)};
  if (integer_v)
    return zero_points ? run(Instance<false, true, true>{}, access) : run(Instance<false, false, true>{}, access);
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (!kCanCopyAsync || !access.q || !access.k || !access.v)
    return zero_points ? run(Instance<false, true, false>{}, access) : run(Instance<false, false, false>{}, access);
  if (zero_points) return run(Instance<kCanCopyAsync, true, false>{}, access);
  return a.lse ? run(Instance<kCanCopyAsync, false, false>{}, access)
               : run(Instance<kCanCopyAsync, false, false, RoundedSums>{}, access);
}

}  // namespace fa_int8
}  // namespace qf
