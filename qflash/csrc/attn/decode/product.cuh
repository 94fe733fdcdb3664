// The two products of a warp's 16 rows with a tile of K or V in panels, as the copy engine leaves them
// (hopper/descriptor.cuh). q stays in registers.
#pragma once

#include "attn/decode/config.cuh"

namespace qf {
namespace decode {

// Where a lane's ldmatrix addresses lie in a tile of panels: as LaneRows of attn/mma/product.cuh.
template <class Tile>
struct PanelLanes {
  int row_bytes, chunk;

  __device__ __forceinline__ int at(int first, int pair) const {
    constexpr int kPairs = Tile::kChunks / 2;  // of a panel
    return row_bytes + first * Tile::kRowBytes + pair / kPairs * Tile::kPanelBytes + (chunk ^ (pair % kPairs << 5));
  }
};
template <class Tile>
__device__ __forceinline__ PanelLanes<Tile> lanes_of_k(int lane) {
  const auto rows = chunks_then_rows<Tile::kChunks>(lane);
  return {rows.row_bytes, rows.chunk};
}
template <class Tile>
__device__ __forceinline__ PanelLanes<Tile> lanes_of_v(int lane) {
  const auto rows = rows_then_chunks<Tile::kChunks>(lane);
  return {rows.row_bytes, rows.chunk};
}

// A warp's rows of q as the A operands of QKt: q[pair] holds channels 16 pair .. 16 pair + 15.
template <class Config>
struct QueryRows {
  uint32_t q[Config::kPairs][4];

  // Rows from row0 on of KV head `kv_head`; zeros past the last row and channel. aligned: two channels at a time.
  __device__ __forceinline__ void load(const QfAttnParams& p, const QfTensor& x, int b, int kv_head, int row0, int lane,
                                       bool aligned) {
    using Element = typename Config::Element;
    const int group = p.q_heads / p.kv_heads, rows = p.q_len * group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + lane / 4 + 8 * half;
      const int token = row / group, head = kv_head * group + row - token * group;
      const Element* const g_row =
          static_cast<const Element*>(x.data) + b * x.stride_b + token * x.stride_t + head * x.stride_h;
#pragma unroll
      for (int pair = 0; pair < Config::kPairs; ++pair)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int d = 16 * pair + 8 * eight + lane % 4 * 2;
          uint32_t word = 0;
          if (row < rows && d < p.head_dim)
            word = aligned ? *reinterpret_cast<const uint32_t*>(g_row + d)
                           : uint32_t(g_row[d].bits) | uint32_t(g_row[d + 1].bits) << 16;
          q[pair][half + 2 * eight] = word;
        }
    }
  }
};

// S += Q Kt for the kStep keys from `first` on.
template <class Config>
__device__ __forceinline__ void qk_mma(float (&S)[1][Config::kStep / 8][4], const QueryRows<Config>& rows,
                                       const char* s_k, int first, int lane) {
  const auto k_lane = lanes_of_k<typename Config::Tile>(lane);
#pragma unroll
  for (int pair = 0; pair < Config::kPairs; ++pair)
#pragma unroll
    for (int j = 0; j < Config::kStep / 8; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, s_k + k_lane.at(first + 8 * j, pair));
      Config::Tensor::multiply(S[0][j], rows.q[pair], k[0], k[1]);
      Config::Tensor::multiply(S[0][j + 1], rows.q[pair], k[2], k[3]);
    }
}

// O += P V for the same keys, and the rows' sums with it. Part: the weights rounded, or what rounding takes off.
template <class Config, template <class> class Part, class Statistics>
__device__ __forceinline__ void pv_mma(float (&O)[1][Config::kChunks][4], Statistics& statistics,
                                       const float (&P)[1][Config::kStep / 8][4], const char* s_v, int first,
                                       int lane) {
  using Tensor = typename Config::Tensor;
  const auto v_lane = lanes_of_v<typename Config::Tile>(lane);
#pragma unroll
  for (int j = 0; j < Config::kStep / 8; j += 2) {
    const uint32_t p[4] = {Part<Tensor>::pair(P[0][j][0], P[0][j][1]), Part<Tensor>::pair(P[0][j][2], P[0][j][3]),
                           Part<Tensor>::pair(P[0][j + 1][0], P[0][j + 1][1]),
                           Part<Tensor>::pair(P[0][j + 1][2], P[0][j + 1][3])};
    statistics.sums.template add_rounded<Tensor>(p);
#pragma unroll
    for (int pair = 0; pair < Config::kPairs; ++pair) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, s_v + v_lane.at(first + 8 * j, pair));
      Tensor::multiply(O[0][2 * pair], p, v[0], v[1]);
      Tensor::multiply(O[0][2 * pair + 1], p, v[2], v[3]);
    }
  }
}

}  // namespace decode
}  // namespace qf
