// Which keys of which sequences a block reads. The tiles of all sequences stand in one row, and every block takes an
// equal run of it: a run may begin and end in the middle of a sequence, so that blocks have the same work however
// lengths differ. Lengths are read on the device: a captured graph serves whatever they are at replay.
//
//   sequence 0: tiles 0 1 2 3 4 5 | sequence 1: 0 1 2 | sequence 2: 0 1 2 3 4 5 6
//   run 0: ^^^^^^^   run 1: ^^^^^^^^^^^^^   run 2: ^^^^^^^^^^ ...
//
// Blocks stand side by side, one for each KV head of a chunk of up to 8, and take the same run: where the heads of a
// token are neighbours in memory, they are read at about the same time. A unit is one KV head of one sequence.
#pragma once

#include "attn/mask.cuh"
#include "qflash.h"

namespace qf {
namespace decode {

// What the queries of one sequence see, in tiles of kBlockN keys. Tiles begin at whole multiples of kBlockN.
template <int kBlockN>
struct Seen {
  Mask mask;
  KeyRange any, all;  // keys that some query sees, and that all queries see
  bool good;          // false: its length is out of range, its rows are NaN

  __device__ __forceinline__ Seen(const QfAttnParams& p, int b) {
    const int len = p.kv_lens ? p.kv_lens[b] : p.k_len;
    good = len >= 0 && len <= p.k_len;
    mask = {p.window_left, p.window_right, p.q_len, good ? len : 0};
    any = mask.seen_by_any(0, p.q_len - 1);
    all = mask.seen_by_all(0, p.q_len - 1);
  }
  // Does some row see so few keys that the rounding of its weights is not lost in their average?
  __device__ __forceinline__ bool sees_few(int few) const {
    const KeyRange first = mask.visible(0), last = mask.visible(mask.len_q - 1);  // it is least in one of them
    return min(first.end - first.begin, last.end - last.begin) < few;
  }
  __device__ __forceinline__ int first_key() const { return any.begin / kBlockN * kBlockN; }
  __device__ __forceinline__ int tiles() const {
    return any.begin == any.end ? 0 : (any.end - first_key() + kBlockN - 1) / kBlockN;
  }
  // Places in the row of all tiles: a unit without keys has one too, for somebody must write its rows.
  __device__ __forceinline__ int places() const { return max(1, tiles()); }
};

// A run of tiles of one unit, by one block.
struct Part {
  int b, kv_head;
  int first, count;        // places, counted from the unit's first
  int parts, index;        // of the unit: how many blocks share it, and which of them this is
  int first_block, apart;  // part i is block first_block + i * apart's

  __device__ __forceinline__ int block(int i) const { return first_block + i * apart; }
  __device__ __forceinline__ bool is_whole() const { return parts == 1; }
};

// Heads that are read side by side: the most, up to 8, that divide the KV heads.
__host__ __device__ inline int chunk_heads(int kv_heads) {
  for (int heads = 8; heads > 1; --heads)
    if (kv_heads % heads == 0) return heads;
  return 1;
}

// Collective for a warp. The grid has whole chunks of blocks.
template <int kBlockN>
class Share {
 public:
  __device__ __forceinline__ Share(const QfAttnParams& p, int chunk) : p_(p), chunk_(chunk) {
    const int lane = threadIdx.x % 32, runs = int(gridDim.x) / chunk;
    int total = 0;
    if (p.kv_lens) {
      for (int b0 = 0; b0 < p.batch; b0 += 32) total += sum_of_warp(places_of(b0 + lane));
    } else {
      places_ = Seen<kBlockN>(p, 0).places();
      total = p.batch * places_;
    }
    total *= chunks();
    each_ = (total + runs - 1) / runs;
    at_ = int(blockIdx.x) / chunk * each_;
    end_ = min(at_ + each_, total);
    if (at_ < end_) seek(lane);
  }

  // The next part of this block's run, if there is one.
  __device__ __forceinline__ bool next(Part& part) {
    if (at_ >= end_) return false;
    const int start = at_ - place_;  // of the unit
    const int in_chunk = int(blockIdx.x) % chunk_, run = int(blockIdx.x) / chunk_;
    part.b = b_, part.kv_head = head_chunk_ * chunk_ + in_chunk;
    part.first = place_, part.count = min(places_ - place_, end_ - at_);
    const int first_run = start / each_;
    part.first_block = first_run * chunk_ + in_chunk, part.apart = chunk_;
    part.parts = (start + places_ - 1) / each_ - first_run + 1;
    part.index = run - first_run;
    at_ += part.count;
    if (at_ < end_) {
      place_ = 0;
      if (++head_chunk_ == chunks()) {
        head_chunk_ = 0;
        ++b_;
        if (p_.kv_lens) places_ = Seen<kBlockN>(p_, b_).places();
      }
    }
    return true;
  }

 private:
  __device__ __forceinline__ int chunks() const { return p_.kv_heads / chunk_; }
  __device__ __forceinline__ int places_of(int b) const { return b < p_.batch ? Seen<kBlockN>(p_, b).places() : 0; }
  __device__ static __forceinline__ int sum_of_warp(int x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
  }

  // The unit that place at_ belongs to, and the place in it.
  __device__ __forceinline__ void seek(int lane) {
    int rest = at_;  // places before it in its sequence
    if (!p_.kv_lens) {
      b_ = rest / (places_ * chunks());
      rest -= b_ * places_ * chunks();
    } else {
      int before = 0;  // places of the sequences before, of one head
      for (int b0 = 0; b0 < p_.batch; b0 += 32) {
        const int own = places_of(b0 + lane);
        int up_to = own;  // and including this lane's sequence
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const int lower = __shfl_up_sync(0xffffffffu, up_to, d);
          if (lane >= d) up_to += lower;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, (before + up_to) * chunks() > at_);
        if (beyond) {
          const int found = __ffs(int(beyond)) - 1;
          b_ = b0 + found;
          places_ = __shfl_sync(0xffffffffu, own, found);
          rest = at_ - (before + __shfl_sync(0xffffffffu, up_to, found) - places_) * chunks();
          break;
        }
        before += __shfl_sync(0xffffffffu, up_to, 31);
      }
    }
    head_chunk_ = rest / places_;
    place_ = rest - head_chunk_ * places_;
  }

  const QfAttnParams& p_;
  int chunk_;                            // heads
  int at_, end_, each_;                  // of the row of all tiles: here, the end of this run, a run's length
  int b_, head_chunk_, place_, places_;  // the units of at_, the place in them, and how many they have
};

}  // namespace decode
}  // namespace qf
