// A pass before the attention for what the copy engine cannot do: q and k rotated, tensors whose strides it cannot
// walk. Each gets a copy in the workspace, [batch][rows][heads][head_dim].
#pragma once

#include "attn/rope.cuh"
#include "attn/sequence.cuh"
#include "attn/tokens.cuh"
#include "hopper/tensor_map.h"
#include "kernels/sm90_fwd/config.h"

namespace qf {
namespace sm90_fwd {

enum Which { kQ, kK, kV };

// How one tensor gets to the copy engine.
struct Staged {
  QfTensor from;
  int64_t rows;
  int heads, batch;
  bool rotated, copied;
  int64_t offset;  // of the copy in the memory for copies
  bool vector;     // from is read 16 bytes at a time

  // As the copy lies.
  QfTensor copy(char* memory, int head_dim) const {
    return {memory + offset, rows * heads * head_dim, int64_t(heads) * head_dim, head_dim};
  }
};

// Host side: what becomes of q, k and v. Asked first without addresses, for the size of the workspace: of rope and
// packed rows it looks at the sizes alone. Where an address then makes more copies necessary than planned, the launch
// must find the memory itself.
struct Stage {
  Staged tensors[3];
  int64_t bytes = 0;

  Stage(const QfAttnParams& p, bool addressed) {
    const bool packed = p.cu_seqlens_q || p.total_q > 0 || p.total_k > 0;
    const QfTensor all[3] = {p.q, p.k, p.v};
    for (int which = kQ; which <= kV; ++which) {
      Staged& x = tensors[which];
      x.from = all[which];
      x.heads = which == kQ ? p.q_heads : p.kv_heads;
      x.batch = packed ? 1 : p.batch;
      x.rows = packed ? (which == kQ ? p.total_q : p.total_k) : which == kQ ? p.q_len : p.k_len;
      x.rotated = p.rope.rotary_dim > 0 && which != kV;
      const bool odd = addressed && reinterpret_cast<uintptr_t>(x.from.data) % 16 != 0;
      x.copied = x.rotated || odd || !strides_map(x.from, x.rows, x.heads, x.batch);
      x.vector = chunks_aligned(x.from, p.head_dim, 2);
      x.offset = bytes;
      if (x.copied) bytes += (2 * x.batch * x.rows * x.heads * p.head_dim + 255) / 256 * 256;
    }
  }
};

// Which sequence owns a packed row.
__device__ __forceinline__ int sequence_with(const int32_t* cu_seqlens, int batch, int64_t row) {
  int low = 0, high = batch;  // cu_seqlens[low] <= row < cu_seqlens[high], if any such there are
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ int position_of(const QfAttnParams& p, Which which, int b, int64_t row) {
  if (p.cu_seqlens_q) b = sequence_with(which == kQ ? p.cu_seqlens_q : p.cu_seqlens_k, p.batch, row);
  const Sequence seq = sequence_of(p, b, false);
  if (which == kQ) return position_q(p.rope, b, seq.q0, int(row - seq.q0), seq.len_q, seq.len_k);
  return position_k(p.rope, b, seq.k0, int(row - seq.k0));
}

}  // namespace sm90_fwd
}  // namespace qf

// One block takes a row of every head at a time.
__global__ void __launch_bounds__(256)
    qf_sm90_fwd_stage_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::sm90_fwd::Staged x,
                             const qf::sm90_fwd::Which which, char* const copy, const bool tables_vectorise) {
  using namespace qf;
  using namespace qf::sm90_fwd;
  if (packed_rows_fall(p)) return;  // all rows will be NaN
  const int chunks = p.head_dim / kPerChunk;
  for (int64_t item = blockIdx.x; item < x.rows * x.batch; item += gridDim.x) {
    const int b = int(item / x.rows);
    const int64_t row = item - b * x.rows;
    const int position = x.rotated ? position_of(p, which, b, row) : 0;
    for (int i = threadIdx.x; i < x.heads * chunks; i += blockDim.x) {
      const int h = i / chunks, d = (i - h * chunks) * kPerChunk;
      const Element* const g_row =
          static_cast<const Element*>(x.from.data) + b * x.from.stride_b + row * x.from.stride_t + h * x.from.stride_h;
      const auto part = [&](int channel) {
        const float4 value = to_float4(load4(g_row, channel, p.head_dim, x.vector), g_row);
        return x.rotated ? rope4(p.rope, g_row, channel, p.head_dim, position, value, x.vector && tables_vectorise)
                         : value;
      };
      Element* const g_to = reinterpret_cast<Element*>(copy) + (item * x.heads + h) * p.head_dim + d;
      *reinterpret_cast<uint4*>(g_to) = chunk_of<Element>(part(d), part(d + 4));
    }
  }
}
