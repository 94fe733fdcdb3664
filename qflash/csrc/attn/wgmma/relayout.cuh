// The relayout pass, before attention, for what TMA cannot do: it rotates q and k, and copies tensors whose strides TMA
// cannot address. Each gets a copy in the workspace, [batch][rows][heads][head_dim].
#pragma once

#include "attn/mma/product.cuh"
#include "attn/mma/tile.cuh"
#include "attn/rope.cuh"
#include "attn/sequence.cuh"
#include "hopper/tensor_map.h"

namespace qf {
namespace wgmma {

enum Which { kQ, kK, kV };

// [batch, rows, heads, columns], as TMA takes it: one head's rows are dimension 1.
inline TensorExtents extents_of(const QfTensor& x, int64_t columns, int64_t rows, int64_t heads, int64_t batch) {
  return {x.data, {columns, rows, heads, batch}, {x.stride_t, x.stride_h, x.stride_b}};
}

// How TMA gets to read one tensor.
struct RelaidTensor {
  QfTensor from;
  int64_t rows;
  int heads, batch;
  bool rotated, copied;
  int64_t offset;  // of the copy in the memory for copies
  bool vector;     // from is read 16 bytes at a time

  // The layout of the copy.
  QfTensor copy(char* memory, int head_dim) const {
    return {memory + offset, rows * heads * head_dim, int64_t(heads) * head_dim, head_dim};
  }
  TensorExtents extents(const QfTensor& x, int head_dim) const { return extents_of(x, head_dim, rows, heads, batch); }
};

// Host side: what is done with q, k and v. It is called first without addresses, for the size of the workspace: of rope
// and packed rows it uses only the sizes. If an address then makes more copies necessary than were reserved, the launch
// must allocate the memory itself. Tensors outside first .. last are either read by TMA directly or not at all. Pages
// of k and v are read in place, with the page index as the batch, and rope rotates q only.
struct Relayout {
  RelaidTensor tensors[3] = {};
  int64_t bytes = 0;

