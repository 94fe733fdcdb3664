// fa_int8: FlashAttention with INT8 scores. S = Q Kt of integers, exact; P V in 16 bits with float32 accumulators.
//
// One block computes kBlockM rows of one head in a main loop over tiles of kBlockN keys (head_dim 128 on Hopper):
//
//              kBlockN = 64 keys, ordered so that a lane's 16 columns are 16 neighbours (InRuns, attn/mma/tile.cuh)
//             +-------------------+
//    warp 0   | S = Q Kt  32 x 64 |  int32 accumulators start at the bits of 1.5 * 2^23, and so are floats when done
//    warp 1   |           32 x 64 |  slope of a score = scale of its row * scale of its 16 keys: one per row and lane
//    warp 2   |           32 x 64 |
//    warp 3   |           32 x 64 |
//             +-------------------+
//    O += P V   16 bits, as in fa_mma                 Roles: every warp does everything, for its own 32 rows.
//
// Registers: 64 of S and 128 of O per lane, fragments, 4 slopes, row statistics; the rest of 255 are addresses.
//
// Shared memory (head_dim 128, Hopper), swizzled (smem/swizzle.cuh; rows of Q and K have 8 chunks, of V 16):
//   s_q         [kBlockM][kHeadDim] int8   16 KB   at the end the rounded outputs take the place of everything above
//   s_kv        2 stages of K, V           48 KB   [kBlockN][kHeadDim] int8, then 16-bit
//   s_row_bias  [kBlockM] floats                   what all scores of a row have in common: for lse, sinks, softcap
//   s_q_scale   [kBlockM] floats                   scales of the rows, times |scale| log2(e)
//   s_state     sequence, mask, ranges of keys, where K's scales are
//   s_starts    [2][kBlockN] int32                 with zero points only: what the accumulators of each key start at
//
// Pipeline: as fa_mma's. cp.async fills one stage while the other is read, one barrier per tile; rows at odd addresses,
//   and INT8 V, which is converted to 16 bits, go through registers. K's scales are loaded during the products.
//
// Masks, softmax, NaN in V: as fa_mma's. Nonfinite keys are -128 throughout. In heads that may have some, each thread
//   checks the rows it copied, at the barrier; where one is found, scores become NaN before the mask.
//
// Bound: the tensor cores, at 0.75 of fa_mma's mma (64 for S and 128 for O, per warp and tile); then the exponentials.
//   See docs/kernels/fa_int8.md for the count, the prediction and the measurement.
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
#include "kernels/attention/fa_int8/loads.cuh"
#include "kernels/attention/fa_int8/state.cuh"

