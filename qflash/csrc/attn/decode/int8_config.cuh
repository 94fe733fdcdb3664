// Tile shapes of the decode kernels for INT8 pages: bytes instead of 16-bit elements, and a scale for every key.
#pragma once

#include "attn/decode/config.cuh"

namespace qf {
namespace decode {

template <class Element, int kHeadDim, int kRowWarps, int kArch>
struct Int8Config : Config<Element, kHeadDim, kRowWarps, kArch, true, 1> {
  using Base = Config<Element, kHeadDim, kRowWarps, kArch, true, 1>;
  static constexpr bool kInt8 = true, kInt8Queries = true;
  using Tensor = Tensor16<F16, kArch>;  // for P V, whatever q is: a byte of V is a float16 without a conversion
  using ScoreTensor = Tensor8<kArch>;
  using Tile = Panels<Base::kBlockN, kHeadDim, 1>;
  using KeyTile = Tile;
  static constexpr int kByteChunks = kHeadDim / 16, kBytePairs = kHeadDim / 32;  // 16 and 32 channels of a row
  static constexpr int kScaleBytes = Base::kBlockN * 4;
  static constexpr bool kKeepsRemainders = false;  // quantizing V costs far more than rounding the weights

  // q: rows of bytes, then one scale per row, then q . k_mean of each row.
  static constexpr int kQueryScales = Base::kRows * kHeadDim, kQueryDots = kQueryScales + Base::kRows * 4;
  static constexpr int kQueryBytes = kQueryDots + Base::kRows * 4;
};

}  // namespace decode
}  // namespace qf
