// The consumers of a block: teams of warps that attend to the block's share of the keys, one tile each in turn.
//
// Tiles come from a Source. next_team() returns the team of the next tile, is_mine() whether it is this team. wait_k()
// and wait_v() return its K and V once they have arrived, release() frees both; skip() leaves the tile to another team.
// meet_team() and meet() synchronize the warps of a team, and all of them.
#pragma once

#include "attn/decode/output.cuh"
#include "attn/decode/product.cuh"
#include "attn/decode/scores.cuh"
#include "attn/decode/unit.cuh"
#include "attn/mma/nonfinite.cuh"

namespace qf {
namespace decode {

// Zeros what a row of V's tile would spoil although it is masked (0 times NaN): keys that no row sees, and NaN and
// infinity at keys that only some rows see.
template <class Config>
__device__ inline void clear_unseen(char* s_v, int key0, const KeyRange& any, const KeyRange& all) {
  using Tile = typename Config::Tile;
  for (int i = threadIdx.x % Config::kTeamThreads; i < Config::kBlockN * Config::kChunks; i += Config::kTeamThreads) {
    const int row = i / Config::kChunks, chunk = i % Config::kChunks, key = key0 + row;
    if (key >= all.begin && key < all.end) continue;
    uint4& s_chunk = *reinterpret_cast<uint4*>(s_v + chunk / Tile::kChunks * Tile::kPanelBytes +
                                               Swizzle<Tile::kChunks>::offset(row, chunk % Tile::kChunks));
    uint4 x = s_chunk;
    const bool seen = key >= any.begin && key < any.end;
    const auto clear = [&](uint32_t& word) {
      if (!seen || word_nonfinite<typename Config::Element>(word & 0xffffu)) word &= 0xffff0000u;
      if (!seen || word_nonfinite<typename Config::Element>(word >> 16)) word &= 0x0000ffffu;
    };
    clear(x.x), clear(x.y), clear(x.z), clear(x.w);
    s_chunk = x;
  }
}

// Shared memory in which the warps reduce their accumulators.
template <class Config>
struct Area {
  float* rows;    // [warp][8][kAreaStride]
  RowSums* sums;  // [warp][8]

  static constexpr int kBytes = Config::kAreaBytes + Config::kStatsBytes;
  static constexpr int kColumnPasses = Config::kHeadDim / Config::kAreaColumns;
  __device__ __forceinline__ explicit Area(char* s_memory)
      : rows(reinterpret_cast<float*>(s_memory)), sums(reinterpret_cast<RowSums*>(s_memory + Config::kAreaBytes)) {}
};

// The thread's index. Where outputs and other values fill the registers, it is read afresh, so that nothing derived
// from it stays in registers.
template <class Config>
__device__ __forceinline__ uint32_t thread_of() {
  if constexpr (Config::kFewRegisters)
    return uint32_t(fresh_tid());
  else
    return threadIdx.x;
}

// The accumulators of one warp over its part of the keys of one unit.
template <class Config>
struct WarpSums {
  __device__ static __forceinline__ QueryRows<Config> queries(const QfAttnParams&, const char* s_queries, int row0,
                                                              int lane) {
    return QueryRows<Config>(s_queries + row0 * (Config::kHeadDim * 2), lane);
  }

  float O[1][Config::kChunks][4] = {};
  RowStatistics<BothSums> rows[1];

  // A tile of keys from key0 on. kPlain: every row sees all of them, and scores are a positive factor times q . k. Such
  // tiles have separate, contiguous code: a short call spends much of its time fetching code for the first time.
  template <bool kPlain, class Source>
  __device__ __forceinline__ void attend(const QfAttnParams& p, const QueryRows<Config>& q, const Unit<Config>& unit,
                                         int key0, Source& source) {
    const uint32_t thread = thread_of<Config>();
    const int lane = thread % 32, warp = thread / 32 % Config::kTeamWarps;
    const int row0 = warp / Config::kKeyWarps * 16, first = warp % Config::kKeyWarps * Config::kWarpKeys;
    const float factor = kPlain ? p.scale * kLog2e : score_factor(p.scale, p.softcap);
    const char* const s_k = source.wait_k();
    char* s_v = nullptr;
#pragma unroll 1
    for (int step = 0; step < Config::kWarpKeys; step += Config::kStep) {
      float S[1][Config::kStep / 8][4] = {};
      qk_mma<Config>(S, q, s_k, first + step, lane);
      if constexpr (!kPlain) {
        if (!scales_plainly(p.scale, p.softcap)) scale_scores(S, p.scale, p.softcap);
        mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + lane % 4 * 2);
      }
      online_softmax<1>(S, [=](int, int) { return factor; }, [](int, int) { return 0.0f; }, rows, O);
      if (step == 0) {
        s_v = source.wait_v();
        if constexpr (!kPlain) {
          clear_unseen<Config>(s_v, key0, unit.seen.any, unit.seen.all);
          source.written();
          source.meet_team();  // the zeros are in place
        }
      }
      pv_mma<Config, Rounded>(O, rows[0], S, s_v, first + step, lane);
      if constexpr (!kPlain && Config::kKeepsRemainders)
        if (unit.few) pv_mma<Config, Remainder>(O, rows[0], S, s_v, first + step, thread_of<Config>() % 32);
    }
  }

