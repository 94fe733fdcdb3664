// Tile shapes of the decode kernels for KV from quantize_kv: K in bytes with one scale per 64 keys, V in 16 bits.
#pragma once

#include "attn/decode/int8_config.cuh"
#include "quant/sm90/kept.h"

namespace qf {
namespace decode {

template <class Element, int kHeadDim, int kRowWarps, int kArch>
struct KeptConfig : Config<Element, kHeadDim, kRowWarps, kArch> {
  using Base = Config<Element, kHeadDim, kRowWarps, kArch>;
  using Int8 = Int8Config<Element, kHeadDim, kRowWarps, kArch>;
  static constexpr bool kKept = true, kInt8Queries = true;
  using ScoreTensor = typename Int8::ScoreTensor;
  using KeyTile = Panels<Base::kBlockN, kHeadDim, 1>;
  static constexpr bool kKeepsRemainders = false;  // quantizing K costs far more than rounding the weights

  // q, and bytes of a row, as for INT8 pages.
  static constexpr int kByteChunks = Int8::kByteChunks, kBytePairs = Int8::kBytePairs;
  static constexpr int kQueryScales = Int8::kQueryScales, kQueryDots = Int8::kQueryDots;
  static constexpr int kQueryBytes = Int8::kQueryBytes;
};

}  // namespace decode
}  // namespace qf
