// Tiles of K and V that every team copies for itself, into a ring of its own. Up to 16 rows a team is one warp, which
// waits for nobody else before the end of a unit.
//
//   team 0: tiles 0, 4, 8, ..   team 1: tiles 1, 5, 9, ..   (four teams)
//
// Copies run kStages tiles ahead, across the ends of units, so that memory is busy while sums are merged and q is
// fetched. With kAsync they are cp.async; else tiles pass through registers: before sm_80, where K is rotated, and
// where rows do not begin at multiples of 16 bytes.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/config.cuh"
#include "attn/decode/pages.cuh"
#include "attn/decode/product.cuh"
#include "attn/decode/unit.cuh"
#include "attn/mma/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qf {
namespace decode {

// What may be read or written 16 bytes at a time: rows of tensors, and the tables of rope.
struct Aligned {
  bool q, k, v, out, rope;
};

// A tile of a team. key0: its first key, -1: there is none left. seen: keys that some row sees.
struct TeamTile {
  int b, kv_head, key0;
  KeyRange seen;
};

// A team's way through the tiles of its block's share: every kTeams-th of them is its own.
template <class Config>
struct TeamWalk {
  Share<Config::kBlockN> share;
  int key0, tiles;  // of the unit: the next tile, whoever's, and how many are left
  int skipped;      // tiles of other teams before the next of this one
  int b, kv_head;
  KeyRange seen;

  TeamWalk() = default;
  __device__ __forceinline__ TeamWalk(const QfAttnParams& p, const Share<Config::kBlockN>& all, int team)
      : share(all), skipped(team) {
    enter(p);
  }
  __device__ __forceinline__ TeamTile next(const QfAttnParams& p) {
    while (!share.is_over() && tiles <= skipped) {
      skipped -= tiles;
      share.advance(p);
      enter(p);
    }
    if (share.is_over()) return {0, 0, -1, {0, 0}};
    const TeamTile tile = {b, kv_head, key0 + skipped * Config::kBlockN, seen};
    key0 = tile.key0 + Config::kBlockN;
    tiles -= skipped + 1;
    skipped = Config::kTeams - 1;
    return tile;
  }

 private:
  __device__ __forceinline__ void enter(const QfAttnParams& p) {
    if (share.is_over()) return;
    const Part part = share.part();
    const Seen<Config::kBlockN> of_unit(p, part.b);
    b = part.b, kv_head = part.kv_head, seen = of_unit.any;
    tiles = of_unit.tiles(part), key0 = of_unit.first_key(part);
  }
};

// A tile's chunks of 16 bytes, by the threads of a team: eight neighbours take 128 bytes of a row.
template <class Config>
struct TeamChunks {
  using Tile = typename Config::Tile;
  static constexpr int kStep = Config::kTeamThreads / Tile::kChunks, kRowSteps = Config::kBlockN / kStep;
  static_assert(kRowSteps * kStep == Config::kBlockN, "the walk must come out even");

  __device__ static __forceinline__ int thread() { return fresh_tid() % Config::kTeamThreads; }
  __device__ static __forceinline__ int row(int step) { return thread() / Tile::kChunks + step * kStep; }
  __device__ static __forceinline__ int channel(int panel) {
    return panel * Tile::kPanelColumns + thread() % Tile::kChunks * kPerChunk;
  }
  __device__ static __forceinline__ int offset(int step, int panel) {
    return panel * Tile::kPanelBytes + Swizzle<Tile::kChunks>::offset(row(step), thread() % Tile::kChunks);
  }
};

// What the consumers want to know beside the tiles. It stands in shared memory, because registers are full of outputs;
// one thread of a team, or of the block, finds out what comes next while the others go on.
template <class Config>
struct OwnState {
  Share<Config::kBlockN> share;    // from the unit after the last that was described
  Part ended;                      // of the unit that this block ends and did not begin, if there is one
  Unit<Config::kBlockN> units[2];  // in turn
  struct Team {
    TeamWalk<Config> walk;
    TeamTile tiles[2];  // to be copied: this one and the next, in turn
  } teams[Config::kTeams];
};

// Where the keys of a tile lie. In arrays, their sequence stands in the place of a page.
template <class Config>
class TilePlaces {
 public:
  __device__ __forceinline__ TilePlaces(const QfAttnParams& p, const TeamTile& tile) : p_(p), tile_(tile) {
    if constexpr (Config::kPaged) {
      once_ = p.kv.page_size % Config::kBlockN == 0;  // pages of whole tiles are looked up once
      key_ = max(tile.key0, tile.seen.begin);
      if (once_) found_ = PageRow(p, tile.b).place(key_);
    }
  }
  // False: no row sees the key, and nobody is to look for it, or it is in no page of the pool.
  __device__ __forceinline__ bool find(int key, Place& place) const {
    place = {tile_.b, key};
    if (key < tile_.seen.begin || key >= tile_.seen.end) return false;
    if constexpr (!Config::kPaged) {
      return true;
    } else {
      const PageRow pages(p_, tile_.b);
      place = once_ ? Place{found_.page, found_.token + key - key_} : pages.place(key);
      return pages.in_pool(place.page);
    }
  }
  // Of K or V.
  __device__ __forceinline__ const typename Config::Element* row(const QfTensor& x, const Place& place) const {
    return static_cast<const typename Config::Element*>(x.data) + place.page * x.stride_b + place.token * x.stride_t +
           tile_.kv_head * x.stride_h;
  }

