// Tile shapes of `sm90_bwd`'s two kernels.
#pragma once

#include "attn/wgmma/backward/config.cuh"
#include "common/element_types.h"

namespace qf {
namespace sm90_bwd {

// Which gradients a kernel computes. kQueries computes S and dP again, kQueriesFromDs takes dS that kKeys stored.
enum Of { kKeys, kQueries, kQueriesFromDs };

// kHeadDim: a bucket (64, 96, 128, 192 or 256); the true head_dim comes at run time. kPlain: no softcap.
template <class Element_, int kHeadDim_, Of kOf, bool kPlain_>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kKeysStay = kOf == kKeys, kFromDs = kOf == kQueriesFromDs, kPlain = kPlain_;
  // A tile is read by three or four products, so stages are held for long: four of few columns wait less for the copy
  // engine than two of many. At head_dim 64 there are registers for more.
  static constexpr int kBlockN = kFromDs ? 64 : kHeadDim == 64 ? 128 : kKeysStay || kHeadDim <= 192 ? 64 : 32;
  // To store dS and read it again takes longer than to compute it again where head_dim is small.
  static constexpr bool kStoresDs = kKeysStay && kHeadDim > 64;
  static constexpr int kStages = kHeadDim <= 128 || kFromDs ? 4 : 2;
  static constexpr bool kSplits = kKeysStay && kHeadDim > 128;
  // A tile of K serves as many queries as their sums fit registers: reading dS is what bounds that kernel, and K comes
  // on top of it.
  static constexpr bool kMany = kFromDs && kHeadDim <= 128;
  static constexpr int kConsumers = kMany ? 4 : 2;
  static constexpr bool kAlternates = kHeadDim > 64 && kHeadDim <= 128;  // consumers, at starting products
  // dK and dV, or one of them at a large head_dim, with S, dP and what products read, take all there are.
  static constexpr bool kShortOfRegisters = kKeysStay;
  static constexpr int kProducerRegisters = kShortOfRegisters ? 24 : kMany ? 64 : 40;
  static constexpr int kConsumerRegisters = kShortOfRegisters ? 240 : kMany ? 104 : 232;
};

}  // namespace sm90_bwd
}  // namespace qf
