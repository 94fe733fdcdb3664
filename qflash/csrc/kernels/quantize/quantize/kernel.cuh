// The quantization kernels: distributed over threads by quant/layout.cuh, defined bit for bit by
// docs/kernels/quantize.md.
//
//   qf_quantize_kernel<kFound>      load, rotate, smooth | scales of what the threads hold | round, store
//
// Scales that more tokens share (of a tensor, of a long group) need a separate pass before that:
//
//   qf_quantize_amplitude_kernel    load, rotate, smooth | maxima -> slots
//   qf_quantize_kernel<kGiven>      load, rotate, smooth | scales of the slots | round, store
//
// Amplitudes are maxima of integers, so no order of threads or blocks can change them.
// Registers: 64 floats of x and, while loads are in flight, their raw bits: at most 128, two blocks per SM with kHeld
// 16-byte loads in flight per thread. Bound: memory, one read of x and one byte written per element.
#pragma once

#include "ptx/tid.cuh"
#include "quant/share.cuh"

namespace qf {

// The result of the first of two passes for the tokens of one scale; initially zeros.
struct alignas(16) Slot {
  uint32_t key;           // symmetric: the largest token_key
  uint32_t above, below;  // asymmetric: bits of the largest x and of the largest -x, at least 0
  uint32_t nonfinite;     // asymmetric: 1 if a token is nonfinite
};

__device__ __forceinline__ Scale scale_of(const Slot& slot, bool symmetric) {
  if (symmetric) return symmetric_scale(slot.key);
  return asymmetric_scale(bits_to_float(slot.above), bits_to_float(slot.below), slot.nonfinite == 0);
}

__device__ __forceinline__ void raise(uint32_t* g_maximum, uint32_t value) {
  if (value > *g_maximum) atomicMax(g_maximum, value);
}

enum class Scales { kFound, kGiven };

}  // namespace qf

// Sets slots, and with them every scale and zero point, to the values of an empty tensor.
__global__ void __launch_bounds__(qf::kQuantizeThreads)
    qf_quantize_clear_kernel(const __grid_constant__ QfQuantizeParams p, qf::Slot* g_slots, int64_t slots) {
  const int64_t i = int64_t(blockIdx.x) * qf::kQuantizeThreads + threadIdx.x;
  if (i >= slots) return;
  g_slots[i] = {0, 0, 0, 0};
  p.scale[i] = 0.0f;
  if (!p.symmetric) *p.zero_point = 0;
}

// Blocks iterate over tiles, so that few of them contend for a tensor's only slot.
template <class Element, qf::Unit kUnit, qf::Moves kMoves>
__global__ void __launch_bounds__(qf::kQuantizeThreads, 2)
    qf_quantize_amplitude_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::Layout layout,
                                 qf::Slot* g_slots) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  uint32_t* const s_scratch = reinterpret_cast<uint32_t*>(s_memory);
  constexpr int kHeld = kPlaces<kUnit, kMoves>;
  const bool per_tensor = p.granularity == QF_PER_TENSOR;
  uint32_t extent[4] = {};  // a Slot
  for (uint32_t index = blockIdx.x; index < p.batch * layout.tiles.divisor; index += gridDim.x) {
    const uint32_t b = layout.tiles(index), tile = index - b * layout.tiles.divisor;
    const Share<Element, kUnit, kMoves> share(p, layout, read_tokens(p, b), b, tile, fresh_tid());
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
    if (share.inside > 0 && (threadIdx.x & (layout.unit_lanes - 1)) == 0)
      raise(&g_slots[share.scale_index(0)].key, key[0]);
    extent[0] = kNoToken;
  }
  if (!per_tensor) return;
  reduce_team(extent, 1, kQuantizeThreads, s_scratch, larger);
  if (threadIdx.x != 0) return;
  raise(&g_slots->key, extent[0]);
  raise(&g_slots->above, extent[1]);
  raise(&g_slots->below, extent[2]);
  raise(&g_slots->nonfinite, extent[3]);
}