 private:
  const QfAttnParams& p_;
  const TeamTile& tile_;
  bool once_ = false;
  int key_ = 0;
  Place found_ = {0, 0};
};

// Shared memory of a block. Panels may begin anywhere: neither the copy engine nor wgmma sees them.
template <class Config>
struct OwnMemory {
  char* s_first;

  __device__ __forceinline__ char* tiles(int team, int stage) const {  // K and V
    return s_first + (team * Config::kStages + stage) * Config::kStageBytes;
  }
  __device__ __forceinline__ char* queries() const { return s_first + Config::kRingBytes; }
  __device__ __forceinline__ char* area() const { return queries() + Config::kQueryBytes; }
  __device__ __forceinline__ OwnState<Config>& state() const {
    static_assert(sizeof(OwnState<Config>) <= Config::kStateBytes, "");
    return *reinterpret_cast<OwnState<Config>*>(area() + Area<Config>::kBytes);
  }
};

// A Source (attend.cuh).
template <class Config, bool kAsync>
class OwnTiles {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Chunks = TeamChunks<Config>;

 public:
  // Collective for the block.
  __device__ __forceinline__ OwnTiles(const QfAttnParams& p, const Runs& runs, const Aligned& aligned,
                                      const Partials& partials, const OwnMemory<Config>& memory)
      : p_(p), aligned_(aligned), partials_(partials), memory_(memory) {
    {
      const Share<Config::kBlockN> share(p, runs);
      if (leads_team()) {
        typename OwnState<Config>::Team& team = own_team();
        team.walk = TeamWalk<Config>(p, share, int(threadIdx.x) / Config::kTeamThreads);
        team.tiles[0] = team.walk.next(p);
      }
      if (threadIdx.x < 32) {
        if (threadIdx.x == 0) memory_.state().share = share, memory_.state().ended = Part{};
        __syncwarp();  // the share is in place
        describe_next_unit(0);
      }
    }
    meet();  // the first tiles and the first unit are described
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; ++stage) {
      if (stage > 0) meet_team();  // the next tile is described
      fetch(stage);
    }
  }

