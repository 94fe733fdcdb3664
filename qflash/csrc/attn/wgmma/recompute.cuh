// Recomputes the scores of one warp's rows from the tiles of q and K that are still in shared memory: for the rare tile
// whose weights outgrew their reference after they had overwritten its scores.
#pragma once

#include "attn/mma/product.cuh"
#include "attn/wgmma/shared_memory.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/order.cuh"

namespace qf {
namespace wgmma {

// S += Q K^T. Like qk_mma(), which would hold more of K at once than there are registers for.
template <class Multiplier, class Config, class Sum>
__device__ __forceinline__ void recompute_scores(Sum (&S)[1][Config::kNTiles][4], const SharedMemory<Config>& s,
                                                 int q_stage, int k_stage) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  const char* s_q = s.q + q_stage * QTile::kBytes + warp_row() * QTile::kRowBytes;
  const char* s_k = s.k + k_stage * KTile::kBytes;
  constexpr int kChunks = QTile::kChunks;
  const auto q_lane = rows_then_chunks<kChunks>(lane_index());
  const auto k_lane = chunks_then_rows<kChunks>(lane_index());
#pragma unroll 1
  for (int pair = 0; pair < QTile::kCount * kChunks / 2; ++pair) {
    const int panel = pair / (kChunks / 2), in_panel = pair % (kChunks / 2);
    uint32_t q[4];
    ldmatrix_x4(q, s_q + panel * QTile::kPanelBytes + q_lane.at(0, in_panel));
#pragma unroll
    for (int j = 0; j < Config::kNTiles; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, s_k + panel * KTile::kPanelBytes + k_lane.at(8 * j, in_panel));
      Multiplier::multiply(S[0][j], q, k[0], k[1]);
      Multiplier::multiply(S[0][j + 1], q, k[2], k[3]);
      if (never(q_lane.row_bytes)) return;  // keeps the compiler from loading all of K at once
    }
  }
}

}  // namespace wgmma
}  // namespace qf
