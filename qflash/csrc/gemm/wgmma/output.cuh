// The epilogue: out[i, j] = activation(h) + residual[i, j], and h itself if the backward pass needs it. A consumer warp
// writes its 16 rows in panels of 128 bytes per row, without synchronizing with other warps: registers, activation, a
// panel in shared memory, a store by TMA, the copy engine. Two panels are used alternately, and the next tile's MMAs
// start while the last panels are read.
//
// Banks: 16-bit results are written by stmatrix, 8 rows of a chunk at a time, which the swizzle puts in 8 groups of
// banks: 1 cycle each. 32-bit results are written by 8-byte stores of 4 rows x 2 chunks; pairs of these rows share a
// group: 2 cycles.
#pragma once

#include "gemm/fast_activation.cuh"
#include "gemm/wgmma/producer.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/uniform.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

__device__ __forceinline__ uint32_t pack_pair(float low, float high, F16) { return cvt_rn_f16x2_f32(low, high); }
__device__ __forceinline__ uint32_t pack_pair(float low, float high, BF16) { return cvt_rn_bf16x2_f32(low, high); }

template <class Config>
struct Output {
  using Sum = typename Config::Sum;
  using Sums = Sum[Config::kSumTiles][4];

  const QfLinearParams& p;
  const TensorMaps& maps;
  const SharedMemory<Config>& s;
  const int lane, warp;  // warp: index among the consumer warps
  int turn = 0;          // the next panel

  __device__ __forceinline__ Output(const QfLinearParams& problem, const TensorMaps& tensor_maps,
                                    const SharedMemory<Config>& shared)
      : p(problem),
        maps(tensor_maps),
        s(shared),
        lane(int(threadIdx.x) % 32),
        warp(warp_uniform(int(threadIdx.x - kWarpgroupThreads) / 32)) {}

