// sm90_decode: few query rows against many keys, at the rate that memory gives. float16 and bfloat16 in, float32 sums.
//
// One persistent block takes an equal run of the tiles of all (sequence, KV head) units (attn/decode/share.cuh):
//
//    loader   one thread    K and V tiles by TMA, as far ahead as the ring has room
//    warp 0   keys  0..15   S = Q Kt, softmax, O += P V for all 16 rows, its own m, l, O
//    warp 1   keys 16..31
//    warp 2   keys 32..47
//    warp 3   keys 48..63   of each tile of 64 (head_dim 128); warps meet only at the end of a unit
//
// Rows are the Tq * group queries of a KV head; q stays in registers. Where a unit is cut, blocks leave (m, l, O) in
// global memory, and the last of them to finish merges all in the order of the keys: the same bits whoever is last.
//
// Shared memory (head_dim 128): a ring of 3 stages of K and V, 32 KB each; 17 KB where warps bring their sums together.
// Two blocks a multiprocessor, so that 192 KB are in flight.
// Bound: memory. See docs/kernels/decode.md.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/counters.cuh"
#include "attn/decode/tma_tiles.cuh"

namespace qf {
namespace sm90_decode {

template <class Element, int kHeadDim, int kRowWarps>
struct Config : decode::Config<Element, kHeadDim, kRowWarps, 90> {
  using Base = decode::Config<Element, kHeadDim, kRowWarps, 90>;
  static constexpr int kThreads = decode::kConsumers + 32;
  static constexpr int kBlocks = kHeadDim <= 128 && kRowWarps == 1 ? 2 : 1;  // of a multiprocessor
  static constexpr int kStages = kBlocks == 2 ? 3 : kHeadDim <= 128 ? 6 : kHeadDim <= 192 ? 4 : 3;
  static constexpr int kRingBytes = kStages * 2 * Base::Tile::kBytes;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kSharedBytes = kSwizzleBytes + kRingBytes + decode::Area<Base>::kBytes + kBarrierBytes;
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024, "");
};

}  // namespace sm90_decode
}  // namespace qf

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    qf_sm90_decode_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ QfTensor q,
                          const __grid_constant__ qf::decode::TensorMaps maps,
                          const __grid_constant__ qf::decode::Partials partials, const qf::decode::Counters counters,
                          const bool q_aligned, const bool out_aligned) {
  using namespace qf;
  using namespace qf::decode;
  extern __shared__ float4 s_memory[];
  char* const s_tiles =
      reinterpret_cast<char*>(s_memory) + (kSwizzleBytes - shared_address(s_memory) % kSwizzleBytes) % kSwizzleBytes;
  char* const s_area = s_tiles + Config::kRingBytes;
  const TmaRing<Config> ring = {s_tiles,
                                reinterpret_cast<typename TmaRing<Config>::Barriers*>(s_area + Area<Config>::kBytes)};
  static_assert(sizeof(typename TmaRing<Config>::Barriers) <= Config::kBarrierBytes, "");
  if (threadIdx.x == 0) {
    ring.init();
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  const Share<Config::kBlockN> share(p);
  __syncthreads();  // the barriers are in place
  if (threadIdx.x >= kConsumers) {
    name_role("loader");
    load_share<Config>(p, maps, share, ring, threadIdx.x == kConsumers);
  } else {
    name_role("consumer", int(threadIdx.x / 32));
    TmaTiles<Config> tiles(ring);
    attend_share<Config>(p, q, q_aligned, out_aligned, share, tiles, Area<Config>(s_area), partials, counters.all());
  }
}
