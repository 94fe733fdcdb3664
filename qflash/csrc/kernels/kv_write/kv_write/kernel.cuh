// Writes new tokens of k and v to the pages of a cache: rotated, and quantized if the pages are int8. One launch,
// defined bit for bit by qflash/reference/kv_write.py.
//
//   load | find the sequence, the page, the slot | k: rotate | int8: k less its mean, Hadamard; scale, integers | store
//
// A thread keeps eight channels of one head of a token from the load to the store (deal.h). There is no shared memory:
// two lanes share the sixteen channels of a Hadamard matrix, and a token's largest magnitude is a maximum over its
// lanes, both by shuffles. A token without a place (place.cuh) is not written, and nothing except new tokens is.
//
// Bound: latency, part of which is fetching code that no previous launch has left in a cache: with sixteen channels per
// thread, int8 pages had twice the code of pages of 16 bits, and took 1.4 to 1.6 us longer; with eight they have 1.3
// times the code, and were not timed. For padded tokens, two loads are dependent, first the length, then page and
// cosines together, and the store depends on these; the loads of k and v are in flight meanwhile.
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

  __device__ __forceinline__ explicit Share(const Deal& deal) {
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
    channel = int(thread & (lanes - 1)) * kChannels;
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

// Rotates channels d .. d+7 of a key; channels that the rope does not rotate keep their bits.
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

// Pages of the tokens' own dtype: what is not rotated is copied bit for bit.
template <class Element, bool kVectors>
__device__ __forceinline__ void write_elements(const QfKvWriteParams& p, const Deal& deal) {
  const Share share(deal);
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

// Multiplies sixteen channels, eight in this lane and eight in its neighbour, by the orthogonal Hadamard matrix.
__device__ __forceinline__ void mix(float (&x)[8], bool upper) {
  hadamard(x);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float other = __shfl_xor_sync(0xffffffffu, x[e], 1);
    x[e] = mul_rn(upper ? sub_rn(other, x[e]) : add_rn(x[e], other), 0.25f);
  }
}

// Stores eight bytes. head_dim is a multiple of sixteen, so all or none of them are inside it.
template <bool kVectors>
__device__ __forceinline__ void store_bytes(int8_t* g_row, int d, int head_dim, uint2 bytes) {
  if (d >= head_dim) return;
  if constexpr (kVectors) {
    *reinterpret_cast<uint2*>(g_row + d) = bytes;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) g_row[d + e] = int8_t((e < 4 ? bytes.x : bytes.y) >> 8 * (e % 4));
  }
}

// Pages of int8: a scale for each token and head. Values of v are multiplied by the matrix, too, and the results
// discarded: otherwise a warp whose lanes have both k and v would execute the code twice.
template <class Element, bool kVectors>
__device__ __forceinline__ void write_integers(const QfKvWriteParams& p, const Deal& deal) {
  const Share share(deal);
  const Element* const g_row = row_of<Element>(p, deal, share);
  const Raw8<Element> raw = load8(g_row, share.channel, p.head_dim, kVectors);
  const bool has_mean = share.keys && p.kv.k_mean;
  Raw8<float> raw_mean{};
  if (has_mean) raw_mean = load8(p.kv.k_mean + int64_t(share.h) * p.head_dim, share.channel, p.head_dim, kVectors);
  const Token token = token_of(p, deal, share.row, share.first_row);
  const Place place = place_of(p, deal, token);
  float x[8];
  to_float8(x, raw);
  if (share.keys && p.rope.cos && place.page >= 0 && share.channel < p.head_dim)
    rotate_key<Element, kVectors>(x, p.rope, g_row, share.channel, p.head_dim,
                                  rope_position(p, token, place, share.row), deal.table_vectors);
  float mixed[8], mean[8];
  to_float8(mean, raw_mean);
#pragma unroll
  for (int e = 0; e < 8; ++e) mixed[e] = has_mean ? sub_rn(x[e], mean[e]) : x[e];
  mix(mixed, share.channel % 16 != 0);
  uint32_t largest = 0;  // the lanes past head_dim hold zeros
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (share.keys) x[e] = mixed[e];
    largest = max(largest, magnitude(x[e]));
  }
  largest = reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); }, share.lanes);
  if (place.page < 0 || !share.exists) return;
  const uint32_t key = token_key(largest);
  const Scale scale = symmetric_scale(key);
  const QfScales& scales = share.keys ? p.kv.k_scales : p.kv.v_scales;
  if (share.channel == 0)
    scales.scale[place.page * scales.stride_b + share.h * scales.stride_h + place.slot] = scale.scale;
  uint2 bytes = {0, 0};  // zeros for a nonfinite token, which its scale indicates
  if (key != kNotFinite) bytes = make_uint2(nearest4(x, scale.inverse), nearest4(x + 4, scale.inverse));
  store_bytes<kVectors>(slot_of<int8_t>(share.keys ? p.kv.k : p.kv.v, place, share.h), share.channel, p.head_dim,
                        bytes);
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
