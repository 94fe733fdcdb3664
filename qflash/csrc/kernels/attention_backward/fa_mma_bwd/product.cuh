// fa_mma_bwd, dQ = dS K for kProductRows queries of one head, from dS that the keys' kernel stored (ds_tiles.h).
//
// A matrix product: tiles of 64 keys stream by, dS of the block's queries and K. dS is stored as [key][query], so that
// A fragments are read transposed, like those of B. Rows of the product are queries in the order of query_of_ds; the
// store puts them in the order of dQ. Per warp and 16 keys (head_dim 128): 4 ldmatrix of dS and 4 of K for 32 mma.
//
// Shared memory: kProductStages stages of dS, 8 KB per 64 queries, and K. At the end float32 rows of dQ.
// Pipeline: cp.async fills a ring, with one barrier per tile.
//
// A tile of dS where no query sees a key was never written, and is not read: warps of its queries skip the step.
#pragma once

#include "attn/backward/output.cuh"
#include "attn/backward/state.cuh"
#include "attn/mma/backward.cuh"
#include "kernels/attention_backward/fa_mma_bwd/load.cuh"
#include "kernels/attention_backward/fa_mma_bwd/stored.cuh"

namespace qf {
namespace fa_mma_bwd {

constexpr int kProductThreads = 32 * kProductWarps, kProductTiles = kProductRows / kDsTile;
constexpr int kProductWarpRows = 16 * kProductMTiles;
using ProductKeyWalk = ChunkWalk<kDsTile, kChunks, kProductThreads>;

// One block per (row tile, query head of the section), heads innermost; the last row tiles first, as in schedule.cuh.
struct ProductGrid {
  int64_t first, work_tiles;  // first work tile of this launch, work tiles of all launches
  int64_t first_head, heads;  // of the section, counted through the batch
  int row_tiles;
};

// Host side.
inline ProductGrid product_grid_of(const QfAttnParams& p, int64_t first_column, int64_t columns) {
  const int64_t group = p.q_heads / p.kv_heads, row_tiles = (int64_t(p.q_len) + kProductRows - 1) / kProductRows;
  return {0, columns * group * row_tiles, first_column * group, columns * group, int(row_tiles)};
}

struct ProductState {
  Sequence seq;
  Mask mask;
  int b, h, kv_head;
  char* g_ds;  // the head's tiles of dS
  int first_row;
  KeyRange any, all;             // keys that some row of the block sees, that every row sees
  KeyRange kept[kProductTiles];  // keys that some row of each 64 sees

  // Collective. The caller's next barrier makes it visible.
  __device__ __forceinline__ void fill(const Sequence& sequence, const Mask& m, int batch, int head, int of_k,
                                       char* tiles, int first) {
    const int thread = threadIdx.x;
    const auto last = [&](int row, int rows) { return min(row + rows, m.len_q) - 1; };
    if (thread < kProductTiles) {
      const int row = first + thread * kDsTile;
      kept[thread] = row < m.len_q ? m.seen_by_any(row, last(row, kDsTile)) : KeyRange{0, 0};
    }
    if (thread == 0) {
      seq = sequence;
      mask = m;
      b = batch, h = head, kv_head = of_k, g_ds = tiles;
      first_row = first;
      any = m.seen_by_any(first, last(first, kProductRows));
      all = m.seen_by_all(first, last(first, kProductRows));
    }
  }
};
static_assert(sizeof(ProductState) <= kStateBytes, "");

// The warp's part of a tile: the first of its rows and of its channels, in chunks.
struct ProductPart {
  int row, chunk;

