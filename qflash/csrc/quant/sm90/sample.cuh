// A sample of a head's keys, at most kSampled of them: gives the means of K and of V, which are subtracted from every
// key and value, and the scale of what is left of V.
//
// One block per head and tensor. Every kSlots-th sampled token belongs to one slot, and a thread has eight channels of
// a slot's tokens (at head_dim 256, of two slots in sequence, to save registers). Tokens are added in order within a
// slot, then the slots: the order is given by the definition, not by the grid.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "quant/sm90/tokens.cuh"
#include "quant/sm90/values.cuh"

namespace qf {
namespace sm90_quantize {

// A mean of V is not subtracted if the magnitude of the sum over all slots is less than this fraction of the sum of
// their magnitudes: it may belong to the sample alone, off by a sixteenth of the spread, and values without a mean are
// better left alone.
constexpr float kLeastAgreement = 0.625f;
// Nor is a mean of this magnitude or more: values that are finite in 16 bits would not stay finite.
constexpr float kMostMean = 0x1p119f;

// 2^e with the amplitude in (2^(e+4), 2^(e+5)], with e such that 2^e and 2^-e are normal numbers; an amplitude of 0
// counts as 1.
__device__ __forceinline__ float value_scale(float amplitude) {
  const uint32_t bits = amplitude == 0.0f ? float_to_bits(1.0f) : float_to_bits(amplitude);
  const int exponent = int(bits >> 23) - 127 + int((bits & 0x7fffffu) != 0) - 5;
  return bits_to_float(uint32_t(127 + min(max(exponent, -126), 126)) << 23);
}

constexpr uint32_t kTwoNans = 0x7fff7fffu;  // in either type

// The sampled tokens of one slot, and this thread's channels of them.
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

// Tokens that do not exist are NaN: like nonfinite ones, they do not count.
template <class Element, int kHeadDim>
__device__ __forceinline__ void load_sample(Raw8<Element> (&raw)[Sample<kHeadDim>::kEach],
                                            const Sample<kHeadDim>& sample, const Element* g_rows, int64_t stride_t,
                                            int head_dim, bool vector) {
#pragma unroll
  for (int i = 0; i < sample.kEach; ++i) {
    raw[i].bits = make_uint4(kTwoNans, kTwoNans, kTwoNans, kTwoNans);
    if (sample.exists(i))
      raw[i] = load8(g_rows + int64_t(sample.index(i)) * sample.step * stride_t, 8 * sample.chunk, head_dim, vector);
  }
}

// Adds x, eight channels of a token, to a slot's sum unless the token is nonfinite. Returns whether it is finite.
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

// The sum of a slot's finite tokens; returns their number. see(raw, finite): called for every token, unless it is
// rotated.
template <bool kRotated, class Element, int kHeadDim, class See>
__device__ __forceinline__ int sum_slot(float (&sum)[8], const QfAttnParams& p, const Deal& deal, int b,
                                        const KeyRows& s, const Element* g_rows, int64_t stride_t,
                                        const Sample<kHeadDim>& sample, See see) {
  constexpr int kChunks = Shape<kHeadDim>::kChunks;
  int count = 0;
  float x[8];
  if constexpr (kRotated) {
#pragma unroll 1
    for (int i = 0; i < sample.kEach; ++i) {
      const int token = sample.index(i) * sample.step, d = 8 * sample.chunk;
      const Element* const g_row = g_rows + token * stride_t;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = nan();
      if (sample.exists(i)) {
        to_float8(x, load8(g_row, d, p.head_dim, deal.vector));
        rotate8(x, p.rope, g_row, d, p.head_dim, position_k(p.rope, b, s.first, token),
                deal.vector && deal.table_vectors);
      }
      count += add_finite<kChunks>(sum, x);
    }
  } else {
    Raw8<Element> raw[sample.kEach];
    load_sample(raw, sample, g_rows, stride_t, p.head_dim, deal.vector);
#pragma unroll
    for (int i = 0; i < sample.kEach; ++i) {
      to_float8(x, raw[i]);
      const bool finite = add_finite<kChunks>(sum, x);
      count += finite;
      see(raw[i].bits, finite);
    }
  }
  return count;
}

// One channel of a head's sampled tokens, over the finite ones.
struct ChannelSample {
  float sum = 0.0f, sizes = 0.0f;  // of all; the sum of the magnitudes of the slots' sums
  int count = 0;