  __device__ __forceinline__ int next_team() const { return next_; }
  __device__ __forceinline__ bool is_mine() const { return next_ == fresh_tid() / Config::kTeamThreads; }
  __device__ __forceinline__ void skip() {
    if (++next_ == Config::kTeams) next_ = 0;
  }
  __device__ __forceinline__ const char* wait_k() const {
    if constexpr (kAsync) cp_async_wait<Config::kStages - 1>();
    meet_team();  // all of the tile is there
    return stage_of(stage_);
  }
  __device__ __forceinline__ char* wait_v() const { return stage_of(stage_) + Tile::kBytes; }  // it came with K
  __device__ __forceinline__ void written() const {}
  __device__ __forceinline__ void release() {
    meet_team();  // all have read
    fetch(stage_);
    if (++stage_ == Config::kStages) stage_ = 0;
    skip();
  }
  // Collective for the block. q of the unit before was last read before merge_warps() let all meet, and this unit was
  // described before that.
  __device__ __forceinline__ const Unit<Config::kBlockN>& wait_unit() const {
    const Unit<Config::kBlockN>& unit = memory_.state().units[unit_];
    if (unit.tiles >= 0) copy_unit_queries(unit.part);
    if (unit.tiles < 0 && unit.part.parts > 0 && threadIdx.x < 32) partials_.await_announcements(unit.part);
    meet();  // q is in place, and nobody looks at the unit before any more
    if (threadIdx.x < 32 && unit.tiles >= 0) describe_next_unit(unit_ ^ 1);
    return unit;
  }
  __device__ __forceinline__ const char* queries() const { return memory_.queries(); }
  __device__ __forceinline__ void release_unit() { unit_ ^= 1; }
  template <int kTeam = 0>
  __device__ __forceinline__ void meet_team() const {
    if constexpr (Config::kTeamWarps == 1)
      __syncwarp();
    else if (Config::kTeams == 1 || fresh_tid() / Config::kTeamThreads == kTeam)
      barrier_sync<1 + kTeam, Config::kTeamThreads>();
    else if constexpr (kTeam + 1 < Config::kTeams)
      meet_team<kTeam + 1>();
  }
  __device__ __forceinline__ void meet() const { __syncthreads(); }

 private:
  __device__ __forceinline__ char* stage_of(int stage) const {
    return memory_.tiles(fresh_tid() / Config::kTeamThreads, stage);
  }
  __device__ __forceinline__ bool leads_team() const { return fresh_tid() % Config::kTeamThreads == 0; }
  __device__ __forceinline__ typename OwnState<Config>::Team& own_team() const {
    return memory_.state().teams[fresh_tid() / Config::kTeamThreads];
  }

  // By one warp, into a place that nobody looks at.
  __device__ __forceinline__ void describe_next_unit(int place) const {
    Share<Config::kBlockN>& share = memory_.state().share;
    Unit<Config::kBlockN>& unit = memory_.state().units[place];
    Part& ended = memory_.state().ended;
    if (share.is_over()) {
      describe_unit<Config>(p_, ended, unit);
      if (threadIdx.x == 0) unit.tiles = -1;
      return;
    }
    const Part part = share.part();
    describe_unit<Config>(p_, part, unit);
    if (!part.ends()) {  // before the block stores its part, and before the one that merges looks for it
      partials_.clear(part);
      partials_.announce(part);
    }
    __syncwarp();  // all lanes have read the share
    if (threadIdx.x != 0) return;
    if (part.ends() && !part.is_whole()) ended = part;
    share.advance(p_);
  }

  // The team's next tile, if there is one, into a stage that nobody reads any more. Between two calls the team meets.
  __device__ __forceinline__ void fetch(int stage) {
    typename OwnState<Config>::Team& team = own_team();
    const TeamTile& tile = team.tiles[place_];
    place_ ^= 1;
    if (tile.key0 >= 0) {
      copy_tile(tile, stage_of(stage));
      if (leads_team()) team.tiles[place_] = team.walk.next(p_);
    } else {
      let_next_grid_start();
      if (leads_team()) team.tiles[place_].key0 = -1;
    }
    if constexpr (kAsync) cp_async_commit();  // one group for each tile, so that they can be counted
  }

  // Keys that no row sees and channels past the last are zeros, and so is what is in no page of the pool.
  __device__ __forceinline__ void copy_tile(const TeamTile& tile, char* s_k) const {
    char* const s_v = s_k + Tile::kBytes;
    const TilePlaces<Config> places(p_, tile);
    if constexpr (kAsync) {
#pragma unroll
      for (int step = 0; step < Chunks::kRowSteps; ++step) {
        Place place;
        const bool found = places.find(tile.key0 + Chunks::row(step), place);
        const Element* const g_k = places.row(p_.kv.k, place);
        const Element* const g_v = places.row(p_.kv.v, place);
#pragma unroll
        for (int panel = 0; panel < Tile::kCount; ++panel) {
          const int d = Chunks::channel(panel), offset = Chunks::offset(step, panel);
          cp_async_16(s_k + offset, g_k + d, found && d < p_.head_dim);
          cp_async_16(s_v + offset, g_v + d, found && d < p_.head_dim);
        }
      }
    } else {
      if (!Config::kPaged && p_.rope.cos)  // pages hold keys that were rotated
        copy_rotated_keys(tile, places, s_k);
      else
        copy_chunks(tile.key0, places, s_k, p_.kv.k, aligned_.k);
      copy_chunks(tile.key0, places, s_v, p_.kv.v, aligned_.v);
    }
  }

