// Which keys of which sequences a block reads. The tiles of all sequences are concatenated, and every block takes a run
// of equal length: a run may begin and end in the middle of a sequence, so that blocks have the same work however
// lengths differ. Lengths are read on the device: a captured graph handles whatever they are at replay.
//
//   sequence 0: tiles 0 1 2 3 4 5 | sequence 1: 0 1 2 | sequence 2: 0 1 2 3 4 5 6
//   run 0: ^^^^^^^   run 1: ^^^^^^^^^^^^^   run 2: ^^^^^^^^^^ ...
//
// Blocks are grouped in chunks of up to 8, one block per KV head of a chunk, and those of a chunk take the same run:
// where the heads of a token are neighbours in memory, they are read at about the same time. A unit is one KV head of
// one sequence.
//
// The concatenation is counted in places, by default single tiles; where a unit is cut, and with it the order of
// summation, then depends on the batch. With Config::kBatchInvariant a place is a split, several tiles that are
// accumulated separately, and its size follows from the unit alone; blocks take whole splits.
#pragma once

#include "attn/mask.cuh"
#include "qflash.h"

namespace qf {
namespace decode {

constexpr int kLeastSplitKeys = 256;  // per split
constexpr int kMostSplits = 256;      // of the units of one sequence that are read concurrently

__host__ __device__ __forceinline__ int most_splits(int kv_heads) {
  return kMostSplits / (kv_heads < 8 ? kv_heads : 8);
}
// Tiles of a split, except the last, of a unit of `tiles` tiles.
template <int kBlockN>
__host__ __device__ __forceinline__ int split_tiles(int tiles, int kv_heads) {
  constexpr int kLeast = (kLeastSplitKeys + kBlockN - 1) / kBlockN;
  const int most = most_splits(kv_heads), equal = (tiles + most - 1) / most;
  return equal > kLeast ? equal : kLeast;
}

// A run of tiles of one unit, by one block.
struct Part {
  int b, kv_head;
  int first, count;        // places, counted from the unit's first
  int parts, index;        // of the unit: how many blocks share it, and the index of this one
  int first_block, apart;  // part i is that of block first_block + i * apart
  int each, continued;     // places of every part between the first and the last, and of all after the first

  __device__ __forceinline__ int block(int i) const { return first_block + i * apart; }
  __device__ __forceinline__ bool is_whole() const { return parts == 1; }
  __device__ __forceinline__ bool begins() const { return index == 0; }        // the unit
  __device__ __forceinline__ bool ends() const { return index == parts - 1; }  // the unit
};

// What the queries of one sequence see, in tiles of kBlockN keys. Tiles begin at multiples of kBlockN.
template <class Config>
struct Seen {
  static constexpr int kBlockN = Config::kBlockN;
  Mask mask;
  KeyRange any, all;  // keys that some query sees, and that all queries see
  int split;          // tiles of a split, except the last; with kBatchInvariant
  bool good;          // false: its length is out of range, its rows are NaN

  Seen() = default;
  __device__ __forceinline__ Seen(const QfAttnParams& p, int b) {
    const int len = p.kv_lens ? p.kv_lens[b] : p.k_len;
    good = len >= 0 && len <= p.k_len;
    mask = {p.window_left, p.window_right, p.q_len, good ? len : 0};
    any = mask.seen_by_any(0, p.q_len - 1);
    all = mask.seen_by_all(0, p.q_len - 1);
    if constexpr (Config::kBatchInvariant) split = split_tiles<kBlockN>(tiles(), p.kv_heads);
  }
  // Does some row see so few keys that the rounding of its weights does not average out?
  __device__ __forceinline__ bool sees_few(int few) const {
    const KeyRange first = mask.visible(0), last = mask.visible(mask.len_q - 1);  // the minimum is in one of them
    return min(first.end - first.begin, last.end - last.begin) < few;
  }
  __device__ __forceinline__ int first_key() const { return any.begin / kBlockN * kBlockN; }
  __device__ __forceinline__ int tiles() const {
    return any.begin == any.end ? 0 : (any.end - first_key() + kBlockN - 1) / kBlockN;
  }
  // Tiles of a place, except the last.
  __device__ __forceinline__ int place_tiles() const { return Config::kBatchInvariant ? split : 1; }
  // Places of a unit among all tiles: a unit without keys has one too, since some block must write its rows.
  __device__ __forceinline__ int places() const {
    return max(1, Config::kBatchInvariant ? (tiles() + split - 1) / split : tiles());
  }
  // First key and number of tiles of a part. A unit without keys has a place, and no tile.
  __device__ __forceinline__ int first_key(const Part& part) const {
    return first_key() + part.first * place_tiles() * kBlockN;
  }
  __device__ __forceinline__ int tiles(const Part& part) const {
    return min(part.count * place_tiles(), tiles() - part.first * place_tiles());
  }
};

// Heads that are read concurrently: the largest number, up to 8, that divides the KV heads.
inline int chunk_heads(int kv_heads) {
  for (int heads = 8; heads > 1; --heads)
    if (kv_heads % heads == 0) return heads;
  return 1;
}

// How the concatenated tiles are cut. The grid has a chunk of blocks for each run. Where lengths are not known to the
// host, `each` is 0, and the device computes it.
struct Runs {
  unsigned chunk, chunks;  // heads read concurrently, and the number of such chunks of KV heads
  unsigned count;          // runs
  unsigned each, places;   // per run; per unit
};

// The rest of a block's run.
template <class Config>
struct Share {
  unsigned chunk, chunks, run, in_chunk;
  unsigned at, end, each;                 // in the concatenation: here, the end of this run; length of a run
  unsigned b, head_chunk, place, places;  // the units at `at`, the place in them, and how many places they have

