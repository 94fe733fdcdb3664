// Block reductions: a tree of two levels, shuffles within each warp, then the warps' results through shared memory and
// shuffles again. Every warp computes the second level itself, so every thread gets the same result, bit for bit, after
// one barrier instead of two.
//
// Shared memory: one plane of 32 words per word of State. Warp w writes word w of each plane (one lane, no conflict);
// then lane i of every warp reads word i, modulo a power of two if there are fewer warps: different words are in
// different banks, one cycle. In an array of States, the words read are sizeof(State) apart: two cycles for a pair,
// four for four words.
// tests/unit/test_reduce_banks.py counts them.
#pragma once

#include "reduce/warp.cuh"

namespace qf {

constexpr int kMostWarps = 32;

// Bytes of shared memory that reduce_block needs.
template <class State>
constexpr int block_bytes() {
  return int(sizeof(State)) * kMostWarps;
}

// of_warp(state, width) reduces every group of `width` lanes of a warp, for all of them; `identity` is its neutral
// element. blockDim.x is a multiple of 32. Threads may still read s_words of an earlier reduction: put a barrier
// between two of them. kForAll: whether warps other than the first need the result.
template <bool kForAll = true, class State, class OfWarp>
__device__ __forceinline__ State reduce_block(State state, OfWarp of_warp, const State& identity, uint32_t* s_words) {
  constexpr int kWords = sizeof(State) / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  int width = 1;  // warps, rounded up to a power of two
  while (width < warps) width *= 2;
  state = of_warp(state, 32);
  uint32_t words[kWords];
  if (lane == 0) {
    memcpy(words, &state, sizeof state);
#pragma unroll
    for (int i = 0; i < kWords; ++i) s_words[i * kMostWarps + warp] = words[i];
  }
  __syncthreads();
  if (!kForAll && warp != 0) return state;
  state = identity;
  const int other = lane & (width - 1);  // every group of `width` lanes has them all
  if (other < warps) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = s_words[i * kMostWarps + other];
    memcpy(&state, words, sizeof state);
  }
  return of_warp(state, width);
}

}  // namespace qf
