// Tile shapes of `sm90_bwd`'s two kernels.
#pragma once

#include "attn/wgmma/backward/config.cuh"
#include "common/element_types.h"

namespace qf {
namespace sm90_bwd {

// kHeadDim: a bucket (64, 96, 128, 192 or 256); the true head_dim comes at run time. kKeysStay: dK and dV, else dQ.
// kPlain: no softcap.
template <class Element_, int kHeadDim_, bool kKeysStay_, bool kPlain_>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kKeysStay = kKeysStay_, kPlain = kPlain_;
  // A tile is read by three or four products, so stages are held for long: four of few columns wait less for the copy
  // engine than two of many. dQ has registers for more at head_dim 64.
  static constexpr int kBlockN = kKeysStay ? 64 : kHeadDim == 64 ? 128 : kHeadDim <= 192 ? 64 : 32;
  static constexpr int kStages = kHeadDim <= 128 ? 4 : 2;
  static constexpr bool kSplits = kKeysStay && kHeadDim > 128;
  // dK, dV, S, dP and dS of 64 keys, with dK's product and S's under way at once, take all there are.
  static constexpr bool kShortOfRegisters = kKeysStay && !kSplits && kHeadDim > 64;
  static constexpr int kProducerRegisters = kShortOfRegisters ? 24 : 40;
  static constexpr int kConsumerRegisters = kShortOfRegisters ? 240 : 232;
};

}  // namespace sm90_bwd
}  // namespace qf
