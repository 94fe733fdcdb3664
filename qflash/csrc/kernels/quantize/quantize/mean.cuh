// What smoothing subtracts: the mean of every channel over a sequence's finite tokens, always summed in the same order.
//
//   1 qf_quantize_sum_kernel   a team per (batch, chunk of kMeanChunk tokens, head) adds the chunk's tokens serially in
//                              float32
//   2 qf_quantize_mean_kernel  a thread per (batch, head, channel) adds the chunks serially in float64
#pragma once

#include "quant/layout.cuh"
#include "quant/round.cuh"
#include "quant/tokens.cuh"
#include "reduce/team.cuh"

namespace qf {

// In the workspace.
struct ChunkSums {
  float* sums;      // [batch, heads, chunks, head_dim]
  int32_t* finite;  // [batch, heads, chunks]: tokens that were added
  int chunks;
};

// Sums channels d .. d+7 of tokens begin .. end-1, at most kMeanChunk, except those in `skipped`. Returns which of the
// added tokens are nonfinite in these channels.
template <class Element, Moves kMoves>
__device__ __forceinline__ uint64_t sum_tokens(float (&sums)[8], const QfQuantizeParams& p, const Tokens& s, int b,
                                               int h, int begin, int end, int d, uint64_t skipped) {
  // Tokens in flight; a rotated one also loads partners, cosines and sines.
  constexpr int kAhead = kMoves == Moves::kVectors ? 8 : kMoves == Moves::kRotated ? 4 : 1;
  constexpr bool kVectors = kMoves != Moves::kSingly;
  uint64_t nonfinite = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) sums[e] = 0.0f;
#pragma unroll 1
  for (int t0 = begin; t0 < end; t0 += kAhead) {
    Raw8<Element> raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      raw[i] = Raw8<Element>{};
      if (t0 + i < end) raw[i] = load8(token_row<Element>(p, s, b, h, t0 + i), d, p.head_dim, kVectors);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int t = t0 + i;
      const uint64_t bit = uint64_t(1) << ((t - begin) & (kMeanChunk - 1));
      if (t >= end || (skipped & bit)) continue;
      float x[8];
      to_float8(x, raw[i]);
      if (kMoves != Moves::kVectors && p.rope.cos)
        rotate8(x, p.rope, token_row<Element>(p, s, b, h, t), d, p.head_dim, position_of(p, s, b, t), kVectors);
      uint32_t largest = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        largest = max(largest, magnitude(x[e]));
        sums[e] = add_rn(sums[e], x[e]);
      }
      if (largest >= kInfinityBits) nonfinite |= bit;
    }
  }
  return nonfinite;
}

}  // namespace qf

template <class Element, qf::Moves kMoves>
__global__ void __launch_bounds__(qf::kQuantizeThreads, kMoves == qf::Moves::kSingly ? 1 : 2)
    qf_quantize_sum_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::Layout layout,
                           const __grid_constant__ qf::ChunkSums chunks) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  const uint32_t b = layout.tiles(blockIdx.x), tile = blockIdx.x - b * layout.tiles.divisor;
  const int lane = threadIdx.x & (layout.row_lanes - 1);
  const uint32_t unit = (tile << layout.log_slots) + (threadIdx.x >> layout.log_row);
  const Tokens s = read_tokens(p, b);
  const uint32_t chunk = layout.heads(unit), h = unit - chunk * layout.heads.divisor;
  const int begin = int(chunk) * kMeanChunk, end = unit < layout.units ? min(begin + kMeanChunk, s.len) : begin;
  const int64_t row = (int64_t(b) * p.heads + h) * chunks.chunks + chunk;

  // Most chunks hold only finite numbers. One that does not is summed again without its nonfinite tokens.
  uint64_t skipped = 0;
  for (int round = 0; round < 2; ++round) {
    uint64_t nonfinite = 0;
    for (int d = 8 * lane; d < p.head_dim && begin < end; d += 8 * layout.row_lanes) {
      float sums[8];
      nonfinite |= sum_tokens<Element, kMoves>(sums, p, s, b, h, begin, end, d, skipped);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (d + e < p.head_dim) chunks.sums[row * p.head_dim + d + e] = sums[e];
    }
    uint32_t halves[2] = {uint32_t(nonfinite), uint32_t(nonfinite >> 32)};
    reduce_team(halves, 1, layout.row_lanes, reinterpret_cast<uint32_t*>(s_memory),
                [](uint32_t x, uint32_t y) { return x | y; });
    skipped |= halves[0] | uint64_t(halves[1]) << 32;
    if (!__syncthreads_or(skipped != 0)) break;
  }
  if (begin < end && lane == 0) {
    int finite = end - begin;
    for (; skipped; skipped &= skipped - 1) --finite;
    chunks.finite[row] = finite;
  }
}

__global__ void __launch_bounds__(qf::kQuantizeThreads)
    qf_quantize_mean_kernel(const __grid_constant__ QfQuantizeParams p, const __grid_constant__ qf::ChunkSums chunks) {
  using namespace qf;
  const int64_t channel = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  const int64_t row = channel / p.head_dim;  // of [batch, heads]
  if (row >= int64_t(p.batch) * p.heads) return;
  const Tokens s = read_tokens(p, int(row / p.heads));
  const float* g_sum = chunks.sums + row * chunks.chunks * p.head_dim + channel % p.head_dim;
  const int32_t* g_finite = chunks.finite + row * chunks.chunks;
  double total = 0.0;
  int finite = 0;
  const int count = (s.len + kMeanChunk - 1) / kMeanChunk;
#pragma unroll 8
  for (int chunk = 0; chunk < count; ++chunk) {
    total += double(g_sum[int64_t(chunk) * p.head_dim]);
    finite += g_finite[chunk];
  }
  const float mean = float(total / double(finite > 0 ? finite : 1));
  p.mean[channel] = magnitude(mean) < kInfinityBits ? mean : 0.0f;
  if (p.nonfinite && channel % p.head_dim == 0) p.nonfinite[row] = s.len - finite;
}