namespace qf {

// Rounds what a thread holds, stores the integers and adds up their sums.
template <bool kPlain, class Element, Unit kUnit, Moves kMoves, int kHeld>
__device__ __forceinline__ void round_and_store(const Share<Element, kUnit, kMoves>& share, const float (&x)[kHeld][8],
                                                const uint32_t (&keys)[kHeld], Scale scale, int piece,
                                                bool scales_of_tokens, int32_t (&sums)[kHeld]) {
  const QfQuantizeParams& p = share.p;
  int8_t* const g_row = share.values_row();
  const int64_t step = share.values_step();
  const uint32_t nonfinite_bytes = p.symmetric ? 0x80808080u : 0u;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int d = share.channel(i, piece);
    if (kUnit == Unit::kToken && scales_of_tokens) {
      scale = symmetric_scale(keys[i]);
      if (i < share.inside && share.lane == 0) p.scale[share.scale_index(i)] = scale.scale;
    }
    uint2 bytes = round8<kPlain, kMoves != Moves::kSingly>(x[i], scale, p, kPlain ? 0 : share.element_of(i) + d);
    if (keys[i] < kFinite) {
      bytes.x = keys[i] == kNotFinite ? nonfinite_bytes : 0u;
      bytes.y = bytes.x;
    }
    share.store_values(g_row + i * step, i, d, bytes);
    if (p.sums) sums[Share<Element, kUnit, kMoves>::kPieces ? 0 : i] += sum_bytes(bytes, p.head_dim - d);
  }
}

}  // namespace qf

template <class Element, qf::Unit kUnit, qf::Moves kMoves, qf::Scales kScales>
__global__ void __launch_bounds__(qf::kQuantizeThreads, 2)
    qf_quantize_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::Layout layout,
                       const qf::Slot* g_slots) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  uint32_t* const s_scratch = reinterpret_cast<uint32_t*>(s_memory);
  constexpr int kHeld = kPlaces<kUnit, kMoves>;
  const uint32_t b = layout.tiles(blockIdx.x), tile = blockIdx.x - b * layout.tiles.divisor;
  const Tokens tokens = read_tokens(p, b);

  float x[kHeld][8];
  uint32_t keys[kHeld];
  {
    const Share<Element, kUnit, kMoves> share(p, layout, tokens, b, tile, fresh_tid());
    uint32_t largest[kHeld] = {};
    for (int piece = 0; piece < share.pieces(); ++piece) {
      share.load(x, piece);
      if (kUnit != Unit::kWideToken && p.q_dot_mean) share.store_q_dot_mean(x, reinterpret_cast<float*>(s_memory));
      if (p.smooth) share.smooth(x, piece);
      take_largest(largest, x);
    }
    share.keys_of(keys, largest, s_scratch);
  }

  // Recomputed from the thread's index, so that no address occupies a register while x does.
  const Share<Element, kUnit, kMoves> share(p, layout, tokens, b, tile, fresh_tid());
  // One scale for all that the thread holds, unless each of its tokens has its own.
  Scale scale;
  if (kScales == Scales::kGiven) {
    const int64_t index = share.inside > 0 ? share.scale_index(0) : 0;
    scale = scale_of(g_slots[index], p.symmetric);
    const bool first = p.granularity == QF_PER_TENSOR
                           ? blockIdx.x + threadIdx.x == 0
                           : share.first_part && share.inside > 0 && (threadIdx.x & (layout.unit_lanes - 1)) == 0;
    if (first) {
      p.scale[index] = scale.scale;
      if (!p.symmetric) *p.zero_point = int32_t(scale.zero_point);
    }
  } else if (kUnit != Unit::kToken) {
    uint32_t key[1] = {kNoToken};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) key[0] = larger(key[0], keys[i]);
    reduce_team(key, layout.row_lanes, layout.unit_lanes, s_scratch, larger);
    scale = symmetric_scale(key[0]);
    if (share.inside > 0 && (threadIdx.x & (layout.unit_lanes - 1)) == 0) p.scale[share.scale_index(0)] = scale.scale;
  }

  const bool plain = p.symmetric && p.rounding == QF_NEAREST;
  int32_t sums[kHeld] = {};
  for (int piece = 0; piece < share.pieces(); ++piece) {
    if (share.pieces() > 1) {
      share.load(x, piece);
      if (p.smooth) share.smooth(x, piece);
    }
    if (plain)
      round_and_store<true>(share, x, keys, scale, piece, kScales == Scales::kFound, sums);
    else
      round_and_store<false>(share, x, keys, scale, piece, kScales == Scales::kFound, sums);
  }
  if (p.sums) share.store_sums(sums, reinterpret_cast<int32_t*>(s_memory));
}
