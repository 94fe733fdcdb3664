// Queries as INT8 pages want them: multiplied by the Hadamard matrix that K was multiplied by, which leaves q . k what
// it is and spreads what single channels hold, then rounded to int8 with a scale for each row.
#pragma once

#include "attn/decode/int8_config.cuh"
#include "ptx/max.cuh"
#include "quant/hadamard.cuh"
#include "quant/round.cuh"

namespace qf {
namespace decode {

// Of a row in shared memory: its scale, NaN where it is not finite, and its product, before it was rounded, with
// k_mean.
template <class Config>
__device__ __forceinline__ float query_scale(const char* s_queries, int row) {
  return reinterpret_cast<const float*>(s_queries + Config::kQueryScales)[row];
}
template <class Config>
__device__ __forceinline__ float query_dot_k_mean(const char* s_queries, int row) {
  return reinterpret_cast<const float*>(s_queries + Config::kQueryDots)[row];
}

// Does anybody ask for the products with k_mean? Weights do not depend on them, unless a softcap or a sink makes them.
__device__ __forceinline__ bool wants_dot_k_mean(const QfAttnParams& p) {
  return p.kv.k_mean && (p.lse || p.softcap != 0.0f || p.sinks);
}

// Sixteen channels of a row from g_chunk on. aligned: 16 bytes are read at a time.
template <class Element>
__device__ __forceinline__ void load16(float (&x)[16], const Element* g_chunk, bool aligned) {
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    const auto two = [&](int e) { return uint32_t(g_chunk[i + e].bits) | uint32_t(g_chunk[i + e + 1].bits) << 16; };
    const uint4 raw = aligned ? *reinterpret_cast<const uint4*>(g_chunk + i) : uint4{two(0), two(2), two(4), two(6)};
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) x[i + e] = to_float(Element{uint16_t(words[e / 2] >> 16 * (e % 2))});
  }
}

// x, whose largest magnitude in the row is `largest`, to sixteen bytes. x is four times the row: butterflies alone.
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

// The rows of a unit's queries into shared memory: zeros past the last row and channel. A lane takes sixteen channels.
// By whole warps: threads `thread` of `threads`. row_at(row): where a row that exists begins. aligned: rows are read 16
// bytes at a time. g_k_mean: of the KV head, or nullptr.
template <class Config, class RowAt>
__device__ __forceinline__ void quantize_queries(int rows, int head_dim, RowAt row_at, bool aligned,
                                                 const float* g_k_mean, char* s_queries, int thread, int threads) {
  constexpr int kLanes = Config::kByteChunks <= 4 ? 4 : Config::kByteChunks <= 8 ? 8 : 16;  // of a row
  constexpr int kAtOnce = 32 / kLanes;
  const int lane = thread % 32, part = lane % kLanes, column = 16 * part;
#pragma unroll 1
  for (int row0 = thread / 32 * kAtOnce; row0 < Config::kRows; row0 += threads / 32 * kAtOnce) {
    const int row = row0 + lane / kLanes;
    uint4 bytes = {0, 0, 0, 0};
    float scale = 0.0f, dot = 0.0f;
    if (row0 < rows) {  // the same for all lanes
      float x[16] = {};
      if (row < rows && column < head_dim) load16(x, row_at(row) + column, aligned);
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

// The same for one unit of arrays [batch, length, heads, head_dim]: row = token * group + head of the group.
template <class Config>
__device__ __forceinline__ void quantize_queries(const QfAttnParams& p, const QfTensor& x, int b, int kv_head,
                                                 bool aligned, char* s_queries, int thread, int threads) {
  using Element = typename Config::Element;
  const int group = p.q_heads / p.kv_heads;
  const auto row_at = [&](int row) {
    const int token = row / group, head = kv_head * group + row - token * group;
    return static_cast<const Element*>(x.data) + b * x.stride_b + token * x.stride_t + head * x.stride_h;
  };
  quantize_queries<Config>(p.q_len * group, p.head_dim, row_at, aligned,
                           wants_dot_k_mean(p) ? p.kv.k_mean + int64_t(kv_head) * p.head_dim : nullptr, s_queries,
                           thread, threads);
}

}  // namespace decode
}  // namespace qf