  // 0 if there is none, or it is nonfinite.
  __device__ __forceinline__ float mean() const {
    const float x = count > 0 ? div_rn(sum, float(count)) : 0.0f;
    return is_finite(fabsf(x)) ? x : 0.0f;
  }
  // Do the slots agree that there is a mean?
  __device__ __forceinline__ bool told() const { return fabsf(sum) >= mul_rn(kLeastAgreement, sizes); }
};

// Thread d < head_dim gets channel d. s_memory: [kSlots][kHeadDim] sums, then [kSlots] counts; afterwards only thread d
// may read column d of the sums.
template <bool kRotated, class Element, int kHeadDim, class See>
__device__ __forceinline__ ChannelSample sum_sample(const QfAttnParams& p, const Deal& deal, const QfTensor& x, int b,
                                                    int h, float* s_memory, See see) {
  const KeyRows s = read_key_rows(p, b);
  const Element* const g_rows = row_of<Element>(x, b, s.first, h);
  float* const s_sums = s_memory;
  int* const s_counts = reinterpret_cast<int*>(s_memory + kSlots * kHeadDim);
#pragma unroll 1
  for (int pass = 0; pass < Sample<kHeadDim>::kPasses; ++pass) {
    const Sample<kHeadDim> sample(s.len, pass);
    float sum[8] = {};
    const int count = sum_slot<kRotated>(sum, p, deal, b, s, g_rows, x.stride_t, sample, see);
#pragma unroll
    for (int e = 0; e < 8; ++e) s_sums[sample.slot * kHeadDim + 8 * sample.chunk + e] = sum[e];
    if (sample.chunk == 0) s_counts[sample.slot] = count;
  }
  __syncthreads();

  ChannelSample channel;
  const int d = threadIdx.x;
  if (d >= p.head_dim) return channel;
#pragma unroll 8
  for (int slot = 0; slot < kSlots; ++slot) {
    const float sum = s_sums[slot * kHeadDim + d];
    channel.sum = add_rn(channel.sum, sum);
    channel.sizes = add_rn(channel.sizes, fabsf(sum));
    channel.count += s_counts[slot];
  }
  return channel;
}

template <class Element, int kHeadDim, bool kRotated>
__device__ __forceinline__ void sample_keys(const QuantizeAll& all, const Deal& deal, int b, int h, float* s_memory) {
  const QfAttnParams& p = all.attn;
  const int64_t head = int64_t(b) * p.kv_heads + h;
  const ChannelSample channel =
      sum_sample<kRotated, Element, kHeadDim>(p, deal, p.kv.k, b, h, s_memory, [](const uint4&, bool) {});
  if (threadIdx.x == 0) all.kv.k_nonfinite[head] = 0;
  if (int(threadIdx.x) < p.head_dim) all.kv.k_mean[head * p.head_dim + threadIdx.x] = channel.mean();
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void sample_values(const QuantizeAll& all, const Deal& deal, int b, int h, float* s_memory) {
  const QfAttnParams& p = all.attn;
  const int64_t head = int64_t(b) * p.kv_heads + h;
  // Maxima of this thread's finite values, channel by channel, and minima with their sign changed. NaN: there are none.
  uint32_t most[4], negated_least[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) most[w] = negated_least[w] = kTwoNans;
  const auto see = [&](const uint4& raw, bool finite) {
    uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if (!finite) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (!is_finite(fabsf(value_of<Element>(words, e)))) words[e / 2] |= 0x7fffu << 16 * (e % 2);  // NaN, too
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      most[w] = most_of(most[w], words[w], Element{});
      negated_least[w] = most_of(negated_least[w], words[w] ^ 0x80008000u, Element{});
    }
  };
  const ChannelSample channel = sum_sample<false, Element, kHeadDim>(p, deal, p.kv.v, b, h, s_memory, see);
  float* const s_mean = s_memory;  // [kHeadDim], overwrites the first slot's sums
  if (int(threadIdx.x) < p.head_dim) {
    const float mean = channel.told() && fabsf(channel.mean()) < kMostMean ? channel.mean() : 0.0f;
    all.kv.v_mean[head * p.head_dim + threadIdx.x] = s_mean[threadIdx.x] = mean;
  }
  __syncthreads();

  // Rounded differences have the order of the values, so a channel's largest is that of its maximum or minimum.
  const int d = 8 * Sample<kHeadDim>(0, 0).chunk;
  float amplitude = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    amplitude = fmaxf(amplitude, sub_rn(value_of<Element>(most, e), s_mean[d + e]));
    amplitude = fmaxf(amplitude, add_rn(value_of<Element>(negated_least, e), s_mean[d + e]));
  }
  uint32_t* const s_slots = reinterpret_cast<uint32_t*>(s_memory + kHeadDim);
  const uint32_t largest = largest_of_block<Shape<kHeadDim>::kSampleThreads / 32>(float_to_bits(amplitude), s_slots);
  if (threadIdx.x != 0) return;
  all.kv.v_scale[head] = value_scale(bits_to_float(largest));
  all.kv.v_nonfinite[head] = 0;
}

}  // namespace sm90_quantize
}  // namespace qf
