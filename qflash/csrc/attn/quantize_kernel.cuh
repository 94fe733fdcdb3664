// The kernels that quantize: dealt out as quantize_layout.cuh says, defined to the bit by docs/kernels/quantize.md.
//
//   qf_quantize_kernel<kFound>      load, rotate, smooth | scales of what the threads hold | round, store
//   qf_quantize_amplitude_kernel    load, rotate, smooth | maxima -> slots: scales that more tokens share (a tensor's,
//   a qf_quantize_kernel<kGiven>      long group's) take a pass of their own before that
//
// Amplitudes are maxima of integers, so no order of threads or blocks can change them.
// Registers: 64 floats of x and, while they are on their way, their raw bits: at most 128, two blocks per
// multiprocessor with kHeld 16-byte loads in flight per thread. Bound: memory, one read of x and one byte written per
// element.
#pragma once

#include "attn/quantize_share.cuh"
#include "ptx/tid.cuh"

namespace qf {

// What the first of two passes finds out about one scale's tokens; zeros to begin with.
struct alignas(16) Slot {
  uint32_t key;           // symmetric: the largest token_key
  uint32_t above, below;  // asymmetric: bits of the largest x and of the largest -x, at least 0
  uint32_t wild;          // asymmetric: 1 when a token is not finite
};

__device__ __forceinline__ Scale scale_of(const Slot& slot, bool symmetric) {
  if (symmetric) return symmetric_scale(slot.key);
  return asymmetric_scale(bits_to_float(slot.above), bits_to_float(slot.below), slot.wild == 0);
}

__device__ __forceinline__ void raise(uint32_t* g_maximum, uint32_t value) {
  if (value > *g_maximum) atomicMax(g_maximum, value);
}

enum class Scales { kFound, kGiven };

// 128 registers for a thread that rotates or walks, 80 for one that does not.
constexpr int blocks_per_multiprocessor(Unit unit, bool rope) { return rope || unit == Unit::kWideToken ? 2 : 3; }

}  // namespace qf

// Slots, and with them every scale and zero point, to what an empty tensor has.
__global__ void __launch_bounds__(qf::kQuantizeThreads)
    qf_quantize_clear_kernel(const __grid_constant__ QfQuantizeParams p, qf::Slot* g_slots, int64_t slots) {
  const int64_t i = int64_t(blockIdx.x) * qf::kQuantizeThreads + threadIdx.x;
  if (i >= slots) return;
  g_slots[i] = {0, 0, 0, 0};
  p.scale[i] = 0.0f;
  if (!p.symmetric) *p.zero_point = 0;
}

// Blocks take tile after tile, so that few of them meet at a tensor's one slot.
template <class Element, qf::Unit kUnit, bool kRope>
__global__ void __launch_bounds__(qf::kQuantizeThreads, qf::blocks_per_multiprocessor(kUnit, kRope))
    qf_quantize_amplitude_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::Layout layout,
                                 qf::Slot* g_slots) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  uint32_t* const s_scratch = reinterpret_cast<uint32_t*>(s_memory);
  const bool per_tensor = p.granularity == QF_PER_TENSOR;
  uint32_t extent[4] = {};  // a Slot
  for (int64_t item = blockIdx.x; item < int64_t(p.batch) * layout.tiles; item += gridDim.x) {
    const int b = int(item / layout.tiles);
    const Share<Element, kUnit, kRope> share(p, layout, read_tokens(p, b), b, uint32_t(item % layout.tiles),
                                             fresh_tid());
    float x[kHeld][8];
    uint32_t largest[kHeld] = {};
    for (int piece = 0; piece < share.pieces(); ++piece) {
      share.load(x, piece);
      if (p.smooth) share.smooth(x, piece);
      take_largest(largest, x);
      if (p.symmetric) continue;
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          extent[1] = larger(extent[1], float_to_bits(fmaxf(x[i][e], 0.0f)));
          extent[2] = larger(extent[2], float_to_bits(fmaxf(-x[i][e], 0.0f)));
        }
    }
    uint32_t keys[kHeld];
    share.keys_of(keys, largest, s_scratch);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      extent[0] = larger(extent[0], keys[i]);
      extent[3] |= keys[i] == kNotFinite;
    }
    if (per_tensor) continue;
    uint32_t key[1] = {extent[0]};
    reduce_team(key, layout.row_lanes, layout.unit_lanes, s_scratch, larger);
    if (share.unit < layout.units && (threadIdx.x & (layout.unit_lanes - 1)) == 0)
      raise(&g_slots[share.scale_index(share.place(0))].key, key[0]);
    extent[0] = kNoToken;
  }
  if (!per_tensor) return;
  reduce_team(extent, 1, kQuantizeThreads, s_scratch, larger);
  if (threadIdx.x != 0) return;
  raise(&g_slots->key, extent[0]);
  raise(&g_slots->above, extent[1]);
  raise(&g_slots->below, extent[2]);
  raise(&g_slots->wild, extent[3]);
}

