// Tile shapes of `sm90_gemm`, and what its libraries are compiled for: -DQF_PRECISION (native or int8), -DQF_DTYPE
// (native: of x and w; int8: of out) and -DQF_ACTIVATION.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/policy.h"
#include "gemm/wgmma/config.cuh"

namespace qf {
namespace sm90_gemm {

template <bool kInt8, int kDtype>
struct Types {
  using Element = typename ElementOf<kDtype>::Type;
  using Out = Element;  // or float, selected at run time
};
template <int kDtype>
struct Types<true, kDtype> {
  using Element = int8_t;
  using Out = typename gemm::OutOf<kDtype>::Type;
};

// What all shapes of a library have in common. kXAlongM_, kWAlongN_: which dimension of x and w is contiguous.
template <bool kInt8, int kDtype, int kActivation_, bool kXAlongM_, bool kWAlongN_>
struct Problem : Types<kInt8, kDtype> {
  static constexpr int kActivation = kActivation_;
  static constexpr gemm::Source kSource = kActivation == QF_SWIGLU ? gemm::Source::kPaired : gemm::Source::kOne;
  static constexpr bool kSumsAlone = false;
  static constexpr bool kXAlongM = kXAlongM_, kWAlongN = kWAlongN_;
};

// 128 x 256 accumulators, 128 registers per consumer thread: the only tile of two consumers whose shared memory traffic
// (128 bytes per cycle) does not limit the tensor cores, and that leaves room for four stages.
template <class Problem, int kCluster_ = gemm::kLargeTile.cluster>
struct Large : Problem {
  static constexpr int kConsumers = gemm::kLargeTile.rows / 64, kColumns = gemm::kLargeTile.columns;
  static constexpr int kStages = 4, kCluster = kCluster_, kBandRows = 16 / kCluster, kLag = 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

// 64 x 128 accumulators, for few rows: only the bytes of w in flight matter.
template <class Problem>
struct Small : Problem {
  static constexpr int kConsumers = gemm::kSmallTile.rows / 64, kColumns = gemm::kSmallTile.columns;
  static constexpr int kStages = 8, kCluster = gemm::kSmallTile.cluster, kBandRows = 16, kLag = 0;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 216;
};

}  // namespace sm90_gemm
}  // namespace qf