  static constexpr int kCopies = Chunks::kRowSteps * Tile::kCount;  // of a thread
  // Loads under way, as many as there are registers for beside the outputs.
  static constexpr int kMostLoads = Config::kHeadDim <= 128 ? 8 : 4;
  static constexpr int kAtOnce = kCopies % kMostLoads == 0 ? kMostLoads
                                 : kCopies % 4 == 0        ? 4
                                 : kCopies % 3 == 0        ? 3
                                                           : 1;

  // Through registers.
  __device__ __forceinline__ void copy_chunks(int key0, const TilePlaces<Config>& places, char* s_tile,
                                              const QfTensor& x, bool aligned) const {
    static_assert(kCopies % kAtOnce == 0, "");
#pragma unroll 1
    for (int first = 0; first < kCopies; first += kAtOnce) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = key0 + Chunks::row((first + i) / Tile::kCount);
        const int d = Chunks::channel((first + i) % Tile::kCount);
        raw[i] = make_uint4(0, 0, 0, 0);
        Place place;
        if (d < p_.head_dim && places.find(key, place)) raw[i] = load_chunk(places.row(x, place) + d, aligned);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        *reinterpret_cast<uint4*>(s_tile + Chunks::offset((first + i) / Tile::kCount, (first + i) % Tile::kCount)) =
            raw[i];
    }
  }
  // The same, rotated: half a chunk at a time, for partners, cosines and sines take registers, too.
  __device__ __forceinline__ void copy_rotated_keys(const TeamTile& tile, const TilePlaces<Config>& places,
                                                    char* s_k) const {
#pragma unroll 1
    for (int half = 0; half < 2 * kCopies; ++half) {
      const int step = half / 2 / Tile::kCount, panel = half / 2 % Tile::kCount;
      const int key = tile.key0 + Chunks::row(step), d = Chunks::channel(panel) + half % 2 * 4;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      Place place;
      if (d < p_.head_dim && places.find(key, place)) {
        const Element* const g_row = places.row(p_.kv.k, place);
        x = to_float4(load4(g_row, d, p_.head_dim, aligned_.k), g_row);
        x = rope4(p_.rope, g_row, d, p_.head_dim, position_k(p_.rope, tile.b, 0, key), x, aligned_.k && aligned_.rope);
      }
      write4(reinterpret_cast<Element*>(s_k + Chunks::offset(step, panel)) + half % 2 * 4, x);
    }
  }

  __device__ __forceinline__ void copy_unit_queries(const Part& part) const {
    if (!p_.rope.cos) {
      copy_queries<Config>(p_, p_.q, part.b, part.kv_head, aligned_.q, memory_.queries(), fresh_tid(),
                           Config::kConsumers);
      return;
    }
    const int group = p_.q_heads / p_.kv_heads, keys = p_.kv_lens ? p_.kv_lens[part.b] : p_.k_len;
#pragma unroll 1
    for (int i = fresh_tid(); i < Config::kRows * Config::kChunks; i += Config::kConsumers) {
      const int row = i / Config::kChunks, chunk = i % Config::kChunks, d = chunk * kPerChunk;
      const int token = row / group, head = part.kv_head * group + row - token * group;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (token < p_.q_len && d < p_.head_dim) {
        const Element* const g_row = static_cast<const Element*>(p_.q.data) + part.b * p_.q.stride_b +
                                     token * p_.q.stride_t + head * p_.q.stride_h;
        value = rotated_chunk(p_.rope, g_row, d, p_.head_dim, position_q(p_.rope, part.b, 0, token, p_.q_len, keys),
                              aligned_.q, aligned_.rope);
      }
      *reinterpret_cast<uint4*>(memory_.queries() + Swizzle<Config::kChunks>::offset(row, chunk)) = value;
    }
  }

  const QfAttnParams& p_;
  const Aligned& aligned_;
  const Partials& partials_;
  OwnMemory<Config> memory_;
  int next_ = 0;   // the team that takes the next tile
  int stage_ = 0;  // of this team's next tile
  int place_ = 0;  // of Team::tiles: to be copied next
  int unit_ = 0;   // of OwnState::units
};

}  // namespace decode
}  // namespace qf
