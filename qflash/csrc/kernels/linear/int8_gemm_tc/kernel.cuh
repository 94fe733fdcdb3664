// int8_gemm_tc: out = a b on tensor cores, exact int32 sums.
//
// One block of 8 warps computes a tile, 128 x 256 (Wide, data centre parts) or 128 x 128 (Square), walking along k in
// steps of 128 bytes:
//
//                      kBlockN = 256                      A warp owns 64 x 64 (Wide) or 32 x 64 (Square) sums:
//             +--------+--------+--------+--------+       128 or 64 registers a lane. Per 32 bytes of k it reads
//   kBlockM   | warp 0 | warp 2 | warp 4 | warp 6 |       4 (2) fragments of a and 8 of b by ldmatrix, 4 (2) + 4
//   = 128     +--------+--------+--------+--------+       instructions, and issues 32 (16) mma m16n8k32. Turing has
//             | warp 1 | warp 3 | warp 5 | warp 7 |       m8n8k16 only: four of them do the same on the same registers.
//             +--------+--------+--------+--------+
//
// Shared memory: kStages x (kBlockM + kBlockN) rows of 128 bytes, swizzled (gemm/swizzle.cuh).
//   Wide: 48 KB a stage, 4 stages on sm_90 (192 KB), 3 on sm_80. Square: 32 KB, 4, 3 (sm_86, sm_89) or 2 (sm_75).
//   After the last product 4.5 KB of it per warp transpose sums for the stores.
//
// Pipeline: while step t is multiplied, steps t + 1 .. t + kStages - 1 are on their way. One barrier per step, before
//   its last quarter: by then every warp has read the last of stage t (fragments are read a quarter ahead, the last
//   one before the barrier), and every thread's copies of stage t + 1 have arrived, which the barrier makes visible to
//   all. So after it fragments may be read from stage t + 1, and copies go to the stage that held t.
//   Operands that cannot be copied asynchronously (load.cuh) sit in registers from a step's start to its barrier.
//
// Bound: tensor cores; shared memory reads come close behind. Prediction and measurement: docs/kernels/int8_gemm_tc.md.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/schedule.cuh"
#include "kernels/linear/int8_gemm_tc/load.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace qf {
namespace int8_gemm_tc {

constexpr int kQuarter = 32;  // bytes of k per mma

__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kArch >= 80) {
    mma_m16n8k32_s8(c, a, b0, b1);
  } else {
    mma_m8n8k16_s8(c[0], c[1], a[0], b0);
    mma_m8n8k16_s8(c[2], c[3], a[1], b0);
    mma_m8n8k16_s8(c[0], c[1], a[2], b1);
    mma_m8n8k16_s8(c[2], c[3], a[3], b1);
  }
}

// A warp's operands for a quarter of a step, sixteen rows of 32 bytes an ldmatrix.
template <class Shape>
struct Fragments {
  static constexpr int kRowTiles = Shape::kWarpM / 16, kColumnPairs = kWarpN / 16;
  uint32_t a[kRowTiles][4];     // rows 0..7 and 8..15 of bytes 0..15, then of bytes 16..31
  uint32_t b[kColumnPairs][4];  // bytes 0..15 and 16..31 of columns 0..7, then of columns 8..15

  __device__ __forceinline__ void load(const char* s_stage, int quarter, unsigned s_a, unsigned s_b) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(a[i], s_stage + swizzled_further(s_a, i, quarter));
#pragma unroll
    for (int j = 0; j < kColumnPairs; ++j) ldmatrix_x4(b[j], s_stage + swizzled_further(s_b, j, quarter));
  }

  // Offsets in a stage of what this lane points ldmatrix at, for the first sixteen rows of the first quarter.
  __device__ static __forceinline__ unsigned first_of_a(int warp, int lane) {
    return swizzled(warp % Shape::kWarpsM * Shape::kWarpM + lane % 16, lane / 16);
  }
  __device__ static __forceinline__ unsigned first_of_b(int warp, int lane) {
    return Shape::kBlockM * kBlockK + swizzled(warp / Shape::kWarpsM * kWarpN + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
};

template <class Shape>
struct Sums {
  int32_t c[Shape::kWarpM / 16][kWarpN / 8][4];

  __device__ __forceinline__ void add(const Fragments<Shape>& f) {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
      for (int i = 0; i < Shape::kWarpM / 16; ++i)
        mma(c[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
  }
};

// 16 rows of a warp's sums in shared memory, on their way from the layout of mma to rows. Rows are 8 words longer than
// they need be: the 8-byte stores of a half-warp, 4 rows x 4 lanes, then fill the 32 banks.
constexpr int kSlabStride = kWarpN + 8;
constexpr int kSlabWords = 16 * kSlabStride;

template <class Shape>
__device__ __forceinline__ void store_out(const QfLinearParams& p, bool vector, int row0, int column0,
                                          const Sums<Shape>& sums, int32_t* s_slab, int lane) {
  constexpr int kCount = 16 / sizeof(Out), kAcross = kWarpN / kCount, kDown = 32 / kAcross;
  const int column = column0 + lane % kAcross * kCount;
  const Columns<kCount> columns(p, column);
#pragma unroll
  for (int i = 0; i < Shape::kWarpM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<int2*>(s_slab + (lane / 4 + 8 * half) * kSlabStride + 8 * j + lane % 4 * 2) =
            int2{sums.c[i][j][2 * half], sums.c[i][j][2 * half + 1]};
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; r += kDown) {
      const int row = r + lane / kAcross;
      int32_t values[kCount];
#pragma unroll
      for (int e = 0; e < kCount; e += 4) {
        const int4 four = *reinterpret_cast<const int4*>(s_slab + row * kSlabStride + lane % kAcross * kCount + e);
        values[e] = four.x, values[e + 1] = four.y, values[e + 2] = four.z, values[e + 3] = four.w;
      }
      store_columns<Out, kActivation>(p, vector, row0 + 16 * i + row, column, values, columns);
    }
    __syncwarp();  // read before the next 16 rows overwrite it
  }
}

}  // namespace int8_gemm_tc
}  // namespace qf

