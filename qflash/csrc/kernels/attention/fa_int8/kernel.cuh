// fa_int8: FlashAttention with INT8 scores. S = Q Kt of integers, exact; P V in 16 bits with float32 sums.
//
// One block computes kBlockM rows of one head, walking over the keys in tiles of kBlockN (head_dim 128 on Hopper):
//
//              kBlockN = 64 keys, dealt so that a lane's 16 columns are 16 neighbours (InRuns, attn/mma/tile.cuh)
//             +-------------------+
//    warp 0   | S = Q Kt  32 x 64 |  int32 sums that start at the bits of 1.5 * 2^23 and so are floats when done
//    warp 1   |           32 x 64 |  slope of a score = scale of its row * scale of its 16 keys: one a row and lane
//    warp 2   |           32 x 64 |
//    warp 3   |           32 x 64 |
//             +-------------------+
//    O += P V   16 bits, as in fa_mma                 Roles: every warp does everything, for its own 32 rows.
//
// Registers: 64 of S and 128 of O a lane, fragments, 4 slopes, row statistics; the rest of 255 is addresses.
//
// Shared memory (head_dim 128, Hopper), swizzled (smem/swizzle.cuh; rows of Q and K have 8 chunks, of V 16):
//   s_q         [kBlockM][kHeadDim] int8   16 KB   at the end the rounded outputs take the place of everything above
//   s_kv        2 stages of K, V           48 KB   [kBlockN][kHeadDim] int8, then 16-bit
//   s_lift      [kBlockM] floats                   what all scores of a row have in common: lse and softcap need it
//   s_q_scale   [kBlockM] floats                   scales of the rows, times |scale| log2(e)
//   s_state     sequence, mask, ranges of keys, where K's scales are
//   s_starts    [2][kBlockN] int32                 with zero points only: what the sums of each key start at
//
// Pipeline: as fa_mma's. cp.async fills one stage while the other is read, one barrier a tile; rows at odd addresses,
//   and INT8 V, which becomes 16-bit on the way, pass through registers. K's scales are loaded under the products.
//
// Masks, softmax, NaN in V: as fa_mma's. Keys that are not finite are -128 throughout. In heads that may have some,
//   each thread looks for that in the rows it copied, at the barrier; where it is found, scores become NaN before the
//   mask.
//
// Bound: the tensor cores, at 0.75 of fa_mma's mma (64 for S and 128 for O, per warp and tile); then the exponentials.
//   See docs/kernels/fa_int8.md for the count, the prediction and what was measured.
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/mma/nonfinite.cuh"
#include "attn/mma/output.cuh"
#include "attn/mma/product.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/mma/state.cuh"
#include "attn/mma/tile.cuh"
#include "attn/schedule.cuh"
#include "kernels/attention/fa_int8/config.h"

namespace qf {
namespace fa_int8 {

using QWalk = ChunkWalk<kBlockM, kByteChunks, kThreads>;
using KWalk = ChunkWalk<kBlockN, kByteChunks, kThreads>;
using VWalk = ChunkWalk<kBlockN, kChunks, kThreads>;
using Order = InRuns<kBlockN>;
struct State : BlockState<kWarps, kWarpRows> {
  const float* k_scales;  // of the sequence's keys in their head
  bool may_be_wild;       // some of them may not be finite
  const int32_t* k_sums;  // with zero points: of their integers
  int zero_point;         // q's
};
static_assert(sizeof(State) <= kStateBytes, "");

struct Access {
  bool q, k, v, out;  // which tensors may be copied 16 bytes at a time
  int k_shift;        // K's tokens share scales in groups of 2^k_shift
};

// q . (what smoothing took off K) of one row, from its integers.
__device__ inline float lift_from_integers(const QfAttnParams& p, const int8_t* g_q, int b, int h, int row) {
  const float* const g_mean = p.kv.k_mean + (int64_t(b) * p.kv_heads + h / (p.q_heads / p.kv_heads)) * p.head_dim;
  const int zero = p.q_scales.zero_point ? *p.q_scales.zero_point : 0;
  float sum = 0.0f;
  for (int d = 0; d < p.head_dim; ++d) sum += float(int(g_q[d]) - zero) * g_mean[d];
  return sum * scale_at(p.q_scales, b, h, row);
}

// What all keys have in common in one row's products of (q - zq) and (k - zk), see start_with_each. Both have one
// scale.
__device__ inline float lift_of_zero_points(const QfAttnParams& p, int b, int h, int row) {
  const int sum = p.q_scales.sums[(int64_t(b) * p.q_heads + h) * p.q_len + row];
  const int zq = *p.q_scales.zero_point, zk = *p.kv.k_scales.zero_point;
  return float(zk * (p.head_dim * zq - sum)) * *p.q_scales.scale * *p.kv.k_scales.scale;
}

// The scale of one row of q; NaN for a row that is not finite, which its scale does not tell where rows share one.
__device__ inline float scale_of_row(const QfAttnParams& p, const int8_t* g_q, int b, int h, int row) {
  return !p.q_scales.zero_point && g_q[0] == -128 ? nan() : scale_at(p.q_scales, b, h, row);
}

}  // namespace fa_int8
}  // namespace qf

