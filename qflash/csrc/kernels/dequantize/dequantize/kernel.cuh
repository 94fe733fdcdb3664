// dequantize: out <- scale * (value - zero_point) + mean, each step rounded to float32, saturated there, and the result
// rounded to out's type.
//
// The work is distributed as in quant/layout.cuh, with kHeld tokens as a unit: a thread takes eight channels of each,
// and iterates along tokens that are wider than its block.
// Bound: memory, one byte read and one element written per value; 8-byte loads, 16-byte stores.
#pragma once

#include "kernels/dequantize/dequantize/config.h"
#include "quant/layout.cuh"
#include "quant/round.cuh"
#include "quant/tokens.cuh"

namespace qf {
namespace dequantize {

constexpr int kHeld = 4;                     // tokens of a thread
constexpr float kLargest = 0x1.fffffep127f;  // 127 times a scale may round past it

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
                         const __grid_constant__ qf::Divider group_of, bool vector) {
  using namespace qf;
  using namespace qf::dequantize;
  const uint32_t b = layout.tiles(blockIdx.x), tile = blockIdx.x - b * layout.tiles.divisor;
  const uint32_t unit = (tile << layout.log_slots) + (threadIdx.x >> layout.log_unit), part = layout.heads(unit);
  const int h = unit - part * layout.heads.divisor, token0 = part * kHeld;
  const int held = unit < layout.units ? min(p.length - token0, kHeld) : 0;
  const int64_t head = int64_t(b) * p.heads + h;
  const int zero_point = p.symmetric ? 0 : *p.zero_point;
  const int8_t* const g_values = static_cast<const int8_t*>(p.values.data) + b * p.values.stride_b +
                                 token0 * p.values.stride_t + h * p.values.stride_h;
  Element* const g_out =
      static_cast<Element*>(p.out.data) + b * p.out.stride_b + token0 * p.out.stride_t + h * p.out.stride_h;
  for (int d = 8 * (threadIdx.x & (layout.row_lanes - 1)); d < p.head_dim && held > 0; d += 8 * layout.row_lanes) {
    uint2 raw[kHeld];
    float scale[kHeld], mean[8];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      raw[i] = make_uint2(0u, 0u);
      scale[i] = 0.0f;
      if (i >= held) continue;
      raw[i] = load_values(g_values + i * p.values.stride_t, d, p.head_dim, vector);
      scale[i] = p.scale[p.granularity == QF_PER_TENSOR ? 0 : head * layout.scales + group_of(token0 + i)];
    }
    if (p.mean) {
#pragma unroll
      for (int e = 0; e < 8; ++e) mean[e] = d + e < p.head_dim ? p.mean[head * p.head_dim + d + e] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i >= held) continue;
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int value = int8_t((e < 4 ? raw[i].x : raw[i].y) >> 8 * (e % 4));
        x[e] = mul_rn(scale[i], float(value - zero_point));
        if (p.mean) x[e] = add_rn(x[e], mean[e]);
        x[e] = x[e] > kLargest ? kLargest : x[e] < -kLargest ? -kLargest : x[e];  // NaN stays
        if (p.symmetric && value == -128) x[e] = nan();
      }
      store8(g_out + i * p.out.stride_t, d, p.head_dim, vector, x);
    }
  }
}

namespace qf {

struct DequantizeGrid {
  Layout layout;
  Divider group_of;
  bool vector;
  int64_t blocks;
};

// Host side. QF_UNSUPPORTED: the number of tokens times heads, or of blocks, does not fit in 31 bits.
inline int find_grid(const QfDequantizeParams& p, DequantizeGrid& grid) {
  Layout& layout = grid.layout;
  layout = Layout{};
  layout.row_lanes = layout.unit_lanes = row_lanes(p.head_dim);
  grid.vector = vectorises8(p.out, p.values, p.head_dim, p.dtype == QF_F32 ? 4 : 2);
  layout.group = dequantize::kHeld;
  layout.scales = int(ceil_of(p.length, p.group));
  const int64_t outer = ceil_of(p.length, dequantize::kHeld);
  deal(layout, outer, p.heads);
  grid.group_of = divider(p.group);
  grid.blocks = tiles_of(outer, layout, p.heads) * p.batch;
  return fits(outer, layout, p.heads, p.batch) ? QF_OK : QF_UNSUPPORTED;
}

}  // namespace qf
