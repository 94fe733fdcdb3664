// Scores of a warp's 16 rows and some tiles of eight keys, between Q Kt and the softmax.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/softmax.cuh"
#include "qflash.h"

namespace qf {
namespace decode {

// Keys that a row does not see get -inf. row, key: of S[0][0][0].
template <int kNTiles>
__device__ __forceinline__ void mask_scores(const QfAttnParams& p, const Mask& mask, float (&S)[1][kNTiles][4], int row,
                                            int key) {
  const int group = p.q_heads / p.kv_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const KeyRange keys = mask.visible(min((row + 8 * r) / group, p.q_len - 1));
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (key + 8 * j + e < keys.begin || key + 8 * j + e >= keys.end) S[0][j][2 * r + e] = -infinity();
  }
}

// Base-2 scores from integers, with the slope and the bias of each row: what precedes the exponential where that is
// more than a slope.
template <int kNTiles>
__device__ __forceinline__ void finish_scores(float (&S)[1][kNTiles][4], const float (&slope)[2],
                                              const float (&bias)[2], float softcap) {
  const bool coarsely = softens_coarsely(softcap);
#pragma unroll
  for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) S[0][j][e] = fmaf(S[0][j][e], slope[e / 2], bias[e / 2]);
    soften_four(S[0][j], softcap, coarsely);
  }
}

}  // namespace decode
}  // namespace qf