  // Collective for a warp: the whole run.
  __device__ __forceinline__ Share(const QfAttnParams& p, const Runs& runs)
      : chunk(runs.chunk), chunks(runs.chunks), run(blockIdx.x / chunk), in_chunk(blockIdx.x - run * chunk) {
    Sequences seen;
    unsigned total = unsigned(p.batch) * runs.places;
    each = runs.each, places = runs.places;
    if (p.kv_lens) {
      total = 0;
      for (int b0 = 0; b0 < p.batch; b0 += 32) {
        seen = Sequences(p, b0);
        total += seen.total();
      }
      each = (total * chunks + runs.count - 1) / runs.count;
    }
    total *= chunks;
    at = run * each;
    end = min(at + each, total);
    if (at < end) seek(p, seen);
  }

  __device__ __forceinline__ bool is_over() const { return at >= end; }
  __device__ __forceinline__ Part part() const {
    const unsigned start = at - place, last = start + places - 1;  // of the unit
    const unsigned own = run * each, own_end = own + each;         // most units of a long run begin and end in it
    const unsigned first_run = start >= own ? run : start / each, last_run = last < own_end ? run : last / each;
    Part x;
    x.b = int(b), x.kv_head = int(head_chunk * chunk + in_chunk);
    x.first = int(place), x.count = int(min(places - place, end - at));
    x.first_block = int(first_run * chunk + in_chunk), x.apart = int(chunk);
    x.parts = int(last_run - first_run + 1);
    x.index = int(run - first_run);
    x.each = int(each), x.continued = int(start + places) - int((first_run + 1) * each);
    return x;
  }
  __device__ __forceinline__ void advance(const QfAttnParams& p) {
    at += min(places - place, end - at);
    place = 0;
    if (is_over() || ++head_chunk < chunks) return;
    head_chunk = 0;
    ++b;
    if (p.kv_lens) places = Seen<Config>(p, int(b)).places();
  }

 private:
  // The places of 32 sequences, one per lane.
  struct Sequences {
    unsigned own, up_to;  // of the lane's sequence, and of all up to and including it

    Sequences() = default;
    __device__ __forceinline__ Sequences(const QfAttnParams& p, int b0) {
      const int lane = threadIdx.x % 32;
      own = b0 + lane < p.batch ? unsigned(Seen<Config>(p, b0 + lane).places()) : 0;
      up_to = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const unsigned lower = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += lower;
      }
    }
    __device__ __forceinline__ unsigned total() const { return __shfl_sync(0xffffffffu, up_to, 31); }
  };

  // The units that place `at` belongs to, and the place in them. seen: the sequences read last, which are all if up to
  // 32.
  __device__ __forceinline__ void seek(const QfAttnParams& p, Sequences seen) {
    b = 0;
    unsigned rest = at;  // places before it in its sequence
    if (p.kv_lens) {
      unsigned before = 0;  // places of the sequences before, of one head
      for (int b0 = 0; b0 < p.batch; b0 += 32) {
        if (p.batch > 32) seen = Sequences(p, b0);
        const unsigned beyond = __ballot_sync(0xffffffffu, (before + seen.up_to) * chunks > at);
        if (beyond) {
          const int found = __ffs(int(beyond)) - 1;
          b = unsigned(b0 + found);
          places = __shfl_sync(0xffffffffu, seen.own, found);
          rest = at - (before + __shfl_sync(0xffffffffu, seen.up_to, found) - places) * chunks;
          break;
        }
        before += seen.total();
      }
    }
    head_chunk = p.kv_lens && chunks == 1 ? 0 : rest / places;
    place = rest - head_chunk * places;
    if (!p.kv_lens) {  // all sequences have equally many places: head_chunk counted the units of all
      b = chunks == 1 ? head_chunk : head_chunk / chunks;
      head_chunk -= b * chunks;
    }
  }
};

}  // namespace decode
}  // namespace qf
