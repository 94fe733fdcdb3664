// Tile shapes of `sm90_bwd`'s two kernels.
#pragma once

#include "attn/wgmma/backward/config.cuh"
#include "common/element_types.h"

namespace qf {
namespace sm90_bwd {

// Which gradients a kernel computes. kQueries recomputes S and dP, kQueriesFromDs reads the dS that kKeys stored.
enum Of { kKeys, kQueries, kQueriesFromDs };

// kHeadDim: a bucket (64, 96, 128, 192 or 256); the actual head_dim is a run-time argument. kPlain: no softcap and a
// scale above 0.
template <class Element_, int kHeadDim_, Of kOf, bool kPlain_>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kKeysStay = kOf == kKeys, kFromDs = kOf == kQueriesFromDs, kPlain = kPlain_;
  // Three or four MMAs read a tile, so stages are held for long: four stages of few columns wait less for TMA than two
  // of many. At head_dim 64 there are registers for more columns.
  static constexpr int kBlockN = kFromDs ? 64 : kHeadDim == 64 ? 128 : kKeysStay || kHeadDim <= 192 ? 64 : 32;
  // If head_dim is small, storing dS and reading it again takes longer than recomputing it.
  static constexpr bool kStoresDs = kKeysStay && kHeadDim > 64;
  static constexpr int kStages = kHeadDim <= 128 || kFromDs ? 4 : 2;
  static constexpr bool kSplits = kKeysStay && kHeadDim > 128;
  // A tile of K is shared by as many queries as there are registers for their dQ: reading dS is the bound of that
  // kernel, and K adds to it.
  static constexpr bool kMany = kFromDs && kHeadDim <= 128;
  static constexpr int kConsumers = kMany ? 4 : 2;
  static constexpr bool kAlternates = kHeadDim > 64 && kHeadDim <= 128;  // consumers take turns at issuing MMAs
  // dK and dV, or one of them at a large head_dim, together with S, dP and MMA operands, take all registers.
  static constexpr bool kShortOfRegisters = kKeysStay;
  static constexpr int kProducerRegisters = kShortOfRegisters ? 24 : kMany ? 64 : 40;
  static constexpr int kConsumerRegisters = kShortOfRegisters ? 240 : kMany ? 104 : 232;
};

}  // namespace sm90_bwd
}  // namespace qf
