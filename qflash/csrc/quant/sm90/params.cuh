// Parameters of the quantization pass of Hopper's INT8 attention, and how its work is distributed.
// docs/kernels/sm90_quantize.md defines every step bit for bit.
#pragma once

#include "qflash_ops.h"
#include "quant/layout.cuh"
#include "quant/sm90/kept.h"

namespace qf {

struct QuantizedQ {
  int8_t* values;     // [rows][q_heads][width]; NULL: q is not wanted
  float* scale;       // [batch, q_heads, q_len]
  float* q_dot_mean;  // [batch, q_heads, q_len]: rotated query . k_mean; NULL: not wanted
};

struct QuantizeAll {
  QfAttnParams attn;  // q, kv.k and kv.v before quantization, if they are wanted; lengths and rope
  KeptKv kv;          // k NULL: K is not wanted, and k_mean is given where q_dot_mean is. v NULL: V is not wanted
  QuantizedQ q;
  unsigned* counter;  // set to 0; NULL: none
  int rounding;       // QfRounding of q's and k's integers
  uint64_t seed;
};

namespace sm90_quantize {

constexpr int kSampled = 256;  // keys at most from which the means of K and V and the scale of V are found
constexpr int kSlots = 32;     // partial sums of those, computed in parallel
constexpr int kKeyGroup = kKeptKeyGroup;
constexpr int kValueTile = 128;
constexpr int kRounds = 4;  // tokens of which a thread holds sixteen channels each

// How memory is read: whole vectors; the same, rotated in pairs of whole vectors half a rotary_dim apart; or any
// layout, which includes stochastic rounding.
enum class Reads { kVectors, kHalves, kAny };

template <int kHeadDim>
struct Shape {
  static constexpr int kLanes = kHeadDim / 16;  // threads that share a token
  static constexpr int kWarpTokens = 32 / kLanes * kRounds;
  static constexpr int kGroupWarps = kKeyGroup / kWarpTokens;
  static constexpr int kThreads = kHeadDim > 128 ? 256 : 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTokens = kWarps * kWarpTokens;  // of a block
  static constexpr int kSharedBytes = kHeadDim * kValueTile;
  // Blocks per SM: what registers, of which rotation needs more, allow without spills.
  static constexpr int blocks(Reads reads) {
    return (reads == Reads::kVectors ? 4 : reads == Reads::kHalves ? 3 : 2) * 128 / kThreads;
  }

  static constexpr int kChunks = kHeadDim / 8;  // threads that share a token where each has eight channels of it
  static constexpr int kSampleThreads = kHeadDim > 128 ? 512 : kSlots * kChunks;
  static constexpr int kSampleSharedBytes = kSlots * (kHeadDim + 1) * 4;
};

// Blocks of one tensor: heads are their fastest index, then tiles of tokens, then the batch.
struct Part {
  uint32_t blocks;
  int heads_each;  // heads that a block processes in sequence
  Divider heads, tiles;
};
struct Deal {
  Part q, k, v;
  bool vector;         // rows may be read in vectors of 16 bytes
  bool table_vectors;  // and so may rope's tables
};

struct TokenTile {
  int b, tile, h_begin, h_end;

  __device__ __forceinline__ TokenTile(const Part& part, uint32_t index, int heads) {
    const uint32_t outer = part.heads(index);
    h_begin = int(index - outer * part.heads.divisor) * part.heads_each;
    h_end = min(h_begin + part.heads_each, heads);
    b = int(part.tiles(outer));
    tile = int(outer - b * part.tiles.divisor);
  }
};

// The keys of one sequence. An invalid description (see attn/sequence.cuh) counts as no keys: nothing is read.
struct KeyRows {
  int64_t first;   // row of key 0; 0 unless packed
  int owned, len;  // keys that have a place; keys that exist
};

__device__ inline KeyRows read_key_rows(const QfAttnParams& p, int b) {
  KeyRows s = {0, p.k_len, p.k_len};
  bool good = true;
  if (p.cu_seqlens_k) {
    const int64_t begin = p.cu_seqlens_k[b], end = p.cu_seqlens_k[b + 1];
    good = begin >= 0 && begin <= end && end <= p.total_k && end - begin <= p.k_len;
    s.first = good ? begin : 0;
    s.owned = s.len = good ? int(end - begin) : 0;
  }
  if (p.kv_lens) {
    const int len = p.kv_lens[b];
    s.len = good && len >= 0 && len <= s.owned ? len : 0;
  }
  return s;
}

template <class Element>
__device__ __forceinline__ const Element* row_of(const QfTensor& x, int b, int64_t row, int h) {
  return static_cast<const Element*>(x.data) + b * x.stride_b + row * x.stride_t + h * x.stride_h;
}

__device__ __forceinline__ int width_of(int head_dim) { return (head_dim + 15) & ~15; }

}  // namespace sm90_quantize
}  // namespace qf