// kAsync: q, k and v are aligned and copied asynchronously. kZeroPoints: q and k have zero points, and sums that
// correct for them. kIntegerV: V is INT8 too, and is converted to Element on its path into shared memory. Sums: lse
// needs ExactSums.
template <bool kAsync, bool kZeroPoints, bool kIntegerV, class Sums>
__global__ void __launch_bounds__(qf::fa_int8::kThreads, qf::fa_int8::kMinBlocks)
    qf_fa_int8_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid,
                      const __grid_constant__ qf::fa_int8::Access access) {
  using namespace qf;
  using namespace qf::fa_int8;
  constexpr bool kConvert = kConverts<kZeroPoints>;
  constexpr float kOffset = kConvert ? 0.0f : -kMagic;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_kv = s_q + kQBytes;  // kStages pairs of tiles, K then V
  float* const s_row_bias = reinterpret_cast<float*>(s_q + kTilesBytes);
  float* const s_q_scale = s_row_bias + kBlockM;  // times |scale| log2(e): dots to base-2 scores, except for K's scale
  State& s_state = *reinterpret_cast<State*>(s_q + kTilesBytes + kRowBytes);
  if (!s_state.template begin<kZeroPoints>(p, grid)) return;
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int& b = s_state.b;
  const Loads<kAsync, kZeroPoints, kIntegerV> loads = {p, grid, access, s_state, s_q, s_kv, s_row_bias, s_q_scale};
  const auto s_q_of_warp = [&] { return s_q + fresh_tid() / 32 * (kWarpRows * kHeadDim); };

  float O[kMTiles][kChunks][4] = {};
  RowStatistics<Sums> rows[kMTiles];
  const auto first_key = [&] { return s_state.block_keys.begin / kBlockN * kBlockN; };
  if (s_state.block_keys.begin < s_state.block_keys.end) {
    loads.load_q();
    if (kStages > 1) loads.load_kv(s_kv, first_key());
  }
  int stage = 0;
  for (int key0 = first_key(); key0 < s_state.block_keys.end; key0 += kBlockN) {
    char* const s_k = s_kv + stage * kStageBytes;
    char* const s_v = s_k + kKBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the previous tile
      loads.load_kv(s_k, key0);
    }
    float k_scale[kParts];
    loads.load_k_scales(k_scale, key0);        // in flight while the products are computed
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time q's
    // The barrier makes the tile visible to all warps, and after it no warp reads the other stage any more. It also
    // returns whether something is nonfinite: in V, where rows see the tile only in part and zero weights would not
    // mask it; in K, where the head may have such keys.
    const bool whole = s_state.whole_for_block(key0, kBlockN);
    const bool search = !kZeroPoints && s_state.may_be_nonfinite;
    bool nonfinite = false;
    if (whole && !search)
      __syncthreads();
    else
      nonfinite = __syncthreads_or((!whole && own_chunks_nonfinite<Element, VWalk>(s_v)) ||
                                   (search && own_rows_nonfinite<KWalk>(s_k)));
    if (nonfinite && !whole) {
      s_state.spoiled = true;
      clear_nonfinite<Element, VWalk>(s_v);
      __syncthreads();  // the zeros are in place
    }
    if (kStages > 1) {
      stage ^= 1;
      if (key0 + kBlockN < s_state.block_keys.end) loads.load_kv(s_kv + stage * kStageBytes, key0 + kBlockN);
    }
    if (!whole && s_state.idle(key0, kBlockN)) continue;

    int32_t dots[kMTiles][kNTiles][4];
    if constexpr (kZeroPoints)
      start_with_each(dots, loads.s_starts_of(s_k) + State::column());
    else
      start_with(dots, kMagicBits);
    qk_mma<Scores, kByteChunks>(dots, s_q_of_warp(), s_k, fresh_tid() % 32);
    float S[kMTiles][kNTiles][4];
    to_floats<kConvert>(S, dots);
    if (!kZeroPoints && nonfinite) spoil_nonfinite<kByteChunks>(S, s_k, State::column());
    const int lane_row = fresh_tid() / 32 * kWarpRows + fresh_tid() % 32 / 4;  // in the block
    float q_scale[2 * kMTiles];
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) q_scale[r] = s_q_scale[lane_row + 8 * r];
    float slopes[2 * kMTiles][kParts];
    const bool steep = find_slopes(slopes, q_scale, k_scale);
    const bool scores_hold_bias = !scales_plainly(p.scale, p.softcap);  // else lse adds it
    const bool plain = !scores_hold_bias && (kConvert || !__any_sync(0xffffffffu, steep));
    if (!plain) {
      scale_and_bias(S, slopes, kOffset, scores_hold_bias ? s_row_bias + lane_row : nullptr, p);
      set_slopes(slopes, 1.0f);
    }
    if (!whole && !s_state.whole_for_warp(key0, kBlockN))
      mask_scores(S, TileMask<8>(s_state.mask, s_state.row0(), loads.first_of_lane(key0)),
                  [](int j, int e) { return 2 * j + e; });
    const float offset = plain ? kOffset : 0.0f;
    online_softmax<kParts>(
        S, [&](int r, int c) { return slopes[r][c]; }, [&](int r, int c) { return offset * slopes[r][c]; }, rows, O,
        plain && !kConvert);
    pv_mma<Tensor, kChunks>(O, rows, S, s_v, fresh_tid() % 32);
  }

  __syncthreads();  // the tiles are no longer needed: the outputs replace them
  const int lane = threadIdx.x % 32, warp_row = s_state.block_row + threadIdx.x / 32 * kWarpRows;
  const int rows_here = min(kWarpRows, seq.len_q - warp_row);
  if (rows_here <= 0) return;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + s_state.h * p.lse_stride_h + seq.q0 : nullptr;
  const bool adds_bias = (p.lse || p.sinks) && scales_plainly(p.scale, p.softcap);  // else the scores hold it already
  finish_rows(O, rows, s_state.mask, s_state.row0(), sink_of(p, s_state.h), g_lse, lane % 4 == 0,
              [&](int row) { return adds_bias ? p.scale * s_row_bias[row - s_state.block_row] : 0.0f; });
  char* const s_out = s_q + threadIdx.x / 32 * (kWarpRows * kHeadDim * 2);
  round_rows<Tensor>(O, s_out, lane);
  if (s_state.spoiled) {
    const auto v = [&](int key, int d) { return loads.value(key, d); };
    for (int key = first_key(); key < s_state.block_keys.end; key += kBlockN)
      if (!s_state.whole_for_block(key, kBlockN))
        add_nonfinite<kChunks, Element>(s_out, warp_row, rows_here, p.head_dim, key, kBlockN, s_state.mask, lane, v);
    __syncwarp();  // other lanes read what this one wrote
  }
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + s_state.h * p.out.stride_h +
                         (seq.q0 + warp_row) * p.out.stride_t;
  store_rows<kChunks>(s_out, g_out, p.out.stride_t, rows_here, p.head_dim, access.out, lane);
}
