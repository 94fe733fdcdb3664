// Writes dS of a consumer's 64 keys and a tile of 64 queries to the workspace (attn/backward/ds_tiles.h), straight from
// registers: the A fragments of the dK MMA. No words are exchanged between lanes or through shared memory: two lanes
// fill a sector of 32 bytes, four lanes half of a key's row.
#pragma once

#include "attn/wgmma/backward/work_tile.cuh"
#include "ptx/ldst.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// heads_left: query heads of the group that are not done, including this one. dS: [key][query], rounded.
template <class Config>
__device__ __forceinline__ void store_ds(const DsMemory& ds, const WorkTile<Config>& work, int heads_left, int column0,
                                         const uint32_t (&dS)[Config::kColumnSteps][4]) {
  if (!ds.g_tiles) return;
  const int own = first_own_row<Config>() % kDsTile, lane = lane_index();
  const int64_t tile = ds.tiles.tile(work.ds_head + work.heads - heads_left, int(uint32_t(column0) / kDsTile),
                                     work.ds_place[Config::kSplits ? 0 : consumer_index()]);
  char* const g_tile = ds.g_tiles + tile * kDsTileBytes;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      st_global(g_tile + chunk_of_ds(own + 8 * h + lane / 4, half, lane % 4),
                Word4{{dS[2 * half][h], dS[2 * half][2 + h], dS[2 * half + 1][h], dS[2 * half + 1][2 + h]}});
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
