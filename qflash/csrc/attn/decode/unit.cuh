// A unit, one KV head of one sequence, as the warps that attend to it see it.
#pragma once

#include "attn/decode/share.cuh"
#include "attn/mma/state.cuh"
#include "attn/pages.cuh"

namespace qf {
namespace decode {

// What the consumers need of one unit, or that there is none left.
template <class Config>
struct Unit {
  Part part;
  Seen<Config> seen;
  int first_key, tiles;  // of this block's part; tiles -1: the share is done
  bool lost;             // a key that some row sees is in no page of the pool: these rows are NaN
  bool few;              // some row sees so few keys that the rounding of its weights does not average out
  bool spoiled;          // with KV from quantize_kv: a key may be nonfinite
};

// Describes a part's unit. Collective for a warp; one lane writes.
template <class Config>
__device__ __forceinline__ void describe_unit(const QfAttnParams& p, const Part& part, Unit<Config>& unit) {
  Seen<Config> seen(p, part.b);
  const int first_key = seen.first_key(part), tiles = seen.tiles(part);
  bool lost = false;
  if constexpr (Config::kPaged) {
    const int end = min(seen.any.end, first_key + tiles * Config::kBlockN);
    lost = !PageRow(p.kv, part.b).all_in_pool({max(seen.any.begin, first_key), end});
  }
  if (threadIdx.x % 32 != 0) return;
  unit.part = part;
  unit.first_key = first_key;
  unit.tiles = tiles;
  unit.lost = lost;
  // Infinity times a remainder has an arbitrary sign. So where remainders are multiplied, no nonfinite value is: as if
  // no key were seen by all rows, store_row() adds them.
  unit.few = Config::kKeepsRemainders && seen.sees_few(kFewKeys);
  if (unit.few) seen.all = {0, 0};
  if constexpr (Config::kKept)
    unit.spoiled = !p.kv.k_nonfinite || p.kv.k_nonfinite[part.b * p.kv_heads + part.kv_head] != 0;
  unit.seen = seen;
}

}  // namespace decode
}  // namespace qf
