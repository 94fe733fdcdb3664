// What follows from the tile shape that a GEMM for Hopper has chosen: TileConfig<Shape>. Two shapes may be used in one
// translation unit: everything here depends on its template arguments only.
//
// Shape specifies (kernels/linear/sm90_gemm/config.h):
//
//   Element                   of x and w: F16, BF16 or int8_t
//   Out                       for integers the type of out; for floats that is Element or float, selected at run time
//   kActivation               QfActivation
//   kSource                   of w: one matrix; two, with half of a tile's columns each (SwiGLU); one, or two in
//                             sequence along k (chains())
//   kSumsAlone                the epilogue only rounds and stores: no residual, no pre, and out is of Element
//   kXAlongM, kWAlongN        x is contiguous along m, w along n; only for 16-bit elements
//   kConsumers                consumer warpgroups, 64 rows of the tile each
//   kColumns                  of a tile's accumulators. SwiGLU: half of gate, half of up
//   kStages                   steps along k in flight, a power of two
//   kCluster                  blocks whose tiles have the same columns: each loads a share of w for all of them
//   kBandRows                 row tiles of a band, counted in clusters (walk.cuh)
//   kLag                      steps by which the second consumer starts after the first
//   kProducerRegisters,       multiples of 8, together what the block was launched with
//   kConsumerRegisters
#pragma once

#include <type_traits>

#include "gemm/source.cuh"
#include "hopper/descriptor.cuh"
#include "ptx/wgmma.cuh"
#include "qflash_ops.h"
#include "smem/limits.h"

namespace qf {
namespace gemm {
namespace wgmma {

constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64, kWarpRows = 16;
constexpr int kStepBytes = 128, kProductBytes = 32;  // along k: of a step, of an MMA

// A stage of one operand: one step along k of kLines rows of x, or columns of w. kAlongLines: lines, not k, are
// contiguous. TMA loads it in kBoxes boxes of equally many lines.
template <class Element_, int kLines, bool kAlongLines_, int kWantedBoxes>
struct Operand {
  using Element = Element_;
  static constexpr bool kAlongLines = kAlongLines_;
  static constexpr int kStep = kStepBytes / int(sizeof(Element));  // elements along k
  static constexpr int kPanelLines = 64;                           // where lines are contiguous: 128 bytes of them
  static constexpr int kBoxes = kAlongLines ? kLines / kPanelLines : kWantedBoxes;
  static constexpr int kBoxLines = kLines / kBoxes;
  static constexpr int kBoxRows = kAlongLines ? kStep : kBoxLines;
  static_assert(!kAlongLines || sizeof(Element) == 2, "wgmma takes bytes along k alone");

  using Tile = std::conditional_t<kAlongLines, Panels<kStep, kLines>, Panels<kLines, kStep, int(sizeof(Element))>>;
  using Tiles = std::conditional_t<kAlongLines, AlongColumns<Tile>, AlongRows<Tile>>;  // as wgmma reads it
  static constexpr int kBoxBytes = Tile::kBytes / kBoxes;
  static constexpr int kWarpgroupBytes = kWarpgroupRows * kStepBytes;  // of 64 lines, contiguous in both layouts

  // If one tile has all lines of the matrix, boxes end with them, rounded up to a multiple of eight: lines outside the
  // matrix cost TMA more time than lines inside it. What is not loaded belongs to rows without results.
  __host__ __device__ static constexpr int box_rows(int64_t lines) {
    if (kAlongLines || kLines > kWarpgroupRows || lines >= kBoxLines) return kBoxRows;
    return int(lines + 7) / 8 * 8;
  }
  __host__ __device__ static constexpr int missing_bytes(int64_t lines) {
    return (kBoxRows - box_rows(lines)) * kStepBytes;
  }
};

// A warpgroup's MMA: 64 rows of x by kColumns columns of w, 32 bytes along k.
template <class Element, int kColumns>
struct Product {
  using Sum = float;
  template <bool kXAlongM, bool kWAlongN>
  __device__ static __forceinline__ void multiply(Sum (&sums)[kColumns / 8][4], uint64_t x, uint64_t w, bool add) {
    Wgmma<Element, kColumns>::template multiply<kWAlongN, kXAlongM>(sums, x, w, add);
  }
};
template <int kColumns>
struct Product<int8_t, kColumns> {
  using Sum = int32_t;
  template <bool kXAlongM, bool kWAlongN>
  __device__ static __forceinline__ void multiply(Sum (&sums)[kColumns / 8][4], uint64_t x, uint64_t w, bool add) {
    WgmmaS8<kColumns>::multiply(sums, x, w, add);
  }
};

// A panel of the epilogue: 128 bytes of each row of a warp.
template <class Out>
using OutPanel = Panels<kWarpRows, 128 / int(sizeof(Out)), int(sizeof(Out))>;

template <class Shape>
struct TileConfig : Shape {
  using Shape::kActivation, Shape::kCluster, Shape::kColumns, Shape::kConsumers, Shape::kStages;
  using typename Shape::Element;
  using Product = wgmma::Product<Element, kColumns>;
  using Sum = typename Product::Sum;
  static constexpr bool kIntegers = std::is_same_v<Element, int8_t>;  // then the epilogue has scales
  static constexpr bool kTwoProducts = Shape::kSource == Source::kPaired, kChained = Shape::kSource == Source::kChained;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kOutColumns = kTwoProducts ? kColumns / 2 : kColumns;
  static constexpr int kSumTiles = kColumns / 8, kOutTiles = kOutColumns / 8;  // blocks of 8 columns
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / 32;

  // w has at least two boxes: one for each block of a cluster to load, or one of each of two weights.
  using X = Operand<Element, kRows, Shape::kXAlongM, 1>;
  using W = Operand<Element, kColumns, Shape::kWAlongN, 2>;
  static constexpr int kStep = X::kStep, kProducts = kStepBytes / kProductBytes;
  static constexpr int kStageBytes = X::Tile::kBytes + W::Tile::kBytes;
  static constexpr int kOwnWBoxes = W::kBoxes / kCluster;  // that this block loads
  static_assert(W::kBoxes % 2 == 0 && W::kBoxes % kCluster == 0 && Shape::kLag < kStages, "");

  static constexpr int kWarpPanels = 2, kPanelBytes = kWarpRows * 128;  // of each consumer warp, used alternately
  static constexpr int kPanelsBytes = kConsumerWarps * kWarpPanels * kPanelBytes;
  static constexpr int kTermsBytes = 4 * (kIntegers ? 2 * kColumns + kRows : kColumns);
  static constexpr int kBarrierBytes = 16 * (kStages + 1);  // two per stage, two for the terms
  static constexpr int kSharedBytes = kStages * kStageBytes + kPanelsBytes + kTermsBytes + kBarrierBytes;
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");
};

// Are there two weights in sequence along k? Then k counts the rows of each, and x has two halves side by side, of
// whole steps each. For a chained Config, activation SwiGLU marks such a problem: it computes the gradients of SwiGLU.
template <class Config>
__host__ __device__ constexpr bool chains(const QfLinearParams& p) {
  return Config::kChained && p.activation == QF_SWIGLU;
}
// Is there a second weight, in either way?
template <class Config>
__host__ __device__ constexpr bool has_up(const QfLinearParams& p) {
  return Config::kTwoProducts || chains<Config>(p);
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
