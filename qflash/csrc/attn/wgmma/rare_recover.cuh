// Rare-tile policy of 16-bit scores: recovers from scores that outgrew their reference. The weights have overwritten
// the scores, so they are recomputed from shared memory, and outputs and sums are rescaled to the new reference.
#pragma once

#include "attn/wgmma/scores_16bit.cuh"
#include "attn/wgmma/weights_16bit.cuh"

namespace qf {
namespace wgmma {

template <class Config>
struct Recover {
  using Work = WorkTile<Config>;
  using Outputs = float[1][Config::kOTiles][4];

  // Sums of weights show what is rare, so P is not needed yet: tiles are released before it is rounded.
  static constexpr bool kRoundsLast = true;

  const SharedMemory<Config>& s;

  template <class Params>
  __device__ __forceinline__ Recover(const Params&, const SharedMemory<Config>& shared) : s(shared) {}
  __device__ __forceinline__ void begin() {}

  template <class Scores, class Weights>
  __device__ __forceinline__ bool due(const Scores& scores, const Weights&, const RowState& rows, int) const {
    return scores.outgrown || rows.moved;
  }
  template <class Scores, class Weights>
  __device__ __forceinline__ void run(const Work& work, int key0, bool whole, int q_stage, int k_stage, int,
                                      Scores& scores, Weights&, RowState& rows, Outputs& O) {
    if (scores.outgrown) {
      exchange_outputs<true>(O);
      scores.weigh_again(s, work, key0, whole, q_stage, k_stage, rows);
      exchange_outputs<false>(O);
    }
    if (rows.moved) rescale_outputs(O, rows.rescale);
  }

 private:
  // Moves outputs to scratch memory and back, if there are not enough registers for them and the recomputed scores.
  template <bool kSave>
  __device__ __forceinline__ void exchange_outputs(Outputs& O) {
    if (Config::kScratchBytes == 0) return;
    float* const s_own = reinterpret_cast<float*>(s.scratch) + fresh_tid() - kWarpgroupThreads;
#pragma unroll
    for (int j = 0; j < Config::kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s_value = s_own[(4 * j + e) * (Config::kConsumers * kWarpgroupThreads)];
        if (kSave)
          s_value = O[0][j][e];
        else
          O[0][j][e] = s_value;
      }
  }
};

}  // namespace wgmma
}  // namespace qf
