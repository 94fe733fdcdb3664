// fa_mma: FlashAttention on tensor cores, float16 and bfloat16 in, float32 accumulators, with explicit fragments.
//
// One block computes kBlockM rows of one head in a main loop over tiles of kBlockN keys (head_dim 128 on Hopper):
//
//              kBlockN = 64 keys
//             +------------------+
//    warp 0   | S = Q Kt  32 x 64 |  registers: 64 floats a lane   softmax in place, P rounded pair by pair
//    warp 1   |           32 x 64 |                                 into the next product's A operand
//    warp 2   |           32 x 64 |
//    warp 3   |           32 x 64 |
//             +------------------+
//    O += P V   registers: 128 floats a lane         Roles: every warp does everything, for its own 32 rows.
//
// Lane g * 4 + t of a warp holds rows g, g + 8, g + 16, g + 24 and, of every 8 keys or channels, columns 2t and 2t + 1
// (ptx/mma.cuh). The accumulators of QKt are in exactly the lanes that need P for PV, so S never goes through shared
// memory. Registers: 192 of S and O, 12 of fragments, 16 of row statistics; the rest of 255 are addresses. What is
// needed once per tile is in shared memory (state.cuh), addresses are recomputed from the thread's index (ptx/tid.cuh).
//
// Shared memory (head_dim 128, Hopper), rows of 256 bytes, swizzled (smem/swizzle.cuh: no read or write conflicts):
//   s_q      [kBlockM][kHeadDim]     32 KB   q; at the end the rounded outputs, each warp's in its own rows
//   s_kv     2 stages of K, V tiles  64 KB   [kBlockN][kHeadDim] each
//   s_state  sequence, mask, ranges of keys
// Together 98 624 bytes: two blocks per SM, 8 warps, 2 per scheduler.
//
// Pipeline: cp.async fills one stage while the other is read. Per tile every thread waits for its own copies of it,
//   synchronizes with the block at the tile's only barrier (which also frees the other stage), and starts the copies of
//   the next tile. With rope, or rows at odd addresses, tiles go through registers instead, and on Turing, which has no
//   cp.async, through registers into a single stage.
//
// Masks: tiles no row of the block sees are not visited; tiles every row sees are detected by two comparisons and take
//   no other branch; only the rest is tested warp by warp, masked, and searched for NaN in V (nonfinite.cuh).
//
// Softmax: in base 2, the scale folded into the exponential's FMA; the reference moves, and O is rescaled, only when a
//   maximum grew by more than 2^8. Sums of weights are a column of ones on the tensor cores (softmax.cuh).
//
// Bound: the tensor cores, in theory. Per warp and tile 264 mma; per lane 64 ex2, 64 FMA, 64 max, 32 conversions, 80
//   ldmatrix per warp. See docs/kernels/fa_mma.md for the count and for the measurements.
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/mma/output.cuh"
#include "attn/mma/product.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/mma/state.cuh"
#include "attn/mma/tile.cuh"
#include "attn/page_gather.cuh"
#include "attn/schedule.cuh"
#include "kernels/attention/fa_mma/config.h"

namespace qf {
namespace fa_mma {

using QWalk = ChunkWalk<kBlockM, kChunks, kThreads>;
using KVWalk = ChunkWalk<kBlockN, kChunks, kThreads>;
using State = BlockState<kWarps, kWarpRows>;
static_assert(sizeof(State) <= kStateBytes, "");

// Which tensors may be copied 16 bytes at a time.
struct Aligned {
  bool q, k, v, out;
};

}  // namespace fa_mma
}  // namespace qf

