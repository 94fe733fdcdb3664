// The relayout passes, for matrices that TMA, the copy engine, cannot address. If rows do not begin and end at
// multiples of 16 bytes, there is a copy whose rows do: operands are copied before the product, results after it. Their
// ends matter, because TMA stores whole 16 bytes: on an H200 it wrote past the last column of results of one row.
#pragma once

#include "gemm/wgmma/producer.cuh"
#include "hopper/tensor_map.h"

namespace qf {
namespace gemm {
namespace wgmma {

// A matrix in its memory layout, in bytes.
struct Rows {
  char* g_data;
  int64_t stride, rows, width;

  __host__ __device__ int64_t pitch() const { return (width + 15) / 16 * 16; }  // of a copy
  // Can TMA address it? addressed: the address is known, too.
  bool walks(bool addressed) const {
    return width % 16 == 0 && strides_map({g_data, {width, rows, 1, 1}, {stride, 0, 0}}, 1) &&
           !(addressed && reinterpret_cast<uintptr_t>(g_data) % 16 != 0);
  }
};

// Host side: which matrices of a problem are copied, and where to. First computed without addresses, for the size of
// the workspace. If addresses then require more copies than were reserved, the launch must allocate the memory itself.
struct Relayout {
  enum Which { kX, kW, kUp, kResidual, kOut, kPre, kPreUp, kCount };
  Rows given[kCount];
  bool copied[kCount];
  int64_t offset[kCount], bytes;  // of copies

  template <class Config>
  static Relayout of(const QfLinearParams& p, bool addressed) {
    constexpr int kBytes = int(sizeof(typename Config::Element));
    const int out_bytes = p.out_dtype == QF_F32 || p.out_dtype == QF_I32 ? 4 : 2;
    // The width of x: two halves for two chained weights.
    const int64_t x_k = chains<Config>(p) ? steps_of<Config>(p) * Config::kStep : p.k;
    const auto operand = [&](const void* data, bool along_lines, int64_t lines, int64_t line_stride, int64_t k,
                             int64_t k_stride) {
      char* const bytes = static_cast<char*>(const_cast<void*>(data));
      return along_lines ? Rows{bytes, k_stride * kBytes, k, lines * kBytes}
                         : Rows{bytes, line_stride * kBytes, lines, k * kBytes};
    };
    const auto result = [&](const void* data, int64_t stride) {
      return Rows{static_cast<char*>(const_cast<void*>(data)), stride * out_bytes, p.m, p.n * out_bytes};
    };
    Relayout all{};
    all.given[kX] = operand(p.x, Config::kXAlongM, p.m, p.x_stride_m, x_k, p.x_stride_k);
    all.given[kW] = operand(p.w, Config::kWAlongN, p.n, p.w_stride_n, p.k, p.w_stride_k);
    all.given[kUp] = operand(p.up, Config::kWAlongN, p.n, p.up_stride_n, p.k, p.up_stride_k);
    all.given[kResidual] = result(p.residual, p.residual_stride_m);
    all.given[kOut] = result(p.out, p.out_stride_m);
    all.given[kPre] = result(p.pre, p.n);
    all.given[kPreUp] = result(p.pre_up, p.n);
    // Without addresses it is unknown which of the optional matrices exist: memory is reserved for all of them.
    for (int which = kX; which < kCount; ++which) {
      const Rows& x = all.given[which];
      const bool after_sums = which == kResidual || which == kPre || which == kPreUp;
      if ((which == kUp && !has_up<Config>(p)) || (after_sums && Config::kSumsAlone)) continue;
      if ((!x.g_data && addressed) || x.rows == 0 || x.width == 0) continue;
      all.copied[which] = !x.walks(addressed);
      all.offset[which] = all.bytes;
      if (all.copied[which]) all.bytes += (x.pitch() * x.rows + 255) / 256 * 256;
    }
    return all;
  }
  // A matrix as kernels see it. copies: the memory of the copies.
  Rows seen(Which which, char* copies) const {
    Rows x = given[which];
    if (copied[which]) x.g_data = copies + offset[which], x.stride = x.pitch();
    return x;
  }
  // Makes the tensor map of one of them, in panels of Tile. Returns a cudaError_t.
  template <class Tile>
  int map(CUtensorMap& map, Which which, char* copies, int box_rows) const {
    constexpr int kBytes = Tile::kRowBytes / Tile::kPanelColumns;
    const Rows x = seen(which, copies);
    if (!x.g_data || x.rows == 0 || x.width == 0) return cudaSuccess;  // never used
    return encode_tensor_map<Tile>(map, {x.g_data, {x.width / kBytes, x.rows, 1, 1}, {x.stride / kBytes, 0, 0}},
                                   box_rows);
  }
};

// The passes: a thread has 16 bytes of a copy at a time, which it fills, or copies back, element by element.
constexpr int kRelayoutThreads = 256;
template <class Element, bool kBack>
__device__ __forceinline__ void relayout_rows(const Rows& given, char* g_copy) {
  constexpr int kPerChunk = 16 / int(sizeof(Element));
  const int64_t chunks = given.pitch() / 16, columns = given.width / int(sizeof(Element));
  const int64_t all = chunks * given.rows, threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += threads) {
    const int64_t row = i / chunks, column = (i - row * chunks) * kPerChunk;
    Element* const g_given = reinterpret_cast<Element*>(given.g_data + row * given.stride) + column;
    union {
      uint4 whole;
      Element element[kPerChunk];
    } chunk{};
    if (kBack) chunk.whole = *reinterpret_cast<const uint4*>(g_copy + i * 16);
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) {
      if (column + e >= columns) continue;
      if (kBack)
        g_given[e] = chunk.element[e];
      else
        chunk.element[e] = g_given[e];
    }
    if (!kBack) *reinterpret_cast<uint4*>(g_copy + i * 16) = chunk.whole;
  }
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
