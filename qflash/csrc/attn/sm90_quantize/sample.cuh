// A sample of a head's keys, at most kSampled of them: the mean of K, which every key loses, and the scale of V.
//
// A block per head and tensor. Every kSlots-th sampled token belongs to one slot, and a thread has eight channels of a
// slot's tokens (of head_dim 256, of two slots' one after the other: registers). K's tokens are added one after another
// in a slot, then the slots: the order is the definition's, not the grid's.
#pragma once

#include "attn/sm90_quantize/tokens.cuh"
#include "attn/sm90_quantize/values.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qf {
namespace sm90_quantize {

// 2^e with the amplitude in (2^(e+4), 2^(e+5)], e such that 2^e and 2^-e are normal numbers; as if it were 1 when 0.
__device__ __forceinline__ float value_scale(float amplitude) {
  const uint32_t bits = amplitude == 0.0f ? float_to_bits(1.0f) : float_to_bits(amplitude);
  const int exponent = int(bits >> 23) - 127 + int((bits & 0x7fffffu) != 0) - 5;
  return bits_to_float(uint32_t(127 + min(max(exponent, -126), 126)) << 23);
}

// The sampled tokens of one slot, and which channels of them are this thread's.
template <int kHeadDim>
struct Sample {
  using S = Shape<kHeadDim>;
  static constexpr int kEach = kSampled / kSlots;  // tokens at most
  static constexpr int kPasses = kSlots * S::kChunks / S::kSampleThreads;
  int chunk, slot, step, count;

  __device__ __forceinline__ Sample(int len, int pass)
      : chunk(threadIdx.x % S::kChunks),
        slot((threadIdx.x + pass * S::kSampleThreads) / S::kChunks),
        step((len + kSampled - 1) / kSampled),
        count(step > 0 ? (len + step - 1) / step : 0) {}
  __device__ __forceinline__ int index(int i) const { return slot + i * kSlots; }
  __device__ __forceinline__ bool exists(int i) const { return index(i) < count; }
};

template <class Element, int kHeadDim>
__device__ __forceinline__ void load_sample(Raw8<Element> (&raw)[Sample<kHeadDim>::kEach],
                                            const Sample<kHeadDim>& sample, const Element* g_rows, int64_t stride_t,
                                            int head_dim, bool vector) {
#pragma unroll
  for (int i = 0; i < sample.kEach; ++i) {
    raw[i] = Raw8<Element>{};
    if (sample.exists(i))
      raw[i] = load8(g_rows + int64_t(sample.index(i)) * sample.step * stride_t, 8 * sample.chunk, head_dim, vector);
  }
}

// Adds x, eight channels of a token, to a slot's sum unless the token is not finite. Returns whether it is.
template <int kChunks>
__device__ __forceinline__ bool add_finite(float (&sum)[8], const float (&x)[8]) {
  float largest = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) largest = max_nan(largest, fabsf(x[e]));
  // Bits of the lanes that have this token.
  const uint32_t lanes = ~0u >> (32 - kChunks) << threadIdx.x % 32 / kChunks * kChunks;
  const bool finite = (__ballot_sync(0xffffffffu, !is_finite(largest)) & lanes) == 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] = add_rn(sum[e], finite ? x[e] : 0.0f);
  return finite;
}

// The sum of a slot's tokens that are finite; returns how many they are.
template <bool kTurned, class Element, int kHeadDim>
__device__ __forceinline__ int sum_slot(float (&sum)[8], const QfAttnParams& p, const Deal& deal, int b,
                                        const KeyRows& s, const Element* g_rows, const Sample<kHeadDim>& sample) {
  constexpr int kChunks = Shape<kHeadDim>::kChunks;
  int count = 0;
  float x[8];
  if constexpr (kTurned) {
#pragma unroll 1
    for (int i = 0; i < sample.kEach; ++i) {
      const int token = sample.index(i) * sample.step, d = 8 * sample.chunk;
      const Element* const g_row = g_rows + token * p.k.stride_t;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = 0.0f;
      if (sample.exists(i)) {
        to_float8(x, load8(g_row, d, p.head_dim, deal.vector));
        rotate8(x, p.rope, g_row, d, p.head_dim, position_k(p.rope, b, s.first, token),
                deal.vector && deal.table_vectors);
      }
      count += add_finite<kChunks>(sum, x) && sample.exists(i);
    }
  } else {
    Raw8<Element> raw[sample.kEach];
    load_sample(raw, sample, g_rows, p.k.stride_t, p.head_dim, deal.vector);
#pragma unroll
    for (int i = 0; i < sample.kEach; ++i) {
      to_float8(x, raw[i]);
      count += add_finite<kChunks>(sum, x) && sample.exists(i);
    }
  }
  return count;
}