  Relayout(const QfAttnParams& p, bool addressed, Which first = kQ, Which last = kV) {
    const bool packed = p.cu_seqlens_q || p.total_q > 0 || p.total_k > 0;
    const bool paged = p.kv.page_size > 0;
    const QfTensor all[3] = {p.q, p.kv.k, p.kv.v};
    for (int which = first; which <= last; ++which) {
      RelaidTensor& x = tensors[which];
      x.from = all[which];
      x.heads = which == kQ ? p.q_heads : p.kv_heads;
      x.batch = packed ? 1 : p.batch;
      x.rows = packed ? (which == kQ ? p.total_q : p.total_k) : which == kQ ? p.q_len : p.k_len;
      x.rotated = p.rope.rotary_dim > 0 && (which == kQ || (which == kK && !paged));
      if (paged && which != kQ) x.batch = p.kv.pages, x.rows = p.kv.page_size;
      const bool odd = addressed && reinterpret_cast<uintptr_t>(x.from.data) % 16 != 0;
      x.copied = x.rotated || odd || !strides_map(x.extents(x.from, p.head_dim), 2);
      x.vector = chunks_aligned(x.from, p.head_dim, 2);
      x.offset = bytes;
      if (x.copied) bytes += (2 * x.batch * x.rows * x.heads * p.head_dim + 255) / 256 * 256;
    }
  }
  // The tensor map of one of them; memory: where the copies are. Returns a cudaError_t.
  template <class Tile>
  int map(CUtensorMap& map, Which which, char* memory, int head_dim, int box_rows,
          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) const {
    const RelaidTensor& x = tensors[which];
    if (x.rows == 0 || x.batch == 0) return cudaSuccess;  // never read
    const QfTensor tensor = x.copied ? x.copy(memory, head_dim) : x.from;
    return encode_tensor_map<Tile>(map, x.extents(tensor, head_dim), box_rows, promotion);
  }
  // Blocks for one tensor: no more than can run at once, and no more than there are tokens.
  int64_t blocks(int processors) const {
    int64_t tokens = 1;
    for (const RelaidTensor& x : tensors)
      if (x.copied && x.rows * x.batch > tokens) tokens = x.rows * x.batch;
    return tokens < processors * 8 ? tokens : processors * 8;
  }
};

// The sequence that owns a packed row.
__device__ __forceinline__ int sequence_with(const int32_t* cu_seqlens, int batch, int64_t row) {
  int low = 0, high = batch;  // cu_seqlens[low] <= row < cu_seqlens[high], if there are such
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <bool kPaged>
__device__ __forceinline__ int position_of(const QfAttnParams& p, Which which, int b, int64_t row) {
  if (p.cu_seqlens_q) b = sequence_with(which == kQ ? p.cu_seqlens_q : p.cu_seqlens_k, p.batch, row);
  const Sequence seq = sequence_of<kPaged>(p, b, false);
  if (which == kQ) return position_q(p.rope, b, seq.q0, int(row - seq.q0), seq.len_q, seq.len_k);
  return position_k(p.rope, b, seq.k0, int(row - seq.k0));
}

// A token's first head, in the source and in its copy.
template <class Element>
struct Token {
  const Element* g_from;
  Element* g_to;
};
template <class Element>
__device__ __forceinline__ Token<Element> token_of(const RelaidTensor& x, char* copies, int head_dim, int b,
                                                   int64_t row) {
  return {static_cast<const Element*>(x.from.data) + b * x.from.stride_b + row * x.from.stride_t,
          reinterpret_cast<Element*>(copies + x.offset) + (b * x.rows + row) * x.heads * head_dim};
}

// Can rotate_token() be used?
__device__ __forceinline__ bool rotates_by_chunks(const RelaidTensor& x, const QfRope& rope, bool tables_vectorise) {
  return x.rotated && x.vector && tables_vectorise && !rope.interleaved && rope.rotary_dim % (2 * kPerChunk) == 0;
}

// Rotates all heads of one token, by a warp. A lane handles the same eight channels, and their partners half a rotation
// away, of several heads in sequence: it reads the tables once.
template <class Element>
__device__ __forceinline__ void rotate_token(const QfRope& rope, const RelaidTensor& x, const Token<Element>& token,
                                             int head_dim, int position, int lane) {
  using Tensor = Tensor16<Element, 90>;
  const int half = rope.rotary_dim / 2, pairs = half / kPerChunk, at_once = 32 / pairs;
  const int d = lane % pairs * kPerChunk, first_head = lane / pairs;
  const EightPairs pairs_here(rope, rotation_at(rope, position), d);
  const auto &c = pairs_here.cosine, &s = pairs_here.sine;
  const auto rotate_word = [&](uint32_t& a, uint32_t& b, int e) {
    const float x0 = Tensor::low(a), x1 = Tensor::high(a), y0 = Tensor::low(b), y1 = Tensor::high(b);
    a = Tensor::pair(fmaf(y0, -s[e], x0 * c[e]), fmaf(y1, -s[e + 1], x1 * c[e + 1]));
    b = Tensor::pair(fmaf(x0, s[e], y0 * c[e]), fmaf(x1, s[e + 1], y1 * c[e + 1]));
  };
  if (first_head < at_once) {
#pragma unroll 4
    for (int h = first_head; h < x.heads; h += at_once) {
      const Element* const g_from = token.g_from + h * x.from.stride_h + d;
      Element* const g_to = token.g_to + h * head_dim + d;
      uint4 a = *reinterpret_cast<const uint4*>(g_from), b = *reinterpret_cast<const uint4*>(g_from + half);
      rotate_word(a.x, b.x, 0), rotate_word(a.y, b.y, 2), rotate_word(a.z, b.z, 4), rotate_word(a.w, b.w, 6);
      *reinterpret_cast<uint4*>(g_to) = a;
      *reinterpret_cast<uint4*>(g_to + half) = b;
    }
  }
  const int rest = (head_dim - rope.rotary_dim) / kPerChunk;  // chunks of a head that are not rotated
  for (int i = lane; i < x.heads * rest; i += 32) {
    const int h = i / rest, channel = rope.rotary_dim + (i - h * rest) * kPerChunk;
    *reinterpret_cast<uint4*>(token.g_to + h * head_dim + channel) =
        *reinterpret_cast<const uint4*>(token.g_from + h * x.from.stride_h + channel);
  }
}

// The pass, with kRelayoutThreads threads per block: equally many blocks for each of q, k and v, interleaved. A warp,
// or else a block, handles all heads of a token.
constexpr int kRelayoutThreads = 256;
template <class Element, bool kPaged = false>
__device__ __forceinline__ void relayout_tokens(const QfAttnParams& p, const Relayout& relayout, char* copies,
                                                bool tables_vectorise) {
  const Which which = Which(blockIdx.x % 3);
  const int64_t block = blockIdx.x / 3, blocks = gridDim.x / 3;
  const RelaidTensor& x = relayout.tensors[which];
  if (!x.copied) return;
  if (packed_rows_fall(p)) return;  // all rows will be NaN
  const int64_t tokens = x.rows * x.batch;
  const auto each = [&](int64_t first, int64_t step, auto take) {
    for (int64_t token = first; token < tokens; token += step) {
      const int b = int(token / x.rows);
      const int64_t row = token - b * x.rows;
      take(b, row, x.rotated ? position_of<kPaged>(p, which, b, row) : 0);
    }
  };
  if (rotates_by_chunks(x, p.rope, tables_vectorise)) {
    const int warps = blockDim.x / 32;
    each(block * warps + threadIdx.x / 32, blocks * warps, [&](int b, int64_t row, int position) {
      rotate_token(p.rope, x, token_of<Element>(x, copies, p.head_dim, b, row), p.head_dim, position, threadIdx.x % 32);
    });
    return;
  }
  const int chunks = p.head_dim / kPerChunk;
  each(block, blocks, [&](int b, int64_t row, int position) {
    const Token<Element> token = token_of<Element>(x, copies, p.head_dim, b, row);
    for (int i = threadIdx.x; i < x.heads * chunks; i += blockDim.x) {
      const int h = i / chunks, d = (i - h * chunks) * kPerChunk;
      const Element* const g_row = token.g_from + h * x.from.stride_h;
      const auto part = [&](int channel) {
        const float4 value = to_float4(load4(g_row, channel, p.head_dim, x.vector), g_row);
        return x.rotated ? rope4(p.rope, g_row, channel, p.head_dim, position, value, x.vector && tables_vectorise)
                         : value;
      };
      *reinterpret_cast<uint4*>(token.g_to + h * p.head_dim + d) = chunk_of<Element>(part(d), part(d + 4));
    }
  });
}

}  // namespace wgmma
}  // namespace qf
