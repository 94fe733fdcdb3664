// The pass that runs first for pages that a kernel cannot read in place: INT8 pages, which it dequantizes, and pools
// whose strides TMA cannot address. The pages that a sequence's rows see are copied consecutively into the workspace,
// in 16 bits, [batch * columns][kv_heads][page_size][head_dim], with their own page table. A page that two sequences
// share is copied for each.
#pragma once

#include "attn/kv.h"
#include "attn/mma/tile.cuh"
#include "attn/pages.cuh"
#include "common/launch.cuh"
#include "quant/hadamard.cuh"

namespace qf {

// Where a call's copies are in its workspace. Host side.
struct GatheredPages {
  int64_t pages, values, table, bytes;  // number of copies; offsets, keys come first; total size

  explicit GatheredPages(const QfAttnParams& p) {
    const auto whole = [](int64_t x) { return (x + 255) / 256 * 256; };
    pages = int64_t(p.batch) * (p.k_len / p.kv.page_size);
    values = whole(2 * pages * p.kv.page_size * p.kv_heads * p.head_dim);
    table = 2 * values;
    bytes = table + whole(4 * pages);
  }
  bool fit() const { return pages <= kMaxLength; }  // an entry of a page table
  int32_t* table_at(char* memory) const { return reinterpret_cast<int32_t*>(memory + table); }

  // The same problem with the copies.
  QfAttnParams place(QfAttnParams p, char* memory) const {
    const int64_t row = p.head_dim, head = row * p.kv.page_size;
    const auto copy = [&](char* from) { return QfTensor{from, head * p.kv_heads, row, head}; };
    QfKv kv{};
    kv.kind = QF_KV_PAGES;
    kv.k_dtype = kv.v_dtype = p.dtype;
    kv.page_size = p.kv.page_size;
    kv.k = copy(memory), kv.v = copy(memory + values);
    kv.page_table = table_at(memory);
    kv.page_table_stride = p.k_len / p.kv.page_size;
    kv.pages = int32_t(pages);
    p.kv = kv;
    return p;
  }
};

// Which pools may be read in vectors.
struct PageAccess {
  bool k, v;
};

// Channels d .. of one token and head, in 16 bits.
template <class Element>
__device__ __forceinline__ void copy_channels(Element* g_to, const Element* g_from, int d, int head_dim, bool vector) {
  *reinterpret_cast<uint2*>(g_to + d) = load4(g_from, d, head_dim, vector);
  *reinterpret_cast<uint2*>(g_to + d + 4) = load4(g_from, d + 4, head_dim, vector);
}

// Sixteen channels of INT8, dequantized to what they were before they were written. kKeys: through the Hadamard matrix,
// and with their mean, which may be NULL.
template <bool kKeys, class Element>
__device__ __forceinline__ void dequantize_channels(Element* g_to, const int8_t* g_from, float scale,
                                                    const float* g_mean, int d, bool vector) {
  uint32_t words[4] = {};
  if (vector) {
    const uint4 raw = *reinterpret_cast<const uint4*>(g_from + d);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e) words[e / 4] |= uint32_t(uint8_t(g_from[d + e])) << 8 * (e % 4);
  }
  float x[16];
#pragma unroll
  for (int e = 0; e < 16; ++e) x[e] = scale * float(int8_t(words[e / 4] >> 8 * (e % 4)));
  if (kKeys) {
    hadamard(x);  // its own inverse, after division by four
#pragma unroll
    for (int e = 0; e < 16; ++e) x[e] = fmaf(x[e], 0.25f, g_mean ? g_mean[d + e] : 0.0f);
  }
#pragma unroll
  for (int e = 0; e < 16; e += 4) write4(g_to + d + e, make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]));
}

// The pass: blocks loop over the pages of sequences, one at a time. to: of GatheredPages::place(). Entries that no row
// needs, or that are out of range, are -1 in the table of the copies.
constexpr int kGatherThreads = 256;
template <class Element, bool kInt8>
__device__ __forceinline__ void gather_pages(const QfAttnParams& p, const QfKv& to, int32_t* g_table,
                                             const PageAccess& vector) {
  constexpr int kChannels = kInt8 ? 16 : 8;  // per thread
  const bool rows_fall = packed_rows_fall(p);
  const int columns = int(to.page_table_stride), chunks = p.head_dim / kChannels;
  for (int64_t i = blockIdx.x; i < to.pages; i += gridDim.x) {
    const int b = int(i / columns), first = int(i - int64_t(b) * columns) * p.kv.page_size;
    const Sequence s = sequence_of<true>(p, b, rows_fall);
    KeyRange keys = {0, 0};
    if (s.good && s.len_q > 0) keys = Mask{p.window_left, p.window_right, s.len_q, s.len_k}.seen_by_any(0, s.len_q - 1);
    const int begin = max(first, keys.begin) - first, end = min(first + p.kv.page_size, keys.end) - first;
    const int page = begin < end ? PageRow(p.kv, b).page_of(first) : -1;
    if (threadIdx.x == 0) g_table[i] = page < 0 ? -1 : int32_t(i);
    if (page < 0) continue;
    const int tokens = end - begin;
    for (int unit = threadIdx.x; unit < p.kv_heads * tokens * chunks; unit += blockDim.x) {
      const int row = unit / chunks, d = (unit - row * chunks) * kChannels;
      const int h = row / tokens, t = begin + row - h * tokens;
      const auto to_row = [&](const QfTensor& x) {
        return static_cast<Element*>(x.data) + i * x.stride_b + t * x.stride_t + h * x.stride_h;
      };
      const auto at = [&](const QfTensor& x) { return page * x.stride_b + t * x.stride_t + h * x.stride_h; };
      if constexpr (kInt8) {
        const auto scale = [&](const QfScales& x) { return x.scale[page * x.stride_b + h * x.stride_h + t]; };
        const float* const g_mean = p.kv.k_mean ? p.kv.k_mean + int64_t(h) * p.head_dim : nullptr;
        dequantize_channels<true>(to_row(to.k), static_cast<const int8_t*>(p.kv.k.data) + at(p.kv.k),
                                  scale(p.kv.k_scales), g_mean, d, vector.k);
        dequantize_channels<false>(to_row(to.v), static_cast<const int8_t*>(p.kv.v.data) + at(p.kv.v),
                                   scale(p.kv.v_scales), nullptr, d, vector.v);
      } else {
        copy_channels(to_row(to.k), static_cast<const Element*>(p.kv.k.data) + at(p.kv.k), d, p.head_dim, vector.k);
        copy_channels(to_row(to.v), static_cast<const Element*>(p.kv.v.data) + at(p.kv.v), d, p.head_dim, vector.v);
      }
    }
  }
}

// Host side: launches the pass; `kernel`: its __global__ function. Returns a status.
template <class Kernel>
int launch_gather(Kernel* kernel, const QfAttnParams& p, const QfAttnParams& placed, const GatheredPages& gathered,
                  char* memory, cudaStream_t stream) {
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const int64_t most = int64_t(processors) * 8, blocks = gathered.pages < most ? gathered.pages : most;
  if (blocks == 0) return QF_OK;
  const bool int8 = p.kv.kind == QF_KV_PAGES_INT8;
  const auto vector = [&](const QfTensor& x) {
    return int8 ? chunks_aligned(x, p.head_dim, 1) : tensor_vectorises(x, p.head_dim, 2);
  };
  return launch({blocks, kGatherThreads, 0, stream}, kernel, p, placed.kv, gathered.table_at(memory),
                PageAccess{vector(p.kv.k), vector(p.kv.v)});
}

}  // namespace qf