template <class Element, qf::Unit kUnit, bool kRope, qf::Scales kScales>
__global__ void __launch_bounds__(qf::kQuantizeThreads, qf::blocks_per_multiprocessor(kUnit, kRope))
    qf_quantize_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::Layout layout,
                       const qf::Slot* g_slots) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  uint32_t* const s_scratch = reinterpret_cast<uint32_t*>(s_memory);
  const int b = blockIdx.x / layout.tiles;
  const uint32_t tile = blockIdx.x % layout.tiles;
  const Tokens tokens = read_tokens(p, b);

  float x[kHeld][8];
  uint32_t keys[kHeld];
  {
    const Share<Element, kUnit, kRope> share(p, layout, tokens, b, tile, fresh_tid());
    uint32_t largest[kHeld] = {};
    for (int piece = 0; piece < share.pieces(); ++piece) {
      share.load(x, piece);
      if (kUnit != Unit::kWideToken && p.lift) share.store_lift(x, reinterpret_cast<float*>(s_memory));
      if (p.smooth) share.smooth(x, piece);
      take_largest(largest, x);
    }
    share.keys_of(keys, largest, s_scratch);
  }

  // Derived once more from the thread's index, so that no address is kept in a register while x is.
  const Share<Element, kUnit, kRope> share(p, layout, tokens, b, tile, fresh_tid());
  // One scale for all that the thread holds, unless that is tokens with scales of their own.
  Scale scale;
  if (kScales == Scales::kGiven) {
    const bool used = share.unit < layout.units;
    const int64_t index = used ? share.scale_index(share.place(0)) : 0;
    scale = scale_of(g_slots[index], p.symmetric);
    const bool first = p.granularity == QF_PER_TENSOR ? blockIdx.x == 0 : used && share.token0 == 0 && share.lane == 0;
    if (first && (p.granularity != QF_PER_TENSOR || threadIdx.x == 0)) {
      p.scale[index] = scale.scale;
      if (!p.symmetric) *p.zero_point = int32_t(scale.zero_point);
    }
  } else if (kUnit != Unit::kToken) {
    uint32_t key[1] = {kNoToken};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) key[0] = larger(key[0], keys[i]);
    reduce_team(key, layout.row_lanes, layout.unit_lanes, s_scratch, larger);
    scale = symmetric_scale(key[0]);
    if (share.unit < layout.units && (threadIdx.x & (layout.unit_lanes - 1)) == 0)
      p.scale[share.scale_index(share.place(0))] = scale.scale;
  }

  const Rounding rounding = rounding_of(p);
  const uint32_t wild_bytes = p.symmetric ? 0x80808080u : 0u;
  int32_t sums[kHeld] = {};
  for (int piece = 0; piece < share.pieces(); ++piece) {
    if (share.pieces() > 1) {
      share.load(x, piece);
      if (p.smooth) share.smooth(x, piece);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const auto at = share.place(i);
      const int d = share.channel(i, piece);
      if (kScales == Scales::kFound && kUnit == Unit::kToken) {
        scale = symmetric_scale(keys[i]);
        if (at.inside && share.lane == 0) p.scale[share.scale_index(at)] = scale.scale;
      }
      uint2 bytes = make_uint2(0u, 0u);
      if (keys[i] == kNotFinite)
        bytes = make_uint2(wild_bytes, wild_bytes);
      else if (keys[i] != kNoToken)
        bytes = round8(x[i], scale, rounding, share.element_of(at) + d);
      share.store_values(at, d, bytes);
      if (p.sums) sums[kUnit == Unit::kWideToken ? 0 : i] += sum_bytes(bytes, p.head_dim - d);
    }
  }
  if (p.sums) share.store_sums(sums, reinterpret_cast<int32_t*>(s_memory));
}
