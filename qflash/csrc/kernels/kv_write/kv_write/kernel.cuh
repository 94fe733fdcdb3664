// New tokens of k and v into the pages of a cache: rotated, quantized where the pages are int8, stored. One launch,
// defined to the bit by qflash/reference/kv_write.py.
//
//   load | find the sequence, the page, the slot | k: rotate | int8: k less its mean, Hadamard; scale, integers | store
//
// A thread has eight channels of one head of a token, or sixteen for int8, from the load to the store (deal.h). There
// is no shared memory; a token's largest magnitude is a maximum over its lanes by shuffles. A token without a place
// (place.cuh) is not written, and nothing but new tokens is.
//
// Bound: latency. Where tokens are padded two loads follow one another, the length, then page and cosines together, and
// the store follows these; what k and v hold is on its way meanwhile.
#pragma once

#include "kernels/kv_write/kv_write/place.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldst.cuh"
#include "quant/hadamard.cuh"
#include "quant/round.cuh"
#include "quant/tokens.cuh"
#include "reduce/warp.cuh"

namespace qf {
namespace kv_write {

// One thread's share.
struct Share {
  int64_t row, first_row;  // of k and v; of the warp's first thread
  int h, channel, lanes;
  bool keys, exists;

  __device__ __forceinline__ Share(const Deal& deal, int channels) {
    const uint32_t warp = (blockIdx.x * uint32_t(kThreads) + threadIdx.x) & ~31u;
    const auto outer_of = [&](uint32_t thread) { return deal.heads(min(thread >> deal.log_lanes, deal.units - 1)); };
    const uint32_t thread = warp + threadIdx.x % 32, unit = min(thread >> deal.log_lanes, deal.units - 1);
    const uint32_t outer = outer_of(thread);
    lanes = 1 << deal.log_lanes;
    exists = thread >> deal.log_lanes < deal.units;
    h = int(unit - outer * deal.heads.divisor);
    keys = outer % 2 == 0;
    row = outer / 2;
    first_row = outer_of(warp) / 2;
    channel = int(thread & (lanes - 1)) * channels;
  }
};

template <class Element>
__device__ __forceinline__ const Element* row_of(const QfKvWriteParams& p, const Deal& deal, const Share& share) {
  const QfTensor& from = share.keys ? p.k : p.v;
  const int64_t b = p.cu_seqlens_k ? 0 : int64_t(deal.length(uint32_t(share.row)));
  const int64_t t = p.cu_seqlens_k ? share.row : share.row - b * p.k_len;
  return static_cast<const Element*>(from.data) + b * from.stride_b + t * from.stride_t + share.h * from.stride_h;
}

template <class Stored>
__device__ __forceinline__ Stored* slot_of(const QfTensor& pool, const Place& place, int h) {
  return static_cast<Stored*>(pool.data) + place.page * pool.stride_b + place.slot * pool.stride_t + h * pool.stride_h;
}

// Channels d .. d+7 of a key, rotated; those that the rope leaves alone keep their bits.
template <class Element, bool kVectors>
__device__ __forceinline__ void rotate_key(float (&x)[8], const QfRope& rope, const Element* g_row, int d, int head_dim,
                                           int64_t position, bool table_vectors) {
  float before[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) before[e] = x[e];
  rotate8(x, rope, g_row, d, head_dim, position, kVectors && table_vectors);
  if (d + 8 <= rope.rotary_dim || (position < 0 ? -position : position) >= rope.rows) return;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (d + e >= rope.rotary_dim) x[e] = before[e];
}

__device__ __forceinline__ void store_vector(const Raw8<float>& raw, float* g) {
  reinterpret_cast<float4*>(g)[0] = raw.low, reinterpret_cast<float4*>(g)[1] = raw.high;
}
template <class Element>
__device__ __forceinline__ void store_vector(const Raw8<Element>& raw, Element* g) {
  *reinterpret_cast<uint4*>(g) = raw.bits;
}

__device__ __forceinline__ float element_of(const Raw8<float>& raw, int e) {
  const float x[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  return x[e];
}
template <class Element>
__device__ __forceinline__ Element element_of(const Raw8<Element>& raw, int e) {
  const uint32_t words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
  return Element{uint16_t(words[e / 2] >> 16 * (e % 2))};
}

template <class Element, bool kVectors>
__device__ __forceinline__ void store8(Element* g_row, int d, int head_dim, const Raw8<Element>& raw) {
  if constexpr (kVectors) {
    if (d < head_dim) store_vector(raw, g_row + d);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (d + e < head_dim) g_row[d + e] = element_of(raw, e);
  }
}

// Pages of the tokens' own dtype: what is not rotated is copied, bit by bit.
template <class Element, bool kVectors>
__device__ __forceinline__ void write_elements(const QfKvWriteParams& p, const Deal& deal) {
  const Share share(deal, kChannels<false>);
  const Element* const g_row = row_of<Element>(p, deal, share);
  Raw8<Element> raw = load8(g_row, share.channel, p.head_dim, kVectors);
  const Token token = token_of(p, deal, share.row, share.first_row);
  const Place place = place_of(p, deal, token);
  if (place.page < 0 || !share.exists) return;
  if (share.keys && p.rope.cos) {
    float x[8];
    Element y[8];
    to_float8(x, raw);
    rotate_key<Element, kVectors>(x, p.rope, g_row, share.channel, p.head_dim,
                                  rope_position(p, token, place, share.row), deal.table_vectors);
#pragma unroll
    for (int e = 0; e < 8; ++e) from_float(x[e], y[e]);
    pack8(raw, y);
  }
  Element* const g_slot = slot_of<Element>(share.keys ? p.kv.k : p.kv.v, place, share.h);
  store8<Element, kVectors>(g_slot, share.channel, p.head_dim, raw);
}

// x <- x less the head's mean, times the orthogonal Hadamard matrix.
template <bool kVectors>
__device__ __forceinline__ void mix_key(float (&x)[16], const QfKvWriteParams& p, const Share& share) {
  if (p.kv.k_mean) {
    const float* const g_mean = p.kv.k_mean + int64_t(share.h) * p.head_dim;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float mean[8];
      to_float8(mean, load8(g_mean, share.channel + 8 * i, p.head_dim, kVectors));
#pragma unroll
      for (int e = 0; e < 8; ++e) x[8 * i + e] = sub_rn(x[8 * i + e], mean[e]);
    }
  }
  hadamard(x);
#pragma unroll
  for (int e = 0; e < 16; ++e) x[e] = mul_rn(x[e], 0.25f);
}

// Sixteen bytes, of which head_dim, a multiple of sixteen, has all or none.
template <bool kVectors>
__device__ __forceinline__ void store16(int8_t* g_row, int d, int head_dim, const Word4& bytes) {
  if (d >= head_dim) return;
  if constexpr (kVectors) {
    *reinterpret_cast<Word4*>(g_row + d) = bytes;
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e) g_row[d + e] = int8_t(bytes.word[e / 4] >> 8 * (e % 4));
  }
}

// Pages of int8: a scale for each token and head.
template <class Element, bool kVectors>
__device__ __forceinline__ void write_integers(const QfKvWriteParams& p, const Deal& deal) {
  const Share share(deal, kChannels<true>);
  const Element* const g_row = row_of<Element>(p, deal, share);
  Raw8<Element> raw[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) raw[i] = load8(g_row, share.channel + 8 * i, p.head_dim, kVectors);
  const Token token = token_of(p, deal, share.row, share.first_row);
  const Place place = place_of(p, deal, token);
  float x[16];
  const auto eight = [&](int i) -> float (&)[8] { return *reinterpret_cast<float (*)[8]>(&x[8 * i]); };
#pragma unroll
  for (int i = 0; i < 2; ++i) to_float8(eight(i), raw[i]);
  if (share.keys) {
    if (p.rope.cos && place.page >= 0) {
      const int64_t position = rope_position(p, token, place, share.row);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (share.channel + 8 * i < p.head_dim)
          rotate_key<Element, kVectors>(eight(i), p.rope, g_row, share.channel + 8 * i, p.head_dim, position,
                                        deal.table_vectors);
    }
    mix_key<kVectors>(x, p, share);
  }
  uint32_t largest = 0;  // the lanes past head_dim hold zeros
#pragma unroll
  for (int e = 0; e < 16; ++e) largest = max(largest, magnitude(x[e]));
  largest = reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); }, share.lanes);
  if (place.page < 0 || !share.exists) return;
  const uint32_t key = token_key(largest);
  const Scale scale = symmetric_scale(key);
  const QfScales& scales = share.keys ? p.kv.k_scales : p.kv.v_scales;
  if (share.channel == 0)
    scales.scale[place.page * scales.stride_b + share.h * scales.stride_h + place.slot] = scale.scale;
  Word4 bytes;  // zeros of a token that is not finite, which its scale tells
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes.word[i] = key == kNotFinite ? 0u : nearest4(x + 4 * i, scale.inverse);
  store16<kVectors>(slot_of<int8_t>(share.keys ? p.kv.k : p.kv.v, place, share.h), share.channel, p.head_dim, bytes);
}

}  // namespace kv_write
}  // namespace qf

template <class Element, bool kInt8, bool kVectors>
__global__ void __launch_bounds__(qf::kv_write::kThreads, qf::kv_write::kResidentBlocks)
    qf_kv_write_kernel(const __grid_constant__ QfKvWriteParams p, const __grid_constant__ qf::kv_write::Deal deal) {
  qf::wait_for_previous_grid();  // k, v, lengths and the table may be its results, and it may read the pages
  qf::let_next_grid_start();     // which waits in turn before it reads what is written here
  if constexpr (kInt8)
    qf::kv_write::write_integers<Element, kVectors>(p, deal);
  else
    qf::kv_write::write_elements<Element, kVectors>(p, deal);
}