  __device__ static __forceinline__ ProductPart of_warp() {
    const int warp = fresh_tid() / 32;
    return {warp / kProductAcross * kProductWarpRows, warp % kProductAcross * kProductChunks};
  }
};

// acc += dS K of 64 keys. s_ds: the warp's tile of dS; row: the warp's first row in it. clean: as in update_mma.
template <bool kClean>
__device__ __forceinline__ void product_mma(float (&acc)[kProductMTiles][kProductChunks][4], const char* s_ds,
                                            const char* s_k, int row, int chunk, int lane) {
  constexpr bool kAligned = kProductChunks % 8 == 0;  // channels of a warp begin where the swizzle does
  const auto ds_lane = chunks_then_rows<8>(lane);
  const auto k_lane = rows_then_chunks<kChunks>(lane);
  const char* const s_part = s_k + (kAligned ? 16 * chunk : 0);
  const int first_pair = kAligned ? 0 : chunk / 2;
#pragma unroll
  for (int key = 0; key < kDsTile; key += 16) {
    uint32_t A[kProductMTiles][4];
#pragma unroll
    for (int i = 0; i < kProductMTiles; ++i) ldmatrix_x4_trans(A[i], s_ds + ds_lane.at(key, row / 16 + i));
#pragma unroll
    for (int pair = 0; pair < kProductChunks / 2; ++pair) {
      uint32_t x[4];
      ldmatrix_x4_trans(x, s_part + k_lane.at(key, first_pair + pair));
      if (kClean) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = finite_halves<Element>(x[e]);
      }
#pragma unroll
      for (int i = 0; i < kProductMTiles; ++i) {
        Tensor::multiply(acc[i][2 * pair], A[i], x[0], x[1]);
        Tensor::multiply(acc[i][2 * pair + 1], A[i], x[2], x[3]);
      }
    }
  }
}

// Adds the values of K that a clean product left out, times dS, to the rows that see their key: key0, the tile's first,
// and those after it. first_row: of the warp's tile of dS, in the sequence.
__device__ inline void add_nonfinite_keys(float (&acc)[kProductMTiles][kProductChunks][4], const char* s_ds,
                                          const char* s_k, int row, int chunk, int lane, const Mask& mask,
                                          int first_row, int key0) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int key = 0; key < kDsTile; ++key) {
    float weight[2 * kProductMTiles];
    bool sees[2 * kProductMTiles];
#pragma unroll
    for (int r = 0; r < 2 * kProductMTiles; ++r) {
      const int place = row + 8 * r + g;
      const KeyRange seen = mask.visible(first_row + query_of_ds(place));
      sees[r] = key0 + key >= seen.begin && key0 + key < seen.end;
      const uint32_t word =
          *reinterpret_cast<const uint32_t*>(s_ds + Swizzle<8>::offset(key, place / 8) + place % 8 / 2 * 4);
      weight[r] = place % 2 ? Tensor::high(word) : Tensor::low(word);
    }
#pragma unroll
    for (int j = 0; j < kProductChunks; ++j) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(s_k + Swizzle<kChunks>::offset(key, chunk + j) + 4 * t);
      if (!word_nonfinite<Element>(word)) continue;
      const float x[2] = {Tensor::low(word), Tensor::high(word)};
#pragma unroll
      for (int r = 0; r < 2 * kProductMTiles; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (x[e] * 0.0f != 0.0f && sees[r]) acc[r / 2][j][r % 2 * 2 + e] += weight[r] * x[e];
    }
  }
}

}  // namespace fa_mma_bwd
}  // namespace qf

