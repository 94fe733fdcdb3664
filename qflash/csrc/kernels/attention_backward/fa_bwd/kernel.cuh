// fa_bwd: gradients of attention on CUDA cores. Products and accumulators in float32 for float32, float16 and bfloat16
// arrays.
//
// Two kernels of one structure. In one, keys are stationary: a block computes dK and dV of kBlockRows keys of a KV
// head, and the queries of the heads that share it stream by, head by head, always in the same order. In the other,
// queries are stationary: a block computes dQ of kBlockRows queries, and keys stream by. No two blocks add to the same
// gradient, so there are no atomics, and the same input gives the same bits.
//
//   stationary rows (keys | queries), warp by warp         S  = A1 B1t, A1 = K | Q, B1 = Q | K
//   x kColumns streamed columns                            dP = A2 B2t, A2 = V | dO, B2 = dO | V
//   P = 2^(S - lse), dS = P (dP - delta): registers        dV += P B2   dK += dS B1   |   dQ += dS B1
//
// Shared memory: a chunk of kDepth channels of both operands of S or dP, or of kDepthRows rows of B1 or B2; P or dS of
// the tile, each warp's own rows; lse and delta. Operands are loaded from L2 chunk by chunk: a float32 tile of all
// channels would fill the shared memory alone, and small blocks hide each other's loads.
//
// Masks: tiles no row of the block sees are not visited. NaN and infinity in a streamed row that some row of the block
// does not see are left out of that row's sum, instead of being multiplied by 0 (as `fa` does with V).
//
// Bound: the FMA units, 7 products (8 from head_dim 96 on, where dV and dK are computed separately and S twice).
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/keys.cuh"
#include "attn/backward/output.cuh"
#include "attn/backward/state.cuh"
#include "attn/cuda_core/backward.cuh"
#include "attn/cuda_core/product.cuh"
#include "attn/schedule.cuh"
#include "kernels/attention_backward/fa_bwd/config.h"

namespace qf {
namespace fa_bwd {

using AWalk = TileWalk<kBlockRows, kDepth, kThreads>;
using BWalk = TileWalk<kColumns, kDepth, kThreads>;
using RowsWalk = TileWalk<kDepthRows, kHeadDim, kThreads>;
using LaneMask = TileMask<kLanesY>;

// Which tensors may be read in vectors of four, and which gradients may be written 16 bytes at a time.
struct Access {
  Vectorises vector;
  bool dout, dq, dk, dv;
};

// Rows of one head of q, k, v or dout, of which q and k are rotated.
struct Operand {
  HeadRows<Element> rows;
  bool rotated, queries;
};

// The block's problem.
struct Problem {
  const QfAttnParams& p;
  const Sequence& seq;
  int b;
  bool rope_vector;