  // Writes eight rows of each warp and kAreaColumns channels to the area: those of pass `pass`, halves of the rows
  // outermost.
  __device__ __forceinline__ void lay_down(const Area<Config>& area, int pass) const {
    constexpr int kColumnPasses = Area<Config>::kColumnPasses;
    const uint32_t thread = thread_of<Config>();
    const int lane = thread % 32, warp = thread / 32;
    float* const s_row = area.rows + (warp * 8 + lane / 4) * Config::kAreaStride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * kColumnPasses; ++i) {  // registers cannot be indexed
      if (i != pass) continue;
      const int half = i / kColumnPasses, first = i % kColumnPasses * (Config::kAreaColumns / 8);
#pragma unroll
      for (int j = 0; j < Config::kAreaColumns / 8; ++j) {
        const float (&o)[4] = O[0][first + j];
        *reinterpret_cast<float2*>(s_row + 8 * j) = make_float2(o[2 * half], o[2 * half + 1]);
      }
      const float l = rows[0].sums.of_row(half), exact = rows[0].sums.for_lse(half);
      if (lane % 4 == 0) area.sums[warp * 8 + lane / 4] = {rows[0].m[half], l, exact, 0.0f};
    }
  }
};

// The class of a warp's accumulators: INT8 pages have another (int8_sums.cuh), and so has K in bytes (kept_sums.cuh).
template <class Config, bool kInt8 = Config::kInt8, bool kKept = Config::kKept>
struct SumsOf {
  using Type = WarpSums<Config>;
};

// visit(row, d, merged): four channels of a row, reduced over the warps that took its keys, with those of first_team
// before the others, because it had the first tile. Collective for the consumers.
template <class Config, class Sums, class Source, class Visit>
__device__ __forceinline__ void merge_warps(const Sums& sums, const Area<Config>& area, Source& source, int first_team,
                                            int rows, int head_dim, Visit visit) {
  constexpr int kQuads = Config::kAreaColumns / 4, kColumnPasses = Area<Config>::kColumnPasses;
#pragma unroll 1
  for (int pass = 0; pass < 2 * kColumnPasses; ++pass) {
    const int half = pass / kColumnPasses, column = pass % kColumnPasses * Config::kAreaColumns;
    if (8 * half >= rows || column >= head_dim) continue;
    sums.lay_down(area, pass);
    source.meet();  // all sums are in the area
#pragma unroll 1
    for (int i = thread_of<Config>(); i < 8 * Config::kRowWarps * kQuads; i += Config::kConsumers) {
      const int packed = i / kQuads, quad = i % kQuads, d = column + quad * 4;
      const int row_warp = packed / 8, in_eight = packed % 8, row = row_warp * 16 + 8 * half + in_eight;
      if (row >= rows || d >= head_dim) continue;
      constexpr int kParts = Config::kTeams * Config::kKeyWarps;
      RowSums of_warps[kParts];
      float4 parts[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        const int later = first_team + w / Config::kKeyWarps,
                  team = later < Config::kTeams ? later : later - Config::kTeams;
        const int in_team = row_warp * Config::kKeyWarps + w % Config::kKeyWarps;
        const int at = (team * Config::kTeamWarps + in_team) * 8 + in_eight;
        of_warps[w] = area.sums[at];
        parts[w] = *reinterpret_cast<const float4*>(area.rows + at * Config::kAreaStride + 4 * quad);
      }
      Merged merged;
      merged.add(of_warps, parts);
      visit(row, d, merged);
    }
    source.meet();  // the area may be written again
  }
}

