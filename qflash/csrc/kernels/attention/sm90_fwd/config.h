// Tile shapes of `sm90_fwd`.
#pragma once

#include "attn/wgmma/config.cuh"
#include "common/element_types.h"

namespace qf {
namespace sm90_fwd {

// kHeadDim: a bucket (64, 96, 112, 128, 192 or 256); the actual head_dim is a run-time argument. kPlain:
// scales_plainly(). kPaged: K and V are pages of a cache.
template <class Element_, int kHeadDim_, bool kPlain, bool kPaged_>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  // Remainders of weights, in rows that see few keys: only in float16; bfloat16's own rounding would hide the error.
  static constexpr bool kKeepsRemainders = kIsF16<Element>;

  static constexpr int kConsumers = kHeadDim == 64 ? 3 : 2;
  static constexpr int kBlockM = 64 * kConsumers;
  // Remainders and softcap need registers, and head_dim 64 has none to spare.
  static constexpr bool kShortOfRegisters = kHeadDim == 64 && (kKeepsRemainders || !kPlain);
  static constexpr int kBlockN = kHeadDim > 192 ? 64 : kHeadDim > 128 ? 96 : kShortOfRegisters ? 112 : 128;
  static constexpr bool kPaged = kPaged_;
  // Tiles of keys begin at any key; with pages, like boxes, at multiples of the largest power of two that divides a
  // tile.
  static constexpr int kFirstKey = kPaged ? kBlockN & -kBlockN : 1;
  static constexpr int kStages = 2;
  static constexpr int kQStages = kHeadDim <= 128 ? 2 : 1;
  static constexpr bool kOutThroughQ = kQStages > 1;  // outputs are staged in the tile of q that is no longer needed
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  using QTile = Panels<kBlockM, kHeadDim>;
  using KTile = Panels<kBlockN, kHeadDim>;
  using VTile = KTile;
  static constexpr bool kVTransposed = false;
  // Outputs are spilled here while scores are recomputed, if there are not enough registers for both.
  static constexpr int kScratchBytes = kConsumers == 3 ? kConsumers * 128 * (kHeadDim / 8) * 16 : 0;
  struct Facts {};
};

}  // namespace sm90_fwd
}  // namespace qf