  __device__ __forceinline__ int position(const Operand& x, int row) const {
    return x.queries ? position_q(p.rope, b, seq.q0, row, seq.len_q, seq.len_k) : position_k(p.rope, b, seq.k0, row);
  }
  // s_tile <- rows row0 .., channels d0 ..
  template <class Walk, int kStride>
  __device__ __forceinline__ void load(float* s_tile, const Operand& x, int row0, int d0) const {
    if (x.rotated)
      load_scaled<Walk, kStride>(s_tile, x.rows, row0, d0, 1.0f, p.rope, rope_vector,
                                 [&](int row) { return position(x, row); });
    else
      load_scaled<Walk, kStride>(s_tile, x.rows, row0, d0, 1.0f);
  }
};

// S = A Bt: rows row0 .. of a, columns column0 .. of b.
__device__ __forceinline__ void multiply(float (&S)[kRows][kScoreCols], const Problem& problem, const Operand& a,
                                         int row0, const Operand& b, int column0, float* s_chunk) {
  float* const s_b = s_chunk + kAFloats;
  set_rows(S, 0.0f);
#pragma unroll 1
  for (int d0 = 0; d0 < kHeadDim; d0 += kDepth) {
    __syncthreads();  // everybody is done with the chunk before
    problem.load<AWalk, kDepthStride>(s_chunk, a, row0, d0);
    problem.load<BWalk, kDepthStride>(s_b, b, column0, d0);
    __syncthreads();  // the chunk is there
    const int lane = fresh_tid() % 32, warp = fresh_tid() / 32;
    qk_product<kLanesX, kScoreCols, kDepth, kDepthStride, kDepthStride, 1>(
        S, s_chunk + (warp * kWarpRows + Lanes<kLanesX>::y(lane)) * kDepthStride,
        s_b + Lanes<kLanesX>::x(lane) * kDepthStride);
  }
}

// acc += W X for the weights in `weights` (P or dS) and rows column0 .. of x; columns from `end` on do not exist.
// partial: some pair of the tile is invisible.
__device__ __forceinline__ void update(float (&acc)[kRows][4 * kOutVecs], const float (&weights)[kRows][kScoreCols],
                                       const Problem& problem, const Operand& x, int column0, int end, const Mask& mask,
                                       int row0, bool partial, float* s_chunk, float* s_p) {
  const int lane = fresh_tid() % 32, warp = fresh_tid() / 32;
  const int lane_x = Lanes<kLanesX>::x(lane), lane_row = warp * kWarpRows + Lanes<kLanesX>::y(lane);
  float* const s_rows = s_p + lane_row * kPStride;
  __syncwarp();  // this warp's lanes are done with what they stored there before
  store_weights<kLanesX, kPStride>(s_rows + lane_x, weights);
#pragma unroll 1
  for (int n0 = 0; n0 < kColumns && column0 + n0 < end; n0 += kDepthRows) {
    __syncthreads();  // the weights are in place, and every warp is done with the previous chunk
    problem.load<RowsWalk, kHeadDim>(s_chunk, x, column0 + n0, 0);
    bool finite_rows = true;
    if (partial) {
#pragma unroll
      for (int i = 0; i < RowsWalk::kVecs; ++i)
        finite_rows &= finite(*reinterpret_cast<const float4*>(s_chunk + RowsWalk::row(fresh_tid(), i) * kHeadDim +
                                                               RowsWalk::column(fresh_tid(), i)));
    }
    const bool hides = __syncthreads_or(!finite_rows);  // the chunk is there
    if (hides)
      pv_product<kLanesX, kOutVecs, kDepthRows, kPStride, kHeadDim>(acc, s_rows + n0, s_chunk + 4 * lane_x,
                                                                    LaneMask(mask, row0 + lane_row, column0 + n0));
    else
      pv_product<kLanesX, kOutVecs, kDepthRows, kPStride, kHeadDim>(acc, s_rows + n0, s_chunk + 4 * lane_x,
                                                                    AllVisible{});
  }
}

// Stores gradients of the block's rows to global memory: a few rows of each warp at a time through shared memory, where
// they are rotated back.
template <class Position>
__device__ __forceinline__ void store(const float (&acc)[kRows][4 * kOutVecs], const QfTensor& to, int b, int64_t first,
                                      int h, int rows, int exist, const QfAttnParams& p, float factor, bool rotated,
                                      bool aligned, float* s_chunk, Position position) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* const s_stage = s_chunk + warp * kLanesY * kHeadDim;
  __syncthreads();  // nobody reads a chunk any more
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = warp * kWarpRows + r * kLanesY;  // kLanesY neighbouring rows
#pragma unroll
    for (int c = 0; c < kOutVecs; ++c)
      write4(s_stage + Lanes<kLanesX>::y(lane) * kHeadDim + 4 * (Lanes<kLanesX>::x(lane) + c * kLanesX),
             make_float4(acc[r][4 * c], acc[r][4 * c + 1], acc[r][4 * c + 2], acc[r][4 * c + 3]));
    __syncwarp();  // other lanes read what this one wrote
    const auto of_these = [&](int n) { return max(0, min(kLanesY, n - row)); };
    const GradientRows<Element> out(to, b, first + row, h, of_these(rows), of_these(exist), p.head_dim, factor,
                                    aligned);
    store_gradients<kHeadDim, WholeWarp>(
        out, p.rope, rotated, [&](int y, int d) { return s_stage + y * kHeadDim + d; },
        [&](int y) { return position(row + y); });
    __syncwarp();  // the rows were read
  }
}

// Which gradients a kernel of stationary keys computes.
enum Of { kOfBoth, kOfValues, kOfKeys };

}  // namespace fa_bwd
}  // namespace qf

