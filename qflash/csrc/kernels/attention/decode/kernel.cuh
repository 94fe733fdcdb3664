// decode: few query rows against many keys on any GPU from sm_75 on. float16 and bfloat16 in, or K and V in INT8 pages,
// or K in INT8 from quantize_kv; float32 accumulators.
//
// One block per SM takes an equal run of the tiles of all sequences (attn/decode/share.cuh). Its warps form teams of
// one (up to 16 rows), two or four, which take tiles in turn and copy them (attn/decode/own_tiles.cuh) into their own
// ring:
//
//    warp w of seven    tiles w, w + 7, ..: each S = Q Kt, softmax, O += P V for all rows and the tile's 16 keys, with
//                       its own m, l, O; then the copies of the tile three turns later; warps synchronize only at the
//                       end of a unit
//    units, one warp    the description of the next unit, and its q (attn/decode/own_units.cuh)
//
// Rows are the Tq * group queries of a KV head, rotated as they are copied to shared memory; up to head_dim 128 they
// stay in registers. Where a unit is cut, blocks write (m, l, O) to global memory, and the block that ends the unit
// merges all parts in the order of the keys when its share is done.
//
// Shared memory (head_dim 128, up to 16 rows, Hopper): 7 rings of 3 stages of K and V, 8 KB each, of which at least two
// are in flight: 112 KB; 31 KB where warps reduce their accumulators. Two stages on sm_80, one on sm_86 and sm_89; on
// Turing five warps with one each, which overlap with one another. INT8 pages have twice as many keys in a stage.
// Bound: memory. See docs/kernels/decode.md.
#pragma once

#include "attn/decode/counters.cuh"
#include "attn/decode/int8_sums.cuh"
#include "attn/decode/kept_sums.cuh"
#include "attn/decode/own_tiles.cuh"
#include "kernels/attention/decode/config.h"
#include "ptx/names.cuh"

template <class Config, bool kAsync>
__global__ void __launch_bounds__(Config::kThreads, 1)
    qf_decode_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::decode::Runs runs,
                     qf::decode::Partials partials, const qf::decode::Flags flags,
                     const __grid_constant__ qf::decode::Aligned aligned) {
  using namespace qf;
  using namespace qf::decode;
  extern __shared__ float4 s_memory[];
  const OwnMemory<Config> memory = {reinterpret_cast<char*>(s_memory)};
  partials.flags = flags.all();
  if (p.kv_lens) wait_for_previous_grid();  // it may have written the lengths
  if (threadIdx.x >= Config::kConsumers) {
    name_role("units");
    UnitWriter<Config, OwnMemory<Config>>(p, aligned, partials, memory).describe_all(runs);
  } else {
    name_role("consumer", int(threadIdx.x / 32));
    OwnTiles<Config, kAsync> tiles(p, runs, aligned, partials, memory);
    attend_share<Config>(p, aligned.out, tiles, Area<Config>(memory.area()), partials);
  }
}
