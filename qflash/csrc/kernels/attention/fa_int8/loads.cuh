// Loads tiles of q, k and v, and their scales, into the shared memory and the registers of a block of `fa_int8`.
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/mma/tile.cuh"
#include "kernels/attention/fa_int8/state.cuh"

namespace qf {
namespace fa_int8 {

using QWalk = ChunkWalk<kBlockM, kByteChunks, kThreads>;
using KWalk = ChunkWalk<kBlockN, kByteChunks, kThreads>;
using VWalk = ChunkWalk<kBlockN, kChunks, kThreads>;
using Order = InRuns<kBlockN>;

struct Access {
  bool q, k, v, out;  // which tensors may be copied 16 bytes at a time
  int k_shift;        // K's tokens share scales in groups of 2^k_shift
};

// Accumulators with zero points may be too large for kMagicBits, and are then plain integers.
template <bool kZeroPoints>
constexpr bool kConverts = kZeroPoints && kHeadDim > kMostMagicDim;

// The parameters are those of the kernel.
template <bool kAsync, bool kZeroPoints, bool kIntegerV>
struct Loads {
  const QfAttnParams& p;
  const Grid& grid;
  const Access& access;
  const State& s_state;
  char *s_q, *s_kv;
  float *s_row_bias, *s_q_scale;  // of each row of the block

  // Q, and the values of each of its rows. Copies belong to the open group of cp.async.
  __device__ __forceinline__ void load_q() const {
    const Sequence& seq = s_state.seq;
    const int& b = s_state.b;
    const HeadRows<int8_t> q(p.q, b, seq.q0, s_state.h, seq.len_q, p.head_dim, false);
    if constexpr (kAsync)
      copy_async<QWalk>(s_q, q.g_head, q.stride_t, s_state.block_row, seq.len_q, p.head_dim);
    else
      copy_through_registers<QWalk>(s_q, s_state.block_row, seq.len_q, p.head_dim, 16,
                                    [&](int row, int d) { return load_bytes(q.row(row), d, p.head_dim, access.q); });
    for (int row = threadIdx.x; row < kBlockM; row += kThreads) {
      const int i = s_state.block_row + row;
      if (p.lse || p.sinks || !scales_plainly(p.scale, p.softcap)) {  // else it is never read
        s_row_bias[row] = i >= seq.len_q ? 0.0f
                          : p.q_dot_mean ? p.q_dot_mean[(int64_t(b) * p.q_heads + s_state.h) * p.q_len + i]
                          : p.kv.k_mean  ? q_dot_mean_of_integers(p, q.row(i), b, s_state.h, i)
                                         : 0.0f;
        if (kZeroPoints && i < seq.len_q) s_row_bias[row] += bias_of_zero_points(p, b, s_state.h, i);
      }
      s_q_scale[row] = i >= seq.len_q ? 0.0f : scale_of_row(p, q.row(i), b, s_state.h, i) * fabsf(p.scale) * kLog2e;
    }
  }

  // A tile of K followed by one of V; with zero points also what the accumulators of its keys start at.
  __device__ __forceinline__ void load_kv(char* s_tiles, int key0) const {
    const Sequence& seq = s_state.seq;
    char* const s_v = s_tiles + kKBytes;
    if constexpr (kZeroPoints) {
      constexpr int32_t kStart = kConverts<kZeroPoints> ? 0 : kMagicBits;
      for (int row = fresh_tid(); row < kBlockN; row += kThreads) {
        const int key = min(key0 + Order::source(row), seq.len_k - 1);
        s_starts_of(s_tiles)[row] = kStart - s_state.zero_point * s_state.k_sums[key];
      }
    }
    if constexpr (kAsync) {
      copy_async<KWalk, Order>(s_tiles, static_cast<const int8_t*>(s_state.k), p.kv.k.stride_t, key0, seq.len_k,
                               p.head_dim);
      copy_async<VWalk, Order>(s_v, static_cast<const Element*>(s_state.v), p.kv.v.stride_t, key0, seq.len_k,
                               p.head_dim);
      cp_async_commit();
    } else {
      const HeadRows<int8_t> k(p.kv.k, s_state.b, seq.k0, kv_head(), seq.len_k, p.head_dim, false);
      copy_through_registers<KWalk, Order>(s_tiles, key0, seq.len_k, p.head_dim, 16, [&](int row, int d) {
        return load_bytes(k.row(row), d, p.head_dim, access.k);
      });
      if constexpr (kIntegerV)
        copy_through_registers<VWalk, Order>(s_v, key0, seq.len_k, p.head_dim, kPerChunk, [&](int key, int d) {
          float x[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] = d + e < p.head_dim ? value(key, d + e) : 0.0f;
          return chunk_of<Element>(make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7]));
        });
      else
        copy_through_registers<VWalk, Order>(
            s_v, HeadRows<Element>(p.kv.v, s_state.b, seq.k0, kv_head(), seq.len_k, p.head_dim, grid.vector.v), key0,
            access.v);
    }
  }
  __device__ __forceinline__ int32_t* s_starts_of(const char* s_tiles) const {
    return reinterpret_cast<int32_t*>(s_q + kSharedBytes) + (s_tiles - s_kv) / kStageBytes * kBlockN;
  }

  // First key of this lane's run in the tile that starts at key0.
  __device__ static __forceinline__ int first_of_lane(int key0) { return key0 + fresh_tid() % 4 * kRun; }
  // The scales of that run, straight from global memory.
  __device__ __forceinline__ void load_k_scales(float (&scales)[kParts], int key0) const {
    const float* const g_scales = s_state.k_scales;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      const int key = first_of_lane(key0) + c * kKeyGroup;
      const float scale = key < s_state.seq.len_k ? g_scales[key >> access.k_shift] : 0.0f;
      scales[c] = kZeroPoints ? scale : number_or_zero(scale);
    }
  }

  // V of one key and channel, as a float.
  __device__ __forceinline__ float value(int key, int d) const {
    if constexpr (kIntegerV) {
      const int8_t integer = rows_of_v<int8_t>().row(key)[d];
      const float scale = scale_at(p.kv.v_scales, s_state.b, kv_head(), key);
      if (p.kv.v_scales.zero_point) return scale * float(int(integer) - *p.kv.v_scales.zero_point);
      return integer == -128 ? nan() : scale * float(int(integer));
    } else {
      return to_float(rows_of_v<Element>().row(key)[d]);
    }
  }

 private:
  __device__ __forceinline__ int kv_head() const { return s_state.h / (p.q_heads / p.kv_heads); }
  template <class Stored>
  __device__ __forceinline__ HeadRows<Stored> rows_of_v() const {
    return HeadRows<Stored>(p.kv.v, s_state.b, s_state.seq.k0, kv_head(), 0, 0, false);
  }
};

}  // namespace fa_int8
}  // namespace qf
