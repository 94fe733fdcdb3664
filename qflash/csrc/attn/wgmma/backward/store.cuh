// Stores rows of dK, dV or dQ to global memory: a warp's accumulators, zeros for rows that see nothing, and what is
// written to rows that belong to no valid sequence.
#pragma once

#include "attn/wgmma/backward/work_tile.cuh"
#include "attn/wgmma/output.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// May rows of the results be stored 16 bytes at a time? first: dk or dq, second: dv.
struct Stores {
  bool first, second;
};

template <class Config>
__device__ __forceinline__ typename Config::Element* row_of(const QfTensor& x, const WorkTile<Config>& work, int row) {
  return static_cast<typename Config::Element*>(x.data) + work.b * x.stride_b + work.row_head * x.stride_h +
         (work.first_row() + row) * x.stride_t;
}

// Stores the warp's rows of x: O times factor, or zeros for rows that take no part.
template <class Config>
__device__ __forceinline__ void store_outputs(const QfTensor& x, const WorkTile<Config>& work,
                                              float (&O)[1][Config::kOTiles][4], float factor, bool aligned,
                                              int head_dim) {
  const int lane = lane_index();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool live = own_row<Config>(lane / 4 + 8 * h) < work.live;
#pragma unroll
    for (int j = 0; j < Config::kOTiles; ++j)
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) O[0][j][e] = live ? O[0][j][e] * factor : 0.0f;
  }
  const auto row_at = [&](int i) {
    const int row = own_row<Config>(i);
    return row < work.rows ? row_of<Config>(x, work, row) : nullptr;
  };
  store_rows<Config>(O, row_at, head_dim, aligned, lane);
}

// Zeros rows of x that see nothing.
template <class Config>
__device__ inline void store_zeros(const QfTensor& x, const WorkTile<Config>& work, int head_dim) {
  using By = AllConsumers<Config>;
  for (int row = By::thread(); row < min(Config::kBlockM, work.rows); row += By::threads()) {
    auto* const g_row = row_of<Config>(x, work, row);
    for (int d = 0; d < head_dim; ++d) g_row[d].bits = 0;
  }
}

// Fills rows of x that no valid sequence writes, this work tile's share of its head: NaN in the rows of a sequence
// whose description is out of range, and in all rows if offsets decrease. Packed rows outside every sequence: a query
// there attends to no keys, and gets NaN; a key there is seen by no query, and gets zeros.
template <class Config>
__device__ inline void fill_unserved(const QfAttnParams& p, const QfTensor& x, const WorkTile<Config>& work,
                                     int row_tiles) {
  using By = AllConsumers<Config>;
  using Element = typename Config::Element;
  const int32_t* const offsets = Config::kKeysStay ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int64_t total = Config::kKeysStay ? p.total_k : p.total_q;
  const auto fill = [&](int64_t begin, int64_t end, float value) {
    Element filling;
    from_float(value, filling);
    for (int64_t row = begin + int64_t(work.row_tile) * By::threads() + By::thread(); row < end;
         row += int64_t(row_tiles) * By::threads()) {
      Element* const g_row =
          static_cast<Element*>(x.data) + work.b * x.stride_b + work.row_head * x.stride_h + row * x.stride_t;
      for (int d = 0; d < p.head_dim; ++d) g_row[d] = filling;
    }
  };
  const auto within = [&](int64_t row) { return row < 0 ? 0 : row < total ? row : total; };
  if (!offsets) return fill(0, Config::kKeysStay ? p.k_len : p.q_len, nan());
  if (work.falls) return fill(0, work.b == 0 ? total : 0, nan());
  if (!work.seq.good) fill(within(offsets[work.b]), within(offsets[work.b + 1]), nan());
  const float outside = Config::kKeysStay ? 0.0f : nan();
  if (work.b == 0) fill(0, within(offsets[0]), outside);
  if (work.b == p.batch - 1) fill(within(offsets[p.batch]), total, outside);
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
