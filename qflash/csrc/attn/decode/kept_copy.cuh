// A team's copies of its tiles of KV from quantize_kv into shared memory: rows of K in bytes, rows of V in 16 bits.
// Threads, steps and paths as in team_copy.cuh, separately for K and V, whose rows differ in length.
#pragma once

#include "attn/decode/team_copy.cuh"
#include "quant/sm90/kept.h"

namespace qf {
namespace decode {

template <class Config, bool kAsync>
class KeptCopy {
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  using Tile = typename Config::Tile;

 public:
  __device__ __forceinline__ KeptCopy(const QfAttnParams& p, const Aligned& aligned) : p_(p), aligned_(aligned) {}

  __device__ __forceinline__ void look_up(const TeamWalk<Config>&) const {}  // arrays have no pages
  // Keys that no row sees and channels past the last are zeros.
  __device__ __forceinline__ void copy(const TeamWalk<Config>& tile, char* s_k) const {
    const int width = int(kept_width(p_.head_dim));
    if constexpr (kAsync) {
      copy_async<KeyTile, 1>(tile, s_k, p_.kv.k, width);
      copy_async<Tile, 2>(tile, s_k + KeyTile::kBytes, p_.kv.v, p_.head_dim);
    } else {
      copy_chunks<KeyTile, 1>(tile, s_k, p_.kv.k, width, aligned_.k);
      copy_chunks<Tile, 2>(tile, s_k + KeyTile::kBytes, p_.kv.v, p_.head_dim, aligned_.v);
    }
  }

 private:
  // Rows that a team copies per step, and the number of steps. Few short rows leave some threads idle.
  template <class Copied>
  static constexpr int kStep = Config::kTeamThreads / Copied::kChunks;
  template <class Copied>
  static constexpr int kRowSteps = (Config::kBlockN + kStep<Copied> - 1) / kStep<Copied>;

  template <int kBytes>
  __device__ static __forceinline__ const char* row_of(const QfTensor& x, const TeamWalk<Config>& tile, int key) {
    return static_cast<const char*>(x.data) +
           (tile.b * x.stride_b + int64_t(key) * x.stride_t + tile.kv_head * x.stride_h) * kBytes;
  }

  template <class Copied, int kBytes>
  __device__ __forceinline__ void copy_async(const TeamWalk<Config>& tile, char* s_tile, const QfTensor& x,
                                             int columns) const {
    constexpr int kRows = kStep<Copied>;
    const int thread = fresh_tid() % Config::kTeamThreads, row0 = thread / Copied::kChunks;
    const int chunk = thread % Copied::kChunks, d = chunk * (16 / kBytes);
    if (kRows > Config::kBlockN && row0 >= Config::kBlockN) return;
    // The swizzle repeats every eight rows; four rows further on, chunks are four apart.
    static_assert(kRows % 8 == 0 || (kRows == 4 && Copied::kChunks == 8), "");
    const int first_offset = Swizzle<Copied::kChunks>::offset(row0, chunk);
    const int key = tile.key0 + row0, first = tile.seen.begin - key, end = tile.seen.end - key;
    const char* g_row = row_of<kBytes>(x, tile, key) + d * kBytes;
    const int64_t g_step = x.stride_t * (kRows * kBytes);
#pragma unroll
    for (int step = 0; step < kRowSteps<Copied>; ++step, g_row += g_step) {
      char* const s_row =
          s_tile + ((first_offset ^ (kRows % 8 == 0 ? 0 : step % 2 * 64)) + step * kRows * Copied::kRowBytes);
      const bool found = step * kRows >= first && step * kRows < end;
#pragma unroll
      for (int panel = 0; panel < Copied::kCount; ++panel)
        cp_async_16(s_row + panel * Copied::kPanelBytes, g_row + panel * Copied::kRowBytes,
                    found && d + panel * Copied::kPanelColumns < columns);
    }
  }

  // Through registers.
  template <class Copied, int kBytes>
  __device__ __forceinline__ void copy_chunks(const TeamWalk<Config>& tile, char* s_tile, const QfTensor& x,
                                              int columns, bool aligned) const {
    constexpr int kCopies = kRowSteps<Copied> * Copied::kCount;  // per thread
    constexpr int kMostLoads = Config::kHeadDim <= 128 ? 8 : 2;  // as many as fit in registers next to the outputs
    constexpr int kAtOnce = kCopies % kMostLoads == 0 ? kMostLoads : kCopies % 4 == 0 ? 4 : kCopies % 3 == 0 ? 3 : 1;
    const int thread = fresh_tid() % Config::kTeamThreads, row0 = thread / Copied::kChunks;
    const int chunk = thread % Copied::kChunks;
    if (kStep<Copied> > Config::kBlockN && row0 >= Config::kBlockN) return;
#pragma unroll 1
    for (int first = 0; first < kCopies; first += kAtOnce) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = tile.key0 + row0 + (first + i) / Copied::kCount * kStep<Copied>;
        const int d = (first + i) % Copied::kCount * Copied::kPanelColumns + chunk * (16 / kBytes);
        raw[i] = make_uint4(0, 0, 0, 0);
        if (d < columns && key >= tile.seen.begin && key < tile.seen.end)
          raw[i] = load<kBytes>(row_of<kBytes>(x, tile, key), d, columns, aligned);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = row0 + (first + i) / Copied::kCount * kStep<Copied>, panel = (first + i) % Copied::kCount;
        *reinterpret_cast<uint4*>(s_tile + panel * Copied::kPanelBytes + Swizzle<Copied::kChunks>::offset(row, chunk)) =
            raw[i];
      }
    }
  }
  template <int kBytes>
  __device__ static __forceinline__ uint4 load(const char* g_row, int d, int columns, bool aligned) {
    if constexpr (kBytes == 1)
      return load_bytes(reinterpret_cast<const int8_t*>(g_row), d, columns, aligned);
    else
      return load_chunk(reinterpret_cast<const Element*>(g_row) + d, aligned);
  }

  const QfAttnParams& p_;
  const Aligned& aligned_;
};

}  // namespace decode
}  // namespace qf