template <qf::fa_bwd::Of kOf>
__global__ void __launch_bounds__(qf::fa_bwd::kThreads, qf::fa_bwd::kMinBlocks)
    qf_fa_bwd_keys_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::KeyGrid grid,
                          const __grid_constant__ qf::fa_bwd::Access access) {
  using namespace qf;
  using namespace qf::fa_bwd;
  extern __shared__ float4 s_memory[];
  float* const s_chunk = reinterpret_cast<float*>(s_memory);
  float* const s_p = s_chunk + kChunkFloats;
  float* const s_lse = s_p + kPFloats;
  float* const s_delta = s_lse + kColumns;
  const QfAttnParams& p = params.fwd;
  constexpr bool kWantsV = kOf != kOfKeys, kWantsK = kOf != kOfValues;

  const KeyWork work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  const KeyRows owned = read_key_rows(p, b);
  const int first_key = work.key_tile * kBlockRows;
  if (kWantsK) fill_unserved_keys<Element>(p, params.dk, owned, seq.good, work, grid.key_tiles);
  if (kWantsV) fill_unserved_keys<Element>(p, params.dv, owned, seq.good, work, grid.key_tiles);
  if (!seq.good || !owned.known || first_key >= owned.owned) return;

  const Problem problem = {p, seq, b, access.vector.rope};
  const Mask mask = mask_of_keys(p, seq);
  const int last_key = min(first_key + kBlockRows, seq.len_k) - 1;
  const KeyRange any = first_key <= last_key ? mask.seen_by_any(first_key, last_key) : KeyRange{0, 0};
  const KeyRange all = first_key + kBlockRows <= seq.len_k ? mask.seen_by_all(first_key, last_key) : KeyRange{0, 0};
  const Operand k = {HeadRows<Element>(p.kv.k, b, seq.k0, h, seq.len_k, p.head_dim, access.vector.k),
                     p.rope.cos != nullptr, false};
  const Operand v = {HeadRows<Element>(p.kv.v, b, seq.k0, h, seq.len_k, p.head_dim, access.vector.v), false, false};

  float dV[kRows][kWantsV ? 4 * kOutVecs : 4] = {}, dK[kRows][kWantsK ? 4 * kOutVecs : 4] = {};
  const int group = p.q_heads / p.kv_heads;
#pragma unroll 1
  for (int head = h * group; head < (h + 1) * group; ++head) {
    const Operand q = {HeadRows<Element>(p.q, b, seq.q0, head, seq.len_q, p.head_dim, access.vector.q),
                       p.rope.cos != nullptr, true};
    const Operand dout = {HeadRows<Element>(params.dout, b, seq.q0, head, seq.len_q, p.head_dim, access.dout), false,
                          true};
#pragma unroll 1
    for (int row0 = any.begin / kColumns * kColumns; row0 < any.end; row0 += kColumns) {
      const bool partial = row0 < all.begin || row0 + kColumns > all.end;
      __syncthreads();  // every warp is done with the statistics of the previous tile
      for (int i = threadIdx.x; i < kColumns; i += kThreads) {
        const bool exists = row0 + i < seq.len_q;
        const int64_t place = statistics_at(p, b, head, seq.q0, exists ? row0 + i : 0);
        s_lse[i] = exists ? minus_lse2(p.lse[place]) : -infinity();
        s_delta[i] = exists ? -static_cast<const float*>(params.workspace)[place] : 0.0f;
      }
      float P[kRows][kScoreCols];
      float slopes[kRows][kOf == kOfBoth ? kScoreCols : 1];  // where P is needed without them first
      multiply(P, problem, k, first_key, q, row0, s_chunk);
      const int lane = fresh_tid() % 32, lane_x = Lanes<kLanesX>::x(lane);
      const int lane_row = first_key + fresh_tid() / 32 * kWarpRows + Lanes<kLanesX>::y(lane);
      const LaneMask lane_mask(mask, lane_row, row0 + lane_x);
      const auto seen = [&](int r, int j) {
        return !partial || (lane_mask(r, j * kLanesX) && lane_row + r * kLanesY <= last_key);
      };
      weigh(
          P, p.scale, p.softcap, [&](int, int j) { return s_lse[lane_x + j * kLanesX]; }, seen,
          [&](float weight, float slope, int r, int j) {
            if constexpr (kOf == kOfBoth) slopes[r][j] = slope;
            return kOf == kOfKeys ? weight * slope : weight;
          });
      if constexpr (kWantsV) update(dV, P, problem, dout, row0, seq.len_q, mask, first_key, partial, s_chunk, s_p);
      if constexpr (kOf == kOfBoth) multiply_rows(P, slopes);
      if constexpr (kWantsK) {
        float dS[kRows][kScoreCols];
        multiply(dS, problem, v, first_key, dout, row0, s_chunk);
        differentiate(dS, P, [&](int, int j) { return s_delta[lane_x + j * kLanesX]; }, seen);
        update(dK, dS, problem, q, row0, seq.len_q, mask, first_key, partial, s_chunk, s_p);
      }
    }
  }

  const int64_t left = owned.owned - first_key;
  const int rows = left < kBlockRows ? int(left) : kBlockRows;
  const int exist = max(0, min(rows, seq.len_k - first_key));
  const auto position = [&](int row) { return position_k(p.rope, b, seq.k0, first_key + row); };
  if constexpr (kWantsV)
    store(dV, params.dv, b, owned.first + first_key, h, rows, exist, p, 1.0f, false, access.dv, s_chunk, position);
  if constexpr (kWantsK)
    store(dK, params.dk, b, owned.first + first_key, h, rows, exist, p, p.scale, p.rope.cos != nullptr, access.dk,
          s_chunk, position);
}