// All of the consumers' work.
template <class Config, class Source>
__device__ __forceinline__ void attend_share(const QfAttnParams& p, bool out_aligned, Source& source,
                                             const Area<Config>& area, const Partials& partials) {
  using Element = typename Config::Element;
  using Sums = typename SumsOf<Config>::Type;
  const int rows = partials.rows;
  const bool plain = scales_plainly(p.scale, p.softcap);
  const int row0 = threadIdx.x / 32 % Config::kTeamWarps / Config::kKeyWarps * 16;
  for (;; source.release_unit()) {
    const Unit<Config>& unit = source.wait_unit();
    const Part& part = unit.part;
    const auto finish = [&](int row, int d, const Merged& merged) {
      if constexpr (Config::kInt8) {
        Sums::finish(p, unit.seen, part, row, d, merged, out_aligned, source.queries());
        return;
      }
      const auto value = [&](int key) {
        int b = part.b;
        if constexpr (Config::kPaged) {
          const PageRow pages(p.kv, part.b);
          b = pages.page_of(key), key = pages.in_page(key);
          if (b < 0) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // these rows are NaN already
        }
        const Element* const g_v = static_cast<const Element*>(p.kv.v.data) + b * p.kv.v.stride_b +
                                   int64_t(key) * p.kv.v.stride_t + part.kv_head * p.kv.v.stride_h + d;
        return make_float4(to_float(g_v[0]), to_float(g_v[1]), to_float(g_v[2]), to_float(g_v[3]));
      };
      if constexpr (Config::kKept)
        store_row<Element>(p, unit.seen, part, row, d, Sums::finished(p, row, merged, source.queries()), out_aligned,
                           value);
      else
        store_row<Element>(p, unit.seen, part, row, d, merged, out_aligned, value);
    };
    if (unit.tiles < 0) {  // the share is done; what remains is a unit that blocks before this one began
      const int quads = p.head_dim / 4;
      for (int i = threadIdx.x; i < rows * quads && part.parts > 0; i += Config::kConsumers)
        finish(i / quads, i % quads * 4, partials.merged<Config::kBatchInvariant>(part, i / quads, i % quads * 4));
      return;
    }

    const auto queries = Sums::queries(p, source.queries(), row0, threadIdx.x % 32);
    // All tiles of the part are accumulated together, or those of each split.
    const int summed = Config::kBatchInvariant ? unit.seen.split : unit.tiles;
    int key0 = unit.first_key, left = unit.tiles;
#pragma unroll 1
    for (int split = 0; split == 0 || (Config::kBatchInvariant && left > 0); ++split) {
      const int tiles = min(left, summed);
      const int first_team = Config::kBatchInvariant ? source.next_team() : 0;  // it determines the order of summation
      left -= tiles;
      Sums sums;
      for (const int last = key0 + tiles * Config::kBlockN; key0 < last; key0 += Config::kBlockN) {
        if (!source.is_mine()) {
          source.skip();
          continue;
        }
        const bool whole = key0 >= unit.seen.all.begin && key0 + Config::kBlockN <= unit.seen.all.end;
        if (whole && plain && !(Config::kKept && unit.spoiled))
          sums.template attend<true>(p, queries, unit, key0, source);
        else
          sums.template attend<false>(p, queries, unit, key0, source);
        source.release();
      }

      merge_warps<Config>(sums, area, source, first_team, rows, p.head_dim, [&](int row, int d, Merged merged) {
        if (Config::kPaged && unit.lost) merged.l = merged.exact = nan();
        if (Config::kBatchInvariant && part.begins()) {
          if (split > 0) merged = partials.recall(row, d).followed_by(merged);
          if (left > 0 || Config::kFinishesLater) return partials.remember(row, d, merged);
        }
        if (!Config::kFinishesLater && part.is_whole())
          finish(row, d, merged);
        else
          partials.store(part, Config::kBatchInvariant && !part.begins() ? split : 0, row, d, merged);
      });
    }
    // Where registers are few, only one addition is done while the outputs occupy them: the block's result for a unit
    // that it began is saved after the last split as after any, and the rest is done when the outputs are gone.
    if constexpr (Config::kFinishesLater) {
      const int quads = p.head_dim / 4;
      for (int i = thread_of<Config>(); i < rows * quads && part.begins(); i += Config::kConsumers) {
        const int row = i / quads, d = i % quads * 4;
        const Merged merged = partials.recall(row, d);  // maybe another thread's: all have synchronized since
        if (part.is_whole())
          finish(row, d, merged);
        else
          partials.store(part, 0, row, d, merged);
      }
    }
  }
}

}  // namespace decode
}  // namespace qf
