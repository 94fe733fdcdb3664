// Queries as INT8 pages require them: multiplied by the same Hadamard matrix as K, which leaves q . k unchanged and
// spreads large values of single channels, then rounded to int8 with one scale per row.
#pragma once

#include "attn/decode/int8_config.cuh"
#include "ptx/max.cuh"
#include "quant/hadamard.cuh"
#include "quant/round.cuh"

namespace qf {
namespace decode {

// Of a row in shared memory: its scale (NaN for a nonfinite row), and its product with k_mean, computed before
// rounding.
template <class Config>
__device__ __forceinline__ float query_scale(const char* s_queries, int row) {
  return reinterpret_cast<const float*>(s_queries + Config::kQueryScales)[row];
}
template <class Config>
__device__ __forceinline__ float query_dot_k_mean(const char* s_queries, int row) {
  return reinterpret_cast<const float*>(s_queries + Config::kQueryDots)[row];
}

// Are the products with k_mean needed? Weights do not depend on them, except with a softcap or a sink.
__device__ __forceinline__ bool wants_dot_k_mean(const QfAttnParams& p) {
  return p.kv.k_mean && (p.lse || p.softcap != 0.0f || p.sinks);
}

// Rounds x, whose largest magnitude in the row is `largest`, to sixteen bytes. x is four times the row: it went only
// through butterflies, without normalisation.
__device__ __forceinline__ uint4 round16(const float (&x)[16], float largest, float& scale) {
  const bool finite = largest < infinity(), zero = largest < 4.0f * kNoAmplitude;
  scale = !finite ? nan() : zero ? 0.0f : div_rn(0.25f * largest, 127.0f);
  const float inverse = !finite || zero ? 0.0f : div_rn(127.0f, largest);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bits[e] = float_to_bits(fmaf(x[4 * i + e], inverse, kIntegerInLowBits));
    words[i] = pack_low_bytes(bits[0], bits[1], bits[2], bits[3]);
  }
  return finite ? uint4{words[0], words[1], words[2], words[3]} : uint4{0, 0, 0, 0};
}

// Quantizes the rows of a unit's queries into shared memory: zeros past the last row and channel. A lane takes sixteen
// channels. Called by whole warps: threads `thread` of `threads`. row_at(row): a row that exists (queries.cuh).
// g_k_mean: of the KV head, or nullptr.
template <class Config, class RowAt>
__device__ __forceinline__ void quantize_queries(int rows, int head_dim, RowAt row_at, const float* g_k_mean,
                                                 char* s_queries, int thread, int threads) {
  constexpr int kLanes = Config::kByteChunks <= 4 ? 4 : Config::kByteChunks <= 8 ? 8 : 16;  // per row
  constexpr int kAtOnce = 32 / kLanes;
  const int lane = thread % 32, part = lane % kLanes, column = 16 * part;
#pragma unroll 1
  for (int row0 = thread / 32 * kAtOnce; row0 < Config::kRows; row0 += threads / 32 * kAtOnce) {
    const int row = row0 + lane / kLanes;
    uint4 bytes = {0, 0, 0, 0};
    float scale = 0.0f, dot = 0.0f;
    if (row0 < rows) {  // the same for all lanes
      float x[16] = {};
      if (row < rows && column < head_dim) (row_at(row) + column).load(x);
      if (g_k_mean) {
        if (column < head_dim) {
#pragma unroll
          for (int i = 0; i < 16; ++i)
            if (!Config::kKept || column + i < head_dim) dot = fmaf(x[i], g_k_mean[column + i], dot);
        }
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      }
      hadamard(x);
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) largest = max_nan(largest, fabsf(x[i]));
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2)
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      bytes = round16(x, largest, scale);
    }
    if (part < Config::kByteChunks)
      *reinterpret_cast<uint4*>(s_queries + Swizzle<Config::kByteChunks>::offset(row, part)) = bytes;
    if (part == 0) {
      reinterpret_cast<float*>(s_queries + Config::kQueryScales)[row] = scale;
      reinterpret_cast<float*>(s_queries + Config::kQueryDots)[row] = dot;
    }
  }
}

}  // namespace decode
}  // namespace qf