// kAsync: q, k and v are aligned and copied asynchronously. kZeroPoints: q and k have zero points, and sums that
// correct for them. kIntegerV: V is INT8 too, and becomes Element on its way into shared memory. Sums: lse needs
// ExactSums.
template <bool kAsync, bool kZeroPoints, bool kIntegerV, class Sums>
__global__ void __launch_bounds__(qf::fa_int8::kThreads, qf::fa_int8::kMinBlocks)
    qf_fa_int8_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid,
                      const __grid_constant__ qf::fa_int8::Access access) {
  using namespace qf;
  using namespace qf::fa_int8;
  constexpr bool kConvert = kZeroPoints && kHeadDim > kMostMagicDim;
  constexpr float kOffset = kConvert ? 0.0f : -kMagic;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_kv = s_q + kQBytes;  // kStages pairs of tiles, K then V
  float* const s_lift = reinterpret_cast<float*>(s_q + kTilesBytes);
  float* const s_q_scale = s_lift + kBlockM;  // times |scale| log2(e): K's scale apart, from dots to base-2 scores
  State& s_state = *reinterpret_cast<State*>(s_q + kTilesBytes + kRowBytes);

  {
    const Work work(p, grid);
    const Sequence seq = read_sequence(p, work.b);
    fill_unserved_rows<Element>(p, seq, work.b, work.h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
    if (!seq.good || work.row_tile * kBlockM >= seq.len_q) return;
    const int kv_head = work.h / (p.q_heads / p.kv_heads);
    const HeadRows<int8_t> k(p.kv.k, work.b, seq.k0, kv_head, 0, 0, false);
    const HeadRows<Element> v(p.kv.v, work.b, seq.k0, kv_head, 0, 0, false);
    s_state.fill(p, work, seq, k.g_head, v.g_head);
    if (threadIdx.x == 0) {
      s_state.k_scales = p.kv.k_scales.scale + work.b * p.kv.k_scales.stride_b + kv_head * p.kv.k_scales.stride_h;
      s_state.may_be_wild = !p.kv.k_nonfinite || p.kv.k_nonfinite[int64_t(work.b) * p.kv_heads + kv_head] != 0;
      if constexpr (kZeroPoints) {
        s_state.k_sums = p.kv.k_scales.sums + (int64_t(work.b) * p.kv_heads + kv_head) * p.k_len;
        s_state.zero_point = *p.q_scales.zero_point;
      }
    }
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int& b = s_state.b;
  const auto kv_head = [&] { return s_state.h / (p.q_heads / p.kv_heads); };
  const auto row_index = [&](int row) { return (int64_t(b) * p.q_heads + s_state.h) * p.q_len + row; };

  const auto load_q = [&] {
    const HeadRows<int8_t> q(p.q, b, seq.q0, s_state.h, seq.len_q, p.head_dim, false);
    if constexpr (kAsync)
      copy_async<QWalk>(s_q, q.g_head, q.stride_t, s_state.block_row, seq.len_q, p.head_dim);
    else
      copy_through_registers<QWalk>(s_q, s_state.block_row, seq.len_q, p.head_dim, 16,
                                    [&](int row, int d) { return load_bytes(q.row(row), d, p.head_dim, access.q); });
    for (int row = threadIdx.x; row < kBlockM; row += kThreads) {
      const int i = s_state.block_row + row;
      if (p.lse || !scales_plainly(p.scale, p.softcap)) {  // else nobody reads it
        s_lift[row] = i >= seq.len_q ? 0.0f
                      : p.lift       ? p.lift[row_index(i)]
                      : p.kv.k_mean  ? lift_from_integers(p, q.row(i), b, s_state.h, i)
                                     : 0.0f;
        if (kZeroPoints && i < seq.len_q) s_lift[row] += lift_of_zero_points(p, b, s_state.h, i);
      }
      s_q_scale[row] = i >= seq.len_q ? 0.0f : scale_of_row(p, q.row(i), b, s_state.h, i) * fabsf(p.scale) * kLog2e;
    }
  };
  const auto integer_v = [&](int key, int d) {
    const int8_t value = HeadRows<int8_t>(p.kv.v, b, seq.k0, kv_head(), 0, 0, false).row(key)[d];
    const float scale = scale_at(p.kv.v_scales, b, kv_head(), key);
    if (p.kv.v_scales.zero_point) return scale * float(int(value) - *p.kv.v_scales.zero_point);
    return value == -128 ? nan() : scale * float(int(value));
  };
  const auto s_starts_of = [&](const char* s_tiles) {
    return reinterpret_cast<int32_t*>(s_q + kSharedBytes) + (s_tiles - s_kv) / kStageBytes * kBlockN;
  };
  const auto load_kv = [&](char* s_tiles, int key0) {
    char* const s_v = s_tiles + kKBytes;
    if constexpr (kZeroPoints) {
      for (int row = fresh_tid(); row < kBlockN; row += kThreads) {
        const int key = min(key0 + Order::source(row), seq.len_k - 1);
        s_starts_of(s_tiles)[row] = (kConvert ? 0 : kMagicBits) - s_state.zero_point * s_state.k_sums[key];
      }
    }
    if constexpr (kAsync) {
      copy_async<KWalk, Order>(s_tiles, static_cast<const int8_t*>(s_state.k), p.kv.k.stride_t, key0, seq.len_k,
                               p.head_dim);
      copy_async<VWalk, Order>(s_v, static_cast<const Element*>(s_state.v), p.kv.v.stride_t, key0, seq.len_k,
                               p.head_dim);
      cp_async_commit();
    } else {
      const HeadRows<int8_t> k(p.kv.k, b, seq.k0, kv_head(), seq.len_k, p.head_dim, false);
      copy_through_registers<KWalk, Order>(s_tiles, key0, seq.len_k, p.head_dim, 16, [&](int row, int d) {
        return load_bytes(k.row(row), d, p.head_dim, access.k);
      });
      if constexpr (kIntegerV)
        copy_through_registers<VWalk, Order>(s_v, key0, seq.len_k, p.head_dim, kPerChunk, [&](int key, int d) {
          float x[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] = d + e < p.head_dim ? integer_v(key, d + e) : 0.0f;
          return chunk_of<Element>(make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7]));
        });
      else
        copy_through_registers<VWalk, Order>(
            s_v, HeadRows<Element>(p.kv.v, b, seq.k0, kv_head(), seq.len_k, p.head_dim, grid.vector.v), key0, access.v);
    }
  };
  // First key of this lane's run in the tile that starts at key0.
  const auto first_of_lane = [](int key0) { return key0 + fresh_tid() % 4 * kRun; };
  const auto load_k_scales = [&](float (&scales)[kParts], int key0) {
    const float* const g_scales = s_state.k_scales;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      const int key = first_of_lane(key0) + c * kKeyGroup;
      const float scale = key < seq.len_k ? g_scales[key >> access.k_shift] : 0.0f;
      scales[c] = kZeroPoints ? scale : number_or_zero(scale);
    }
  };
  const auto s_q_of_warp = [&] { return s_q + fresh_tid() / 32 * (kWarpRows * kHeadDim); };

  float O[kMTiles][kChunks][4] = {};
  RowStatistics<Sums> rows[kMTiles];
  const auto first_key = [&] { return s_state.block_keys.begin / kBlockN * kBlockN; };
  if (s_state.block_keys.begin < s_state.block_keys.end) {
    load_q();
    if (kStages > 1) load_kv(s_kv, first_key());
  }
  int stage = 0;
  for (int key0 = first_key(); key0 < s_state.block_keys.end; key0 += kBlockN) {
    char* const s_k = s_kv + stage * kStageBytes;
    char* const s_v = s_k + kKBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the tile before
      load_kv(s_k, key0);
    }
    float k_scale[kParts];
    load_k_scales(k_scale, key0);              // on their way while the products are computed
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time q's
    // The barrier makes the tile visible to all, and says that nobody reads the other stage any more. It also tells
    // whether there is something odd: in V, where rows see the tile only in part, what zero weights would not blank
    // out; in K, where the head may have some, a key that is not finite.
    const bool whole = s_state.whole_for_block(key0, kBlockN);
    const bool search = !kZeroPoints && s_state.may_be_wild;
    bool odd = false;
    if (whole && !search)
      __syncthreads();
    else
      odd = __syncthreads_or((!whole && own_chunks_nonfinite<Element, VWalk>(s_v)) ||
                             (search && own_rows_wild<KWalk>(s_k)));
    if (odd && !whole) {
      s_state.spoiled = true;
      clear_nonfinite<Element, VWalk>(s_v);
      __syncthreads();  // the zeros are in place
    }
    if (kStages > 1) {
      stage ^= 1;
      if (key0 + kBlockN < s_state.block_keys.end) load_kv(s_kv + stage * kStageBytes, key0 + kBlockN);
    }
    if (!whole && s_state.idle(key0, kBlockN)) continue;

    int32_t dots[kMTiles][kNTiles][4];
    if constexpr (kZeroPoints)
      start_with_each(dots, s_starts_of(s_k) + State::column());
    else
      start_with(dots, kMagicBits);
    qk_mma<Scores, kByteChunks>(dots, s_q_of_warp(), s_k, fresh_tid() % 32);
    float S[kMTiles][kNTiles][4];
    to_floats<kConvert>(S, dots);
    if (!kZeroPoints && odd) spoil_wild<kByteChunks>(S, s_k, State::column());
    const int lane_row = fresh_tid() / 32 * kWarpRows + fresh_tid() % 32 / 4;  // in the block
    float q_scale[2 * kMTiles];
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) q_scale[r] = s_q_scale[lane_row + 8 * r];
    float slopes[2 * kMTiles][kParts];
    bool steep = false;
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        slopes[r][c] = slope_of(q_scale[r], k_scale[c]);
        steep |= slopes[r][c] > kSteep;
      }
    const bool lifts = !scales_plainly(p.scale, p.softcap);
    const bool plain = !lifts && (kConvert || !__any_sync(0xffffffffu, steep));
    if (!plain) {
      lift_and_scale(S, slopes, kOffset, lifts ? s_lift + lane_row : nullptr, p);
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
        for (int c = 0; c < kParts; ++c) slopes[r][c] = 1.0f;
    }
    if (!whole && !s_state.whole_for_warp(key0, kBlockN))
      mask_scores(S, TileMask<8>(s_state.mask, s_state.row0(), first_of_lane(key0)),
                  [](int j, int e) { return 2 * j + e; });
    const float offset = plain ? kOffset : 0.0f;
    online_softmax<kParts>(
        S, [&](int r, int c) { return slopes[r][c]; }, [&](int r, int c) { return offset * slopes[r][c]; }, rows, O,
        plain && !kConvert);
    pv_mma<Tensor, kChunks>(O, rows, S, s_v, fresh_tid() % 32);
  }

  __syncthreads();  // the tiles are done with: the outputs take their place
  const int lane = threadIdx.x % 32, warp_row = s_state.block_row + threadIdx.x / 32 * kWarpRows;
  const int rows_here = min(kWarpRows, seq.len_q - warp_row);
  if (rows_here <= 0) return;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + s_state.h * p.lse_stride_h + seq.q0 : nullptr;
  const bool lifts = scales_plainly(p.scale, p.softcap);  // else the scores hold it already
  finish_rows(O, rows, s_state.mask, s_state.row0(), g_lse, lane % 4 == 0,
              [&](int row) { return lifts ? p.scale * s_lift[row - s_state.block_row] : 0.0f; });
  char* const s_out = s_q + threadIdx.x / 32 * (kWarpRows * kHeadDim * 2);
  round_rows<Tensor>(O, s_out, lane);
  if (s_state.spoiled) {
    const auto v = [&](int key, int d) {
      if constexpr (kIntegerV) return integer_v(key, d);
      return to_float(HeadRows<Element>(p.kv.v, b, seq.k0, kv_head(), 0, 0, false).row(key)[d]);
    };
    for (int key = first_key(); key < s_state.block_keys.end; key += kBlockN)
      if (!s_state.whole_for_block(key, kBlockN))
        add_nonfinite<kChunks, Element>(s_out, warp_row, rows_here, p.head_dim, key, kBlockN, s_state.mask, lane, v);
    __syncwarp();  // other lanes read what this one wrote
  }
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + s_state.h * p.out.stride_h +
                         (seq.q0 + warp_row) * p.out.stride_t;
  store_rows<kChunks>(s_out, g_out, p.out.stride_t, rows_here, p.head_dim, access.out, lane);
}
