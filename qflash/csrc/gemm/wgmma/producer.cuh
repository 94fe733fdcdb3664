// The producers: one thread issues the TMA loads of x and w, one warp loads the terms that the epilogue applies to
// accumulators.
#pragma once

#include <cuda.h>

#include "gemm/epilogue.cuh"
#include "gemm/wgmma/shared_memory.cuh"
#include "gemm/wgmma/walk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

struct TensorMaps {
  CUtensorMap x, w, up;
  CUtensorMap out, pre, pre_up;
};

// Loads a box of an operand: lines from `line` on, one step along k from `k` on.
template <class Operand, int kBlocks>
__device__ __forceinline__ void load_box(char* s_to, const CUtensorMap& map, int line, int k, Mbarrier* full) {
  const int c0 = Operand::kAlongLines ? line : k, c1 = Operand::kAlongLines ? k : line;
  if constexpr (kBlocks == 1)
    copy_box(s_to, &map, c0, c1, 0, 0, full);
  else
    copy_box_to((1 << kBlocks) - 1, s_to, &map, c0, c1, 0, 0, full);
}

// Loads x and w of every step, as far ahead as there are empty stages. Each block of a cluster loads its share of w for
// all of them.
template <class Config>
__device__ __forceinline__ void produce(const QfLinearParams& p, const Walk& walk, const TensorMaps& maps,
                                        const SharedMemory<Config>& s) {
  using X = typename Config::X;
  using W = typename Config::W;
  const int stage_bytes = Config::kStageBytes - X::missing_bytes(p.m);
  const int rank = Config::kCluster > 1 ? int(cluster_rank()) : 0;
  const int first_k = (chains<Config>(p) ? walk.steps / 2 : walk.steps) * Config::kStep;  // of the first of two weights
  RingPosition<Config::kStages> at;
  walk.for_each<Config>([&](const Work& work) {
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step, at.advance()) {
      const int k = (work.first_step + step) * Config::kStep;
      char* const s_x = s.x + at.stage() * X::Tile::kBytes;
      char* const s_w = s.w + at.stage() * W::Tile::kBytes;
      Mbarrier* const full = &s.steps->full[at.stage()];
      at.wait_empty(*s.steps);
      mbarrier_arrive_expect(full, stage_bytes);
#pragma unroll
      for (int i = 0; i < X::kBoxes; ++i)
        load_box<X, 1>(s_x + i * X::kBoxBytes, maps.x, work.row0 + rank * Config::kRows + i * X::kBoxLines, k, full);
#pragma unroll
      for (int own = 0; own < Config::kOwnWBoxes; ++own) {
        const int i = rank * Config::kOwnWBoxes + own;
        const bool beside = Config::kTwoProducts && i >= W::kBoxes / 2, behind = Config::kChained && k >= first_k;
        const int column = work.column0 + (beside ? i - W::kBoxes / 2 : i) * W::kBoxLines;
        load_box<W, Config::kCluster>(s_w + i * W::kBoxBytes, beside || behind ? maps.up : maps.w, column,
                                      behind ? k - first_k : k, full);
      }
    }
  });
}

// Loads what the epilogue of a tile needs in addition to its accumulators, during its main loop: bias and scales of its
// columns, scales of its rows. One warp.
template <class Config>
__device__ __forceinline__ void stage_terms(const QfLinearParams& p, const Walk& walk, const SharedMemory<Config>& s) {
  const int lane = int(threadIdx.x) % 32, rank = Config::kCluster > 1 ? int(cluster_rank()) : 0;
  RingPosition<1> at;
  walk.for_each<Config>([&](const Work& work) {
    at.wait_empty(*s.terms);
    for (int i = lane; i < Config::kColumns; i += 32) {
      const bool up = Config::kTwoProducts && i >= Config::kOutColumns;
      const int column = work.column0 + i % Config::kOutColumns;
      const void* const g_bias = up ? p.up_bias : p.bias;
      const float* const g_scale = up ? p.up_scale : p.w_scale;
      const bool inside = column < p.n;
      s.bias[i] = g_bias && inside ? element(g_bias, p.bias_dtype, column) : 0.0f;
      if constexpr (Config::kIntegers)
        s.w_scale[i] = g_scale && inside ? g_scale[column * (up ? p.up_scale_stride : p.w_scale_stride)] : 1.0f;
    }
    if constexpr (Config::kIntegers) {
      const int row0 = work.row0 + rank * Config::kRows;
      for (int i = lane; i < Config::kRows; i += 32) s.x_scale[i] = row0 + i < p.m ? row_scale(p, row0 + i) : 1.0f;
    }
    at.fill(*s.terms);  // each lane arrives for what it wrote
    at.advance();
  });
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
