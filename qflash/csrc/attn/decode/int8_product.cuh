// The two matrix products of a warp's 16 rows with a tile of K or V in bytes.
//
// S = Q Kt is exact in integers. P V is a float16 MMA: a byte of V, its sign bit flipped, is v + 128, and as the bits
// of a float16 it is the subnormal (v + 128) 2^-24, which tensor cores multiply exactly and at full speed. So V needs
// no conversion, only unpacking. With the same weights, rounded once, a column of 128 2^-24 gives the excess of the
// products:
//
//   sum of w (v + 128) 2^-24  -  sum of w 128 2^-24  =  2^-24 (sum of w v)
//
// An exponent in the upper byte instead (0x64: 1024 + v + 128) would work as well, but the sums would be nine times as
// large, and so would the rounding that does not cancel.
#pragma once

#include "attn/decode/int8_queries.cuh"
#include "attn/decode/product.cuh"
#include "attn/mma/int8.cuh"
#include "ptx/prmt.cuh"

namespace qf {
namespace decode {

constexpr uint32_t kFlipSigns = 0x80808080u;
constexpr uint32_t kUpperBytes = 0;         // of the float16s, whose lower bytes are V's; 0x64646464 is 1024 + v + 128,
constexpr uint32_t kOffsets = 0x00800080u;  // the excess of every value, as two float16; then 0x64806480,
constexpr float kValueStep = 0x1p24f;       // from the products to w v; then 1

struct Operand {
  uint32_t words[4];
};
// A warp's 16 rows of q as A operands, channels 32 pair .. 32 pair + 31: in registers, or read each time where outputs
// fill the registers.
template <class Config, bool kInRegisters>
struct Int8QueryBytes {
  Operand q[Config::kBytePairs];

  __device__ __forceinline__ Int8QueryBytes(const char* s_rows, int lane) {
#pragma unroll
    for (int pair = 0; pair < Config::kBytePairs; ++pair)
      ldmatrix_x4(q[pair].words, s_rows + rows_then_chunks<Config::kByteChunks>(lane).at(0, pair));
  }
  __device__ __forceinline__ const Operand& of(int pair, int) const { return q[pair]; }
};
template <class Config>
struct Int8QueryBytes<Config, false> {
  const char* s_rows;

  __device__ __forceinline__ Int8QueryBytes(const char* s_rows, int) : s_rows(s_rows) {}
  __device__ __forceinline__ Operand of(int pair, int lane) const {
    Operand a;
    ldmatrix_x4(a.words, s_rows + rows_then_chunks<Config::kByteChunks>(lane).at(0, pair));
    return a;
  }
};

template <class Config>
constexpr bool kHoldsQueries = Config::kHeadDim <= 128 || (Config::kInt8 && !Config::kBatchInvariant);

// The same with the factors of their scores.
template <class Config>
struct Int8Queries {
  Int8QueryBytes<Config, kHoldsQueries<Config>> q;
  // Base-2 scores of the lane's rows, before softcap, are slope times k's scale times q . k, plus the contribution of
  // K's mean; without softcap that is the same for all keys of a row and is left out.
  float slope[2], bias[2];

  __device__ __forceinline__ Int8Queries(const QfAttnParams& p, const char* s_queries, int row0, int lane)
      : q(s_queries + row0 * Config::kHeadDim, lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + lane / 4 + 8 * r;
      slope[r] = query_scale<Config>(s_queries, row) * (p.scale * kLog2e);
      bias[r] = p.softcap == 0.0f ? 0.0f : query_dot_k_mean<Config>(s_queries, row) * (p.scale * kLog2e);
    }
  }
};

// dots += Q Kt for the kStep keys from `first` on.
template <class Config>
__device__ __forceinline__ void qk_mma(int32_t (&dots)[1][Config::kStep / 8][4], const Int8Queries<Config>& rows,
                                       const char* s_k, int first, int lane) {
  const auto k_lane = lanes_of_k<typename Config::KeyTile>(lane);
#pragma unroll
  for (int pair = 0; pair < Config::kBytePairs; ++pair) {
    const Operand& q = rows.q.of(pair, lane);
#pragma unroll
    for (int j = 0; j < Config::kStep / 8; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, s_k + k_lane.at(first + 8 * j, pair));
      Config::ScoreTensor::multiply(dots[0][j], q.words, k[0], k[1]);
      Config::ScoreTensor::multiply(dots[0][j + 1], q.words, k[2], k[3]);
    }
  }
}

// Accumulators over keys: weights times V (O of 16 rows), and the weights alone. Transposed pairs of bytes put channels
// 2 n of a chunk of sixteen into one tile of eight and 2 n + 1 into the next, so that a lane holds channels
// 4 (lane % 4) .. + 3 of chunk c: elements 0 of tiles 2 c and 2 c + 1, then elements 1 of them (2 and 3 in the lower
// rows).
template <class Config>
struct Int8Products {
  float O[Config::kChunks][4] = {};
  float offset[4] = {};  // of row h: offset[2 h], in every lane of the quad

  // weights: of 16 keys from `first` on, as A operands.
  __device__ __forceinline__ void add(const uint32_t (&weights)[4], const char* s_v, int first, int lane) {
    using Tensor = typename Config::Tensor;
    const auto v_lane = lanes_of_v<typename Config::Tile>(lane);
    Tensor::multiply(offset, weights, kOffsets, kOffsets);
#pragma unroll
    for (int pair = 0; pair < Config::kBytePairs; ++pair) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, s_v + v_lane.at(first, pair));
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const uint32_t low = v[2 * chunk] ^ kFlipSigns, high = v[2 * chunk + 1] ^ kFlipSigns;  // keys 0-7 and 8-15
        float (*const tiles)[4] = &O[4 * pair + 2 * chunk];
        Tensor::multiply(tiles[0], weights, prmt(low, kUpperBytes, 0x4240), prmt(high, kUpperBytes, 0x4240));
        Tensor::multiply(tiles[1], weights, prmt(low, kUpperBytes, 0x4341), prmt(high, kUpperBytes, 0x4341));
      }
    }
  }
  __device__ __forceinline__ void rescale(int h, float factor) {
    offset[2 * h] *= factor;
#pragma unroll
    for (int j = 0; j < Config::kChunks; ++j) O[j][2 * h] *= factor, O[j][2 * h + 1] *= factor;
  }
  // Channels 16 c + 4 (lane % 4) .. + 3 of row h.
  __device__ __forceinline__ float4 four(int c, int h) const {
    const float (&even)[4] = O[2 * c], (&odd)[4] = O[2 * c + 1];
    const auto of = [&](float x) { return (x - offset[2 * h]) * kValueStep; };
    return make_float4(of(even[2 * h]), of(odd[2 * h]), of(even[2 * h + 1]), of(odd[2 * h + 1]));
  }
};

}  // namespace decode
}  // namespace qf