template <class Shape, class LoadA, class LoadB>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    qf_int8_gemm_tc_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  using namespace qf;
  using namespace qf::int8_gemm_tc;
  constexpr int kStages = Shape::kStages, kQuarters = kBlockK / kQuarter;
  extern __shared__ float4 s_memory[];
  char* const s_stages = reinterpret_cast<char*>(s_memory);
  const auto stage = [&](int index) { return s_stages + index * Shape::kStageBytes; };

  const Tile tile(grid, blockIdx.x, kBandRows);
  const int row0 = tile.row * Shape::kBlockM, column0 = tile.column * Shape::kBlockN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (int(p.k) + kBlockK - 1) / kBlockK;

  LoadA a(grid.a, row0);
  LoadB b(grid.b, column0);
  const auto fetch = [&](int step, char* s_stage) {
    if (step >= steps) return;
    a.fetch(step * kBlockK, s_stage), b.fetch(step * kBlockK, s_stage + Shape::kBlockM * kBlockK);
  };
  const auto stash = [&](int step, char* s_stage) {
    if (step >= steps) return;
    a.stash(s_stage), b.stash(s_stage + Shape::kBlockM * kBlockK);
  };
  const auto commit = [] {
    if constexpr (kAsync) cp_async_commit();
  };
  const auto arrive = [] {
    if constexpr (kAsync) cp_async_wait<kStages - 2>();
    __syncthreads();
  };

#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) {
    fetch(step, stage(step));
    stash(step, stage(step));
    commit();
  }
  arrive();

  // Fragments are read a quarter ahead where registers allow it.
  constexpr bool kAhead = Shape::kWarpM * kWarpN + 32 * LoadB::kHeldWords <= 32 * 128;
  const unsigned s_a = Fragments<Shape>::first_of_a(warp, lane), s_b = Fragments<Shape>::first_of_b(warp, lane);
  Sums<Shape> sums = {};
  Fragments<Shape> fragments[kAhead ? 2 : 1];
  int now = 0, next = 1, last = kStages - 1;  // stages of this step, of the next, and the one to be filled
  if constexpr (kAhead)
    if (steps > 0) fragments[0].load(stage(0), 0, s_a, s_b);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int coming = step + kStages - 1;
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      const bool ends = quarter == kQuarters - 1;
      if constexpr (!kAhead) fragments[0].load(stage(now), quarter, s_a, s_b);
      if (ends) {
        stash(coming, stage(last));
        arrive();
      }
      if constexpr (kAhead)
        if (!ends || step + 1 < steps)
          fragments[(quarter + 1) % 2].load(stage(ends ? next : now), (quarter + 1) % kQuarters, s_a, s_b);
      if (quarter == 0) {
        fetch(coming, stage(last));
        commit();
      }
      sums.add(fragments[kAhead ? quarter % 2 : 0]);
    }
    last = now, now = next;
    next = next + 1 == kStages ? 0 : next + 1;
  }

  // No barrier: before the last step's, every warp had read its last fragments. The stages become slabs.
  int32_t* const s_slab = reinterpret_cast<int32_t*>(s_memory) + warp * kSlabWords;
  const int warp_row = row0 + warp % Shape::kWarpsM * Shape::kWarpM,
            warp_column = column0 + warp / Shape::kWarpsM * kWarpN;
  store_out(p, grid.vector_out, warp_row, warp_column, sums, s_slab, lane);
}
