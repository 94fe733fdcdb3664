// Stores finished rows to global memory.
#pragma once

#include "attn/decode/config.cuh"
#include "attn/decode/merge.cuh"

namespace qf {
namespace decode {

// NaN and infinity in V at keys that some rows see and others do not would make the products NaN in all rows, so the
// tiles hold zeros instead (clear_unseen), and each row that sees such a key gets its value here. A visible key's
// weight is never zero, so it contributes its V itself. There are fewer than 2 Tq such keys, or few (attend_share).
template <class Value>
__device__ __forceinline__ void add_nonfinite(float4& o, const KeyRange& keys, const KeyRange& any, const KeyRange& all,
                                              Value value) {
  const auto add = [&](float& x, float v) {
    if (v * 0.0f != 0.0f) x += v;
  };
  for (int key = max(keys.begin, any.begin); key < min(keys.end, any.end); ++key) {
    if (key >= all.begin && key < all.end) {
      key = all.end - 1;
      continue;
    }
    const float4 v = value(key);
    add(o.x, v.x), add(o.y, v.y), add(o.z, v.z), add(o.w, v.w);
  }
}

// Channels d .. d + 3 of one row. value(key): V's, as floats. aligned: out may be stored 8 bytes at a time.
template <class Element, class Config, class Value>
__device__ __forceinline__ void store_row(const QfAttnParams& p, const Seen<Config>& seen, const Part& part, int row,
                                          int d, Merged merged, bool aligned, Value value) {
  const int group = p.q_heads / p.kv_heads;
  const int token = row / group, head = part.kv_head * group + row - token * group;
  const KeyRange keys = seen.mask.visible(token);
  const bool empty = keys.begin == keys.end;
  if (p.sinks) merged.join(WithSink(merged.m, p.sinks[head], 0.0f));
  const float factor = 1.0f / merged.l;
  float4 o = {merged.o.x * factor, merged.o.y * factor, merged.o.z * factor, merged.o.w * factor};
  if (empty) o = {0.0f, 0.0f, 0.0f, 0.0f};
  if (seen.any.begin < seen.all.begin || seen.any.end > seen.all.end) add_nonfinite(o, keys, seen.any, seen.all, value);
  if (!seen.good) o = {nan(), nan(), nan(), nan()};
  Element rounded[4];
  from_float(o.x, rounded[0]), from_float(o.y, rounded[1]), from_float(o.z, rounded[2]), from_float(o.w, rounded[3]);
  Element* const g_out =
      static_cast<Element*>(p.out.data) + part.b * p.out.stride_b + token * p.out.stride_t + head * p.out.stride_h + d;
  if (aligned) {
    uint2 words;
    pack(rounded, words);
    *reinterpret_cast<uint2*>(g_out) = words;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) g_out[e] = rounded[e];
  }
  if (p.lse && d == 0)
    p.lse[part.b * p.lse_stride_b + head * p.lse_stride_h + token] = !seen.good ? nan()
                                                                     : empty    ? sink_of(p, head)
                                                                                : lse_of(merged.m, merged.exact);
}

}  // namespace decode
}  // namespace qf
