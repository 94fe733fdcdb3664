// dequantize: out <- scale * (value - zero_point) + mean, each step rounded to float32, saturated there, and the result
// rounded to out's type.
//
// Dealt out as attn/quantize_layout.cuh says, with tokens as units: a thread takes eight channels of kHeld tokens, and
// walks along tokens that are wider than its block.
// Bound: memory, one byte read and one element written per value; 8-byte loads, 16-byte stores.
#pragma once

#include "attn/quantize_layout.cuh"
#include "attn/quantize_round.cuh"
#include "attn/tokens.cuh"
#include "kernels/dequantize/config.h"
#include "ptx/tid.cuh"

namespace qf {
namespace dequantize {

constexpr float kLargest = 0x1.fffffep127f;  // 127 times a scale may round past it

struct Place {
  int token, h;
  bool inside;
};

__device__ __forceinline__ uint2 load_values(const int8_t* g_row, int d, int head_dim, bool vector) {
  if (vector) return *reinterpret_cast<const uint2*>(g_row + d);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (d + e < head_dim) words[e / 4] |= uint32_t(uint8_t(g_row[d + e])) << 8 * (e % 4);
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_vector(float* g, const Raw8<float>& raw) {
  reinterpret_cast<float4*>(g)[0] = raw.low, reinterpret_cast<float4*>(g)[1] = raw.high;
}
template <class T>
__device__ __forceinline__ void store_vector(T* g, const Raw8<T>& raw) {
  *reinterpret_cast<uint4*>(g) = raw.bits;
}

__device__ __forceinline__ void store8(Element* g_row, int d, int head_dim, bool vector, const float (&x)[8]) {
  Element y[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) from_float(x[e], y[e]);
  if (vector) {
    Raw8<Element> raw;
    pack8(raw, y);
    store_vector(g_row + d, raw);
    return;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (d + e < head_dim) g_row[d + e] = y[e];
}

}  // namespace dequantize
}  // namespace qf

__global__ void __launch_bounds__(qf::kQuantizeThreads, 3)
    qf_dequantize_kernel(const __grid_constant__ QfDequantizeParams p, const __grid_constant__ qf::Layout layout,
                         const __grid_constant__ qf::Divider group_of) {
  using namespace qf;
  using namespace qf::dequantize;
  const int b = blockIdx.x / layout.tiles, lane = threadIdx.x & (layout.row_lanes - 1);
  // Token and head in place i; derived from the thread's index wherever they are asked for, so that none is kept.
  const auto place = [&](int i) {
    const uint32_t slot =
        ((blockIdx.x % layout.tiles * kHeld + i) << layout.log_slots) + (fresh_tid() >> layout.log_unit);
    const uint32_t token = layout.heads(slot);
    return Place{int(token), int(slot - token * layout.heads.divisor), slot < layout.units};
  };
  const int zero_point = p.symmetric ? 0 : *p.zero_point;
  for (int d = 8 * lane; d < p.head_dim; d += 8 * layout.row_lanes) {
    uint2 raw[kHeld];
    float scale[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      raw[i] = make_uint2(0u, 0u);
      if (!at.inside) continue;
      const int8_t* g_row = static_cast<const int8_t*>(p.values.data) + b * p.values.stride_b +
                            at.token * p.values.stride_t + at.h * p.values.stride_h;
      raw[i] = load_values(g_row, d, p.head_dim, layout.vector);
      const int64_t group = (int64_t(b) * p.heads + at.h) * layout.groups + group_of(at.token);
      scale[i] = p.scale[p.granularity == QF_PER_TENSOR ? 0 : group];
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      if (!at.inside) continue;
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int value = int8_t((e < 4 ? raw[i].x : raw[i].y) >> 8 * (e % 4));
        x[e] = mul_rn(scale[i], float(value - zero_point));
        if (p.mean && d + e < p.head_dim)
          x[e] = add_rn(x[e], p.mean[(int64_t(b) * p.heads + at.h) * p.head_dim + d + e]);
        x[e] = x[e] > kLargest ? kLargest : x[e] < -kLargest ? -kLargest : x[e];  // NaN stays
        if (p.symmetric && value == -128) x[e] = nan();
      }
      Element* g_row =
          static_cast<Element*>(p.out.data) + b * p.out.stride_b + at.token * p.out.stride_t + at.h * p.out.stride_h;
      store8(g_row, d, p.head_dim, layout.vector, x);
    }
  }
}

namespace qf {

// Host side. QF_UNSUPPORTED: more tokens times heads, or more blocks, than 31 bits count.
inline int plan_dequantize(const QfDequantizeParams& p, Layout& layout) {
  layout = Layout{};
  layout.row_lanes = layout.unit_lanes = row_lanes(p.head_dim);
  layout.vector = vectorises8(p.out, p.values, p.head_dim, p.dtype == QF_F32 ? 4 : 2);
  layout.group = p.group;
  layout.groups = int(ceil_of(p.length, p.group));
  layout.parts = 1;
  deal(layout, p.length, p.heads, kHeld);
  return fits(p.length, layout, p.heads, p.batch) ? QF_OK : QF_UNSUPPORTED;
}

}  // namespace qf
