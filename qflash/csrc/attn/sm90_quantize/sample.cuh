// A sample of a head's keys, at most kSampled of them: the mean of K, which every key loses, and the scale of V.
//
// A block per head and tensor: kSlots threads to a chunk of eight channels, each with every kSlots-th sampled token.
// K's tokens are added one after another in a slot, then the slots: the order is the definition's, not the grid's.
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

template <int kHeadDim>
struct Sample {
  static constexpr int kEach = kSampled / kSlots;  // sampled tokens of a thread, at most
  int chunk, slot, step, count;

  __device__ __forceinline__ explicit Sample(int len)
      : chunk(threadIdx.x % Shape<kHeadDim>::kChunks),
        slot(threadIdx.x / Shape<kHeadDim>::kChunks),
        step((len + kSampled - 1) / kSampled),
        count(step > 0 ? (len + step - 1) / step : 0) {}
  __device__ __forceinline__ int index(int i) const { return slot + i * kSlots; }
};

template <class Element, int kHeadDim>
__device__ __forceinline__ void load_sample(Raw8<Element> (&raw)[Sample<kHeadDim>::kEach],
                                            const Sample<kHeadDim>& sample, const Element* g_rows, int64_t stride_t,
                                            int head_dim, bool vector) {
#pragma unroll
  for (int i = 0; i < sample.kEach; ++i) {
    raw[i] = Raw8<Element>{};
    if (sample.index(i) < sample.count)
      raw[i] = load8(g_rows + int64_t(sample.index(i)) * sample.step * stride_t, 8 * sample.chunk, head_dim, vector);
  }
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void sample_keys(const QuantizeAll& all, const Deal& deal, int b, int h, float* s_memory) {
  using S = Shape<kHeadDim>;
  const QfAttnParams& p = all.attn;
  const KeyRows s = read_key_rows(p, b);
  const Sample<kHeadDim> sample(s.len);
  const Element* const g_rows = row_of<Element>(p.k, b, s.first, h);
  Raw8<Element> raw[sample.kEach];
  load_sample(raw, sample, g_rows, p.k.stride_t, p.head_dim, deal.vector);
  float sum[8] = {};
  int finite_tokens = 0;
#pragma unroll
  for (int i = 0; i < sample.kEach; ++i) {
    const bool exists = sample.index(i) < sample.count;
    const int token = sample.index(i) * sample.step;
    float x[8], largest = 0.0f;
    to_float8(x, raw[i]);
    if (p.rope.cos && exists)
      rotate8(x, p.rope, g_rows + token * p.k.stride_t, 8 * sample.chunk, p.head_dim,
              position_k(p.rope, b, s.first, token), deal.vector && deal.table_vectors);
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = max_nan(largest, fabsf(x[e]));
    // Bits of the lanes that have this token.
    const int first = threadIdx.x % 32 / S::kChunks * S::kChunks;
    const uint32_t lanes = (S::kChunks == 32 ? ~0u : (1u << S::kChunks % 32) - 1) << first;
    const bool finite = (__ballot_sync(0xffffffffu, !is_finite(largest)) & lanes) == 0;
    finite_tokens += exists && finite;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = add_rn(sum[e], finite ? x[e] : 0.0f);
  }
  float* const s_sums = s_memory;  // [kSlots][kHeadDim], then [kSlots] counts
  int* const s_counts = reinterpret_cast<int*>(s_memory + kSlots * kHeadDim);
#pragma unroll
  for (int e = 0; e < 8; ++e) s_sums[sample.slot * kHeadDim + 8 * sample.chunk + e] = sum[e];
  if (sample.chunk == 0) s_counts[sample.slot] = finite_tokens;
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
  const Sample<kHeadDim> sample(s.len);
  Raw8<Element> raw[sample.kEach];
  load_sample(raw, sample, row_of<Element>(p.v, b, s.first, h), p.v.stride_t, p.head_dim, deal.vector);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < sample.kEach; ++i) {
    const uint32_t words[4] = {raw[i].bits.x, raw[i].bits.y, raw[i].bits.z, raw[i].bits.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t magnitude = words[e / 2] >> 16 * (e % 2) & 0x7fffu;
      if (magnitude < infinity_bits(Element{})) largest = greater(largest, magnitude);
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