// kAsync: q, k and v are aligned and copied unchanged and asynchronously; of pages only k and v. Sums: lse needs
// BothSums.
template <bool kAsync, class Sums>
__global__ void __launch_bounds__(qf::fa_mma::kThreads, qf::fa_mma::kMinBlocks)
    qf_fa_mma_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid,
                     const __grid_constant__ qf::fa_mma::Aligned aligned) {
  using namespace qf;
  using namespace qf::fa_mma;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_kv = s_q + kQBytes;  // kStages pairs of tiles, K then V
  State& s_state = *reinterpret_cast<State*>(s_kv + 2 * kStages * kTileBytes);

  {
    const Work work(p, grid);
    const Sequence seq = kPaged ? read_paged_sequence(p, work.b) : read_sequence(p, work.b);
    fill_unserved_rows<Element>(p, seq, work.b, work.h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
    if (!seq.good || work.row_tile * kBlockM >= seq.len_q) return;
    const int kv_head = work.h / (p.q_heads / p.kv_heads);
    const HeadRows<Element> k(p.kv.k, work.b, seq.k0, kv_head, 0, 0, false),
        v(p.kv.v, work.b, seq.k0, kv_head, 0, 0, false);
    s_state.fill(p, work, seq, k.g_head, v.g_head);
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int& b = s_state.b;

  const auto load_q = [&] {
    const HeadRows<Element> q(p.q, b, seq.q0, s_state.h, seq.len_q, p.head_dim, grid.vector.q);
    if constexpr (kAsync) {
      if (!kPaged || (aligned.q && !p.rope.cos)) {
        copy_async<QWalk>(s_q, q.g_head, q.stride_t, s_state.block_row, seq.len_q, p.head_dim);
        return;
      }
    }
    if (p.rope.cos) {
      copy_rotated<QWalk>(s_q, q, s_state.block_row, p.rope, grid.vector.rope,
                          [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
    } else {
      copy_through_registers<QWalk>(s_q, q, s_state.block_row, aligned.q);
    }
  };
  const auto rows_of = [&](const QfTensor& x, bool vector) {  // of K or V
    const int kv_head = s_state.h / (p.q_heads / p.kv_heads);
    if constexpr (kPaged)
      return PagedRows<Element>(x, p.kv, b, kv_head, seq.len_k, p.head_dim, vector);
    else
      return HeadRows<Element>(x, b, seq.k0, kv_head, seq.len_k, p.head_dim, vector);
  };
  const auto load_kv = [&](char* s_tiles, int key0) {
    if constexpr (kAsync && kPaged) {
      copy_pages_async<KVWalk>(s_tiles, s_tiles + kTileBytes, rows_of(p.kv.k, true), rows_of(p.kv.v, true), key0);
      cp_async_commit();
    } else if constexpr (kAsync) {
      copy_async<KVWalk>(s_tiles, static_cast<const Element*>(s_state.k), p.kv.k.stride_t, key0, seq.len_k, p.head_dim);
      copy_async<KVWalk>(s_tiles + kTileBytes, static_cast<const Element*>(s_state.v), p.kv.v.stride_t, key0, seq.len_k,
                         p.head_dim);
      cp_async_commit();
    } else {
      const auto k = rows_of(p.kv.k, grid.vector.k), v = rows_of(p.kv.v, grid.vector.v);
      if constexpr (kPaged)  // its keys were rotated when they were written
        copy_through_registers<KVWalk>(s_tiles, k, key0, aligned.k);
      else if (p.rope.cos)
        copy_rotated<KVWalk>(s_tiles, k, key0, p.rope, grid.vector.rope,
                             [&](int j) { return position_k(p.rope, b, seq.k0, j); });
      else
        copy_through_registers<KVWalk>(s_tiles, k, key0, aligned.k);
      copy_through_registers<KVWalk>(s_tiles + kTileBytes, v, key0, aligned.v);
    }
  };
  const auto s_q_of_warp = [&] { return s_q + fresh_tid() / 32 * (kWarpRows * kHeadDim * 2); };

  float O[kMTiles][kChunks][4] = {};
  RowStatistics<Sums> rows[kMTiles];

  // Tiles take stages in turn; the stage is computed from the tile, because the loop has no register for it.
  const auto s_stage_of = [&](int key0) { return s_kv + key0 / kBlockN % kStages * (2 * kTileBytes); };
  const auto first_key = [&] { return s_state.block_keys.begin / kBlockN * kBlockN; };
  if (s_state.block_keys.begin < s_state.block_keys.end) {
    load_q();
    if (kStages > 1) load_kv(s_stage_of(first_key()), first_key());
  }
  for (int key0 = first_key(); key0 < s_state.block_keys.end; key0 += kBlockN) {
    char* const s_k = s_stage_of(key0);
    char* const s_v = s_k + kTileBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the previous tile
      load_kv(s_k, key0);
    }
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time q's
    // The barrier makes the tile visible to all warps, and after it no warp reads the other stage any more. Where rows
    // see the tile only in part, it also returns whether V holds something that zero weights would not mask.
    const bool whole = s_state.whole_for_block(key0, kBlockN);
    bool nonfinite = false;
    if (whole)
      __syncthreads();
    else
      nonfinite = __syncthreads_or(own_chunks_nonfinite<Element, KVWalk>(s_v));
    if (nonfinite) {
      s_state.spoiled = true;
      clear_nonfinite<Element, KVWalk>(s_v);
      __syncthreads();  // the zeros are in place
    }
    if (kStages > 1 && key0 + kBlockN < s_state.block_keys.end) load_kv(s_stage_of(key0 + kBlockN), key0 + kBlockN);
    if (!whole && s_state.idle(key0, kBlockN)) continue;

    const auto attend = [&](auto& S, int first, auto pv) {  // to the tile's keys from `first` on, as many as S holds
      constexpr int kRowBytes = kHeadDim * 2;
      qk_mma<Tensor, kChunks>(S, s_q_of_warp(), s_k + first * kRowBytes, fresh_tid() % 32);
      if (!scales_plainly(p.scale, p.softcap)) scale_scores(S, p.scale, p.softcap);
      if (!whole && !s_state.whole_for_warp(key0, kBlockN))
        mask_scores(S, TileMask<8>(s_state.mask, s_state.row0(), key0 + first + State::column()),
                    [](int j, int e) { return 8 * j + e; });
      const float factor = s_state.factor;
      online_softmax<1>(S, [=](int, int) { return factor; }, [](int, int) { return 0.0f; }, rows, O);
      pv(s_v + first * kRowBytes);
    };
    if (!kKeepsRemainders || !s_state.sees_few()) {
      float S[kMTiles][kNTiles][4] = {};
      attend(S, 0, [&](const char* s_v) { pv_mma<Tensor, kChunks>(O, rows, S, s_v, fresh_tid() % 32); });
    } else {  // with the remainders, and few keys at a time, so that the registers suffice
#pragma unroll 1
      for (int first = 0; first < kBlockN; first += 16) {
        float S[kMTiles][2][4] = {};
        attend(S, first, [&](const char* s_v) {
          pv_mma<Tensor, kChunks, Remainder>(O, rows, S, s_v, fresh_tid() % 32);
          pv_mma<Tensor, kChunks>(O, rows, S, s_v, fresh_tid() % 32);
        });
      }
    }
  }

  const int lane = threadIdx.x % 32, warp_row = s_state.block_row + threadIdx.x / 32 * kWarpRows;
  const int rows_here = min(kWarpRows, seq.len_q - warp_row);
  if (rows_here <= 0) return;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + s_state.h * p.lse_stride_h + seq.q0 : nullptr;
  finish_rows(O, rows, s_state.mask, s_state.row0(), sink_of(p, s_state.h), g_lse, lane % 4 == 0,
              [](int) { return 0.0f; });
  char* const s_out = s_q_of_warp();
  round_rows<Tensor>(O, s_out, lane);
  if (s_state.spoiled) {
    for (int key = first_key(); key < s_state.block_keys.end; key += kBlockN)
      if (!s_state.whole_for_block(key, kBlockN))
        add_nonfinite<kChunks, Element>(s_out, warp_row, rows_here, p.head_dim, key, kBlockN, s_state.mask, lane,
                                        [&](int j, int d) { return to_float(rows_of(p.kv.v, false).row(j)[d]); });
    __syncwarp();  // other lanes read what this one wrote
  }
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + s_state.h * p.out.stride_h +
                         (seq.q0 + warp_row) * p.out.stride_t;
  store_rows<kChunks>(s_out, g_out, p.out.stride_t, rows_here, p.head_dim, aligned.out, lane);
}

// The pass that runs first, for INT8 pages.
template <class Element>
__global__ void __launch_bounds__(qf::kGatherThreads)
    qf_fa_mma_gather_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ QfKv to,
                            int32_t* const g_table, const qf::PageAccess vector) {
  qf::gather_pages<Element, true>(p, to, g_table, vector);
}