template <class Element, int kHeadDim, bool kTurned>
__device__ __forceinline__ void sample_keys(const QuantizeAll& all, const Deal& deal, int b, int h, float* s_memory) {
  const QfAttnParams& p = all.attn;
  const KeyRows s = read_key_rows(p, b);
  const Element* const g_rows = row_of<Element>(p.k, b, s.first, h);
  float* const s_sums = s_memory;  // [kSlots][kHeadDim], then [kSlots] counts
  int* const s_counts = reinterpret_cast<int*>(s_memory + kSlots * kHeadDim);
#pragma unroll 1
  for (int pass = 0; pass < Sample<kHeadDim>::kPasses; ++pass) {
    const Sample<kHeadDim> sample(s.len, pass);
    float sum[8] = {};
    const int count = sum_slot<kTurned>(sum, p, deal, b, s, g_rows, sample);
#pragma unroll
    for (int e = 0; e < 8; ++e) s_sums[sample.slot * kHeadDim + 8 * sample.chunk + e] = sum[e];
    if (sample.chunk == 0) s_counts[sample.slot] = count;
  }
  __syncthreads();

  const int64_t head = int64_t(b) * p.kv_heads + h;
  if (threadIdx.x == 0) all.kv.k_wild[head] = 0;
  const int d = threadIdx.x;
  if (d >= p.head_dim) return;
  float total = 0.0f;
  int count = 0;
#pragma unroll 8
  for (int slot = 0; slot < kSlots; ++slot) {
    total = add_rn(total, s_sums[slot * kHeadDim + d]);
    count += s_counts[slot];
  }
  const float mean = count > 0 ? div_rn(total, float(count)) : 0.0f;
  all.kv.k_mean[head * p.head_dim + d] = is_finite(fabsf(mean)) ? mean : 0.0f;
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void sample_values(const QuantizeAll& all, const Deal& deal, int b, int h,
                                              uint32_t* s_memory) {
  const QfAttnParams& p = all.attn;
  const KeyRows s = read_key_rows(p, b);
  const Element* const g_rows = row_of<Element>(p.v, b, s.first, h);
  uint32_t largest = 0;
#pragma unroll 1
  for (int pass = 0; pass < Sample<kHeadDim>::kPasses; ++pass) {
    const Sample<kHeadDim> sample(s.len, pass);
    Raw8<Element> raw[sample.kEach];
    load_sample(raw, sample, g_rows, p.v.stride_t, p.head_dim, deal.vector);
#pragma unroll
    for (int i = 0; i < sample.kEach; ++i) {
      const uint32_t words[4] = {raw[i].bits.x, raw[i].bits.y, raw[i].bits.z, raw[i].bits.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const uint32_t magnitude = words[e / 2] >> 16 * (e % 2) & 0x7fffu;
        if (magnitude < infinity_bits(Element{})) largest = greater(largest, magnitude);
      }
    }
  }
  largest = largest_of_block<Shape<kHeadDim>::kSampleThreads / 32>(largest, s_memory);
  if (threadIdx.x != 0) return;
  const int64_t head = int64_t(b) * p.kv_heads + h;
  all.kv.v_scale[head] = value_scale(to_float(Element{uint16_t(largest)}));
  all.kv.v_wild[head] = 0;
}

}  // namespace sm90_quantize
}  // namespace qf
