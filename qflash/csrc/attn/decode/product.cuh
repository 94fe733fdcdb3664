// The two matrix products of a warp's 16 rows with a tile of K or V in panels, in the layout that TMA writes
// (hopper/descriptor.cuh).
#pragma once

#include <type_traits>

#include "attn/decode/config.cuh"

namespace qf {
namespace decode {

// A lane's ldmatrix addresses in a tile of panels: as LaneRows of attn/mma/product.cuh.
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

// A warp's 16 rows of q as A operands, channels 16 pair .. 16 pair + 15: in registers, or read each time where
// registers do not suffice.
template <class Config>
struct QueriesInRegisters {
  uint32_t q[Config::kPairs][4];

  __device__ __forceinline__ QueriesInRegisters(const char* s_rows, int lane) {
#pragma unroll
    for (int pair = 0; pair < Config::kPairs; ++pair)
      ldmatrix_x4(q[pair], s_rows + rows_then_chunks<Config::kChunks>(lane).at(0, pair));
  }
  __device__ __forceinline__ void get(uint32_t (&a)[4], int pair, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = q[pair][i];
  }
};
template <class Config>
struct QueriesInSharedMemory {
  const char* s_rows;

  __device__ __forceinline__ QueriesInSharedMemory(const char* s_rows, int) : s_rows(s_rows) {}
  __device__ __forceinline__ void get(uint32_t (&a)[4], int pair, int lane) const {
    ldmatrix_x4(a, s_rows + rows_then_chunks<Config::kChunks>(lane).at(0, pair));
  }
};
template <class Config>
using QueryRows =
    std::conditional_t<Config::kQueriesInRegisters, QueriesInRegisters<Config>, QueriesInSharedMemory<Config>>;

// S += Q Kt for the kStep keys from `first` on.
template <class Config>
__device__ __forceinline__ void qk_mma(float (&S)[1][Config::kStep / 8][4], const QueryRows<Config>& rows,
                                       const char* s_k, int first, int lane) {
  const auto k_lane = lanes_of_k<typename Config::Tile>(lane);
#pragma unroll
  for (int pair = 0; pair < Config::kPairs; ++pair) {
    uint32_t q[4];
    rows.get(q, pair, lane);
#pragma unroll
    for (int j = 0; j < Config::kStep / 8; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, s_k + k_lane.at(first + 8 * j, pair));
      Config::Tensor::multiply(S[0][j], q, k[0], k[1]);
      Config::Tensor::multiply(S[0][j + 1], q, k[2], k[3]);
    }
  }
}

// O += P V for the same keys, and the rows' sums with it. Part: the rounded weights, or their remainders.
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