// fwd.out is dq here, as in the queries' kernel.
template <bool kAsync>
__global__ void __launch_bounds__(qf::fa_mma_bwd::kProductThreads, qf::fa_mma_bwd::kProductBlocks)
    qf_fa_mma_bwd_product_kernel(const __grid_constant__ QfAttnBwdParams params,
                                 const __grid_constant__ qf::fa_mma_bwd::ProductGrid grid,
                                 const __grid_constant__ qf::fa_mma_bwd::Access access,
                                 const __grid_constant__ qf::fa_mma_bwd::StoredDs ds) {
  using namespace qf;
  using namespace qf::fa_mma_bwd;
  extern __shared__ float4 s_memory[];
  char* const s_tiles = reinterpret_cast<char*>(s_memory);  // kProductStages stages, dS then K
  ProductState& s_state = *reinterpret_cast<ProductState*>(s_tiles + kProductTileBytes);
  const QfAttnParams& p = params.fwd;

  {
    const int64_t index = grid.first + blockIdx.x, head = grid.first_head + index % grid.heads;
    const int row_tile = grid.row_tiles - 1 - int(index / grid.heads);
    const int b = int(head / p.q_heads), h = int(head % p.q_heads);
    const Sequence sequence = read_padded_sequence(p, b);
    fill_unserved_rows<Element>(p, sequence, b, h, row_tile, grid.row_tiles, 0, p.head_dim, false);
    if (!sequence.good) return;
    s_state.fill(sequence, mask_of_queries(p, sequence), b, h, h / (p.q_heads / p.kv_heads), ds.head(p, b, h),
                 row_tile * kProductRows);
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int first_tile = s_state.any.begin / kDsTile;
  const int end_tile = s_state.any.begin < s_state.any.end ? (s_state.any.end + kDsTile - 1) / kDsTile : first_tile;

  const auto stage_of = [&](int tile) { return s_tiles + (tile - first_tile) % kProductStages * kProductStageBytes; };
  const auto load_tile = [&](int key_tile) {
    char* const s_ds = stage_of(key_tile);
    const int place = key_tile < ds.tiles.strip ? key_tile : ds.tiles.place(key_tile);  // divisions are slow
    for (int q = 0; q < kProductTiles; ++q) {
      if (!keeps_tile(s_state.kept[q], key_tile * kDsTile)) continue;
      const char* const g_tile = ds.tile(s_state.g_ds, uint32_t(s_state.first_row) / kDsTile + q, place);
#pragma unroll
      for (int byte = 0; byte < kDsTileBytes; byte += kProductThreads * 16) {
        const int at = byte + fresh_tid() * 16;
        if constexpr (kAsync)
          cp_async_16(s_ds + q * kDsTileBytes + at, g_tile + at, true);
        else
          *reinterpret_cast<uint4*>(s_ds + q * kDsTileBytes + at) = *reinterpret_cast<const uint4*>(g_tile + at);
      }
    }
    load_k<kAsync, ProductKeyWalk>(s_ds + kProductTiles * kDsTileBytes, p, seq, s_state.b, s_state.kv_head,
                                   key_tile * kDsTile, access);
  };

  float dQ[kProductMTiles][kProductChunks][4] = {};
#pragma unroll 1
  for (int ahead = 0; ahead < kProductStages - 1; ++ahead) {
    if (first_tile + ahead < end_tile) load_tile(first_tile + ahead);
    if constexpr (kAsync) cp_async_commit();
  }
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) {
    if (kProductStages == 1) {
      __syncthreads();  // every warp is done with the previous tile
      load_tile(tile);
    }
    if constexpr (kAsync) cp_async_wait<kProductStages - 2>();  // this tile's copies
    const char* const s_k = stage_of(tile) + kProductTiles * kDsTileBytes;
    const int key0 = tile * kDsTile;
    // Makes the tile visible and frees the previous stage; returns whether K holds what zeros of dS do not mask.
    const bool whole = key0 >= s_state.all.begin && key0 + kDsTile <= s_state.all.end;
    bool nonfinite = false;
    if (whole)
      __syncthreads();
    else
      nonfinite = __syncthreads_or(own_chunks_nonfinite<Element, ProductKeyWalk, 1>(s_k));
    if (kProductStages > 1) {
      if (tile + kProductStages - 1 < end_tile) load_tile(tile + kProductStages - 1);
      if constexpr (kAsync) cp_async_commit();
    }
    const ProductPart part = ProductPart::of_warp();
    const int of_warp = part.row / kDsTile, row = part.row % kDsTile;
    if (!whole && !keeps_tile(s_state.kept[of_warp], key0)) continue;
    const char* const s_ds = stage_of(tile) + of_warp * kDsTileBytes;
    if (!nonfinite) {
      product_mma<false>(dQ, s_ds, s_k, row, part.chunk, fresh_tid() % 32);
    } else {
      product_mma<true>(dQ, s_ds, s_k, row, part.chunk, fresh_tid() % 32);
      add_nonfinite_keys(dQ, s_ds, s_k, row, part.chunk, fresh_tid() % 32, s_state.mask,
                         s_state.first_row + of_warp * kDsTile, key0);
    }
  }

  // dQ through shared memory, float32 in place of the stages.
#pragma unroll 1
  for (int first = 0; first < kProductTiles; first += kProductStoreTiles) {
    const ProductPart part = ProductPart::of_warp();
    __syncthreads();  // nobody reads what stands there any more
    if (part.row / kDsTile >= first && part.row / kDsTile < first + kProductStoreTiles)
      stage_rows<kChunks>(dQ, s_tiles + (part.row - first * kDsTile) * (2 * kRowBytes), fresh_tid() % 32, part.chunk);
    __syncthreads();  // the rows are in place
    const int first_row = s_state.first_row + first * kDsTile;
    const int rows = max(0, min(kProductStoreTiles * kDsTile, seq.len_q - first_row));
    const int exist = seq.len_k > 0 ? rows : 0;  // without keys a query has no position to be rotated to
    const GradientRows<Element> to(params.dq, s_state.b, first_row, s_state.h, rows, exist, p.head_dim,
                                   p.scale * GradientShift<Element>::kOffGradient, access.dq);
    store_gradients<kHeadDim>(
        to, p.rope, p.rope.cos != nullptr,
        [&](int row, int d) {  // query_of_ds() is its own inverse
          const int place = row / kDsTile * kDsTile + query_of_ds(row % kDsTile);
          return reinterpret_cast<float*>(s_tiles + Swizzle<2 * kChunks>::offset(place, d / 4));
        },
        [&](int row) { return position_q(p.rope, s_state.b, 0, first_row + row, seq.len_q, seq.len_k); });
  }
}