  // Stores the tile at row0 and column0 of out, of type Out.
  template <class Out>
  __device__ __forceinline__ void store(int row0, int column0, const Sums& sums) {
    constexpr int kTiles = OutPanel<Out>::kPanelColumns / 8;
    const int row = row0 + warp * kWarpRows;  // the warp's first
#pragma unroll
    for (int first = 0; first < Config::kOutTiles; first += kTiles) {
      const int column = column0 + 8 * first;
      if (column >= p.n) continue;
      if constexpr (std::is_same_v<Out, int32_t>) {
        uint32_t words[kTiles][4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) words[j][e] = uint32_t(sums[first + j][e]);
        leave(words, maps.out, row, column);
      } else {
        float h[kTiles][4], u[kTiles][4];
        pre_activations(h, sums, first);
        if (!Config::kSumsAlone && p.pre) leave_floats<Out>(h, maps.pre, row, column);
        if constexpr (Config::kTwoProducts) {
          pre_activations(u, sums, Config::kOutTiles + first);
          if (p.pre_up) leave_floats<Out>(u, maps.pre_up, row, column);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            h[j][e] =
                fast_activated<Config::kActivation, sizeof(Out) == 2>(h[j][e], Config::kTwoProducts ? u[j][e] : 0.0f);
        if (!Config::kSumsAlone && p.residual) add_residual<Out>(h, row, column);
        leave_floats<Out>(h, maps.out, row, column);
      }
    }
  }
  // Returns when TMA has read this warp's panels: the block may exit.
  __device__ __forceinline__ void finish() const {
    if (lane == 0) wait_stores_read<0>();
  }

 private:
  // h of the accumulators from block of 8 columns `first` on.
  template <int kTiles>
  __device__ __forceinline__ void pre_activations(float (&h)[kTiles][4], const Sums& sums, int first) const {
    float x_scale[2] = {1.0f, 1.0f};
    if constexpr (Config::kIntegers) {
#pragma unroll
      for (int i = 0; i < 2; ++i) x_scale[i] = s.x_scale[warp * kWarpRows + lane / 4 + 8 * i];
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int column = 8 * (first + j) + lane % 4 * 2;
      const float2 bias = *reinterpret_cast<const float2*>(s.bias + column);
      float2 w_scale = make_float2(1.0f, 1.0f);
      if constexpr (Config::kIntegers) w_scale = *reinterpret_cast<const float2*>(s.w_scale + column);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        h[j][e] =
            pre_activation(sums[first + j][e], x_scale[e / 2], e % 2 ? w_scale.y : w_scale.x, e % 2 ? bias.y : bias.x);
    }
  }

  // Adds the residual of a panel, loaded through that panel, so that rows are read from memory in full lines. Rows of
  // the residual begin and end at multiples of 16 bytes, padding included.
  template <class Out, int kTiles>
  __device__ __forceinline__ void add_residual(float (&value)[kTiles][4], int row0, int column0) {
    constexpr int kPerChunk = 16 / int(sizeof(Out)), kLanesOfRow = 8;
    char* const s_panel = begin_panel();
    const int chunk = lane % kLanesOfRow, column = column0 + chunk * kPerChunk;
#pragma unroll
    for (int first = 0; first < kWarpRows; first += 32 / kLanesOfRow) {
      const int row = first + lane / kLanesOfRow;
      if (row0 + row < p.m && column < p.n)
        *reinterpret_cast<uint4*>(s_panel + row * 128 + 16 * (chunk ^ row % 8)) = *reinterpret_cast<const uint4*>(
            static_cast<const Out*>(p.residual) + (row0 + row) * p.residual_stride_m + column);
    }
    __syncwarp();  // every lane has written
    add_panel(value, s_panel, Out{});
  }
  template <int kTiles, class Half>
  __device__ __forceinline__ void add_panel(float (&value)[kTiles][4], const char* s_panel, Half) const {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t words[4];
      ldmatrix_x4(words, s_panel + matrix_at(j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[j + i / 2][i % 2 * 2] += to_float(Half{uint16_t(words[i])});
        value[j + i / 2][i % 2 * 2 + 1] += to_float(Half{uint16_t(words[i] >> 16)});
      }
    }
  }
  template <int kTiles>
  __device__ __forceinline__ void add_panel(float (&value)[kTiles][4], const char* s_panel, float) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float2 two = *reinterpret_cast<const float2*>(s_panel + words_at(j, i));
        value[j][2 * i] += two.x, value[j][2 * i + 1] += two.y;
      }
  }

  template <class Out, int kTiles>
  __device__ __forceinline__ void leave_floats(const float (&value)[kTiles][4], const CUtensorMap& map, int row,
                                               int column) {
    constexpr int kWords = int(sizeof(Out));  // 32-bit elements: 4 words; pairs of 16-bit ones: 2
    uint32_t words[kTiles][kWords];
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (sizeof(Out) == 4)
          words[j][i] = float_to_bits(value[j][i]);
        else
          words[j][i] = pack_pair(value[j][2 * i], value[j][2 * i + 1], Out{});
      }
    leave(words, map, row, column);
  }

  // Writes a panel's words to shared memory and starts their TMA store to row `row` and column `column` of a result.
  template <int kTiles, int kWords>
  __device__ __forceinline__ void leave(const uint32_t (&words)[kTiles][kWords], const CUtensorMap& map, int row,
                                        int column) {
    char* const s_panel = begin_panel();
    turn ^= 1;
    put(s_panel, words);
    fence_proxy_async();  // the panel just written, to the copy engine
    __syncwarp();
    if (lane == 0) {
      store_box(&map, column, row, 0, 0, s_panel);
      commit_stores();
    }
  }
  // The next panel, which may be overwritten.
  __device__ __forceinline__ char* begin_panel() const {
    static_assert(Config::kWarpPanels == 2, "two take turns");
    if (lane == 0) wait_stores_read<Config::kWarpPanels - 1>();
    __syncwarp();  // and every lane is done with it
    return s.panels + (warp * Config::kWarpPanels + turn) * Config::kPanelBytes;
  }

  // Pairs of 16-bit elements: two neighbouring blocks of 8 columns and both halves of the rows are four matrices.
  template <int kTiles>
  __device__ __forceinline__ void put(char* s_panel, const uint32_t (&pairs)[kTiles][2]) const {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      const uint32_t words[4] = {pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]};
      stmatrix_x4(s_panel + matrix_at(j), words);
    }
  }
  // 32-bit elements, two at a time.
  template <int kTiles>
  __device__ __forceinline__ void put(char* s_panel, const uint32_t (&words)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        *reinterpret_cast<uint2*>(s_panel + words_at(j, i)) = make_uint2(words[j][2 * i], words[j][2 * i + 1]);
  }
  // Offset of the lane's row of the four matrices from block j of 8 columns on.
  __device__ __forceinline__ int matrix_at(int j) const {
    const int row = lane % 16;
    return row * 128 + 16 * ((j + lane / 16) ^ row % 8);
  }
  // Offset of the lane's two words in block j of 8 columns, of the first (i = 0) or the last 8 rows.
  __device__ __forceinline__ int words_at(int j, int i) const {
    const int row = lane / 4 + 8 * i;
    return row * 128 + 16 * ((2 * j + lane % 4 / 2) ^ row % 8) + lane % 2 * 8;
  }
};

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