// fwd.out is dq here, so that rows that no sequence serves are filled as the forward pass fills those of out.
__global__ void __launch_bounds__(qf::fa_bwd::kThreads, qf::fa_bwd::kMinBlocks)
    qf_fa_bwd_queries_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                             const __grid_constant__ qf::fa_bwd::Access access) {
  using namespace qf;
  using namespace qf::fa_bwd;
  extern __shared__ float4 s_memory[];
  float* const s_chunk = reinterpret_cast<float*>(s_memory);
  float* const s_p = s_chunk + kChunkFloats;
  float* const s_lse = s_p + kPFloats;
  float* const s_delta = s_lse + kBlockRows;
  const QfAttnParams& p = params.fwd;

  const Work work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, 0, p.head_dim, false);
  const int first_row = work.row_tile * kBlockRows;
  if (!seq.good || first_row >= seq.len_q) return;

  const Problem problem = {p, seq, b, access.vector.rope};
  const Mask mask = mask_of_queries(p, seq);
  const int last_row = min(first_row + kBlockRows, seq.len_q) - 1;
  const KeyRange any = mask.seen_by_any(first_row, last_row);
  const KeyRange all = first_row + kBlockRows <= seq.len_q ? mask.seen_by_all(first_row, last_row) : KeyRange{0, 0};
  const int kv_head = h / (p.q_heads / p.kv_heads);
  const Operand q = {HeadRows<Element>(p.q, b, seq.q0, h, seq.len_q, p.head_dim, access.vector.q),
                     p.rope.cos != nullptr, true};
  const Operand dout = {HeadRows<Element>(params.dout, b, seq.q0, h, seq.len_q, p.head_dim, access.dout), false, true};
  const Operand k = {HeadRows<Element>(p.kv.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, access.vector.k),
                     p.rope.cos != nullptr, false};
  const Operand v = {HeadRows<Element>(p.kv.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, access.vector.v), false,
                     false};
  for (int i = threadIdx.x; i < kBlockRows; i += kThreads) {
    const bool exists = first_row + i <= last_row;
    const int64_t place = statistics_at(p, b, h, seq.q0, exists ? first_row + i : 0);
    s_lse[i] = exists ? minus_lse2(p.lse[place]) : -infinity();
    s_delta[i] = exists ? -static_cast<const float*>(params.workspace)[place] : 0.0f;
  }

  float dQ[kRows][4 * kOutVecs] = {};
#pragma unroll 1
  for (int key0 = any.begin / kColumns * kColumns; key0 < any.end; key0 += kColumns) {
    const bool partial = key0 < all.begin || key0 + kColumns > all.end;
    float P[kRows][kScoreCols], dS[kRows][kScoreCols];
    multiply(P, problem, q, first_row, k, key0, s_chunk);
    const int lane = fresh_tid() % 32, lane_x = Lanes<kLanesX>::x(lane);
    const int lane_row = fresh_tid() / 32 * kWarpRows + Lanes<kLanesX>::y(lane);
    const LaneMask lane_mask(mask, first_row + lane_row, key0 + lane_x);
    const auto seen = [&](int r, int j) {
      return !partial || (lane_mask(r, j * kLanesX) && first_row + lane_row + r * kLanesY <= last_row);
    };
    weigh(
        P, p.scale, p.softcap, [&](int r, int) { return s_lse[lane_row + r * kLanesY]; }, seen,
        [](float weight, float slope, int, int) { return weight * slope; });
    multiply(dS, problem, dout, first_row, v, key0, s_chunk);
    differentiate(dS, P, [&](int r, int) { return s_delta[lane_row + r * kLanesY]; }, seen);
    update(dQ, dS, problem, k, key0, seq.len_k, mask, first_row, partial, s_chunk, s_p);
  }

  const int rows = last_row + 1 - first_row;
  const int exist = seq.len_k > 0 ? rows : 0;  // without keys a query has no position to be rotated to
  store(dQ, params.dq, b, seq.q0 + first_row, h, rows, exist, p, p.scale, p.rope.cos != nullptr, access.dq, s_chunk,
        [&](int row) { return position_q(p.rope, b, seq.q0, first_row + row, seq.len_q, seq.len_k); });
}
