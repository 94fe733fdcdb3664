// A team's copies of its tiles of K and V, and of their scales where they are bytes, into shared memory. Eight
// neighbouring threads take 128 bytes of a row. With kAsync copies are cp.async; otherwise they go through registers:
// before sm_80, where K is rotated, and where rows do not begin at multiples of 16 bytes.
#pragma once

#include "attn/decode/config.cuh"
#include "attn/decode/team_walk.cuh"
#include "attn/mma/int8.cuh"
#include "attn/mma/tile.cuh"
#include "attn/pages.cuh"

namespace qf {
namespace decode {

template <class Config, bool kAsync>
class TeamCopy {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kBytes = Config::kElementBytes;  // per element
  static constexpr int kChunkElements = 16 / kBytes;    // per 16 bytes
  static constexpr int kScaleRow = 2 * Tile::kBytes;    // where scales begin in a stage: K's, then V's
  static constexpr int kStep = Config::kTeamThreads / Tile::kChunks, kRowSteps = Config::kBlockN / kStep;
  static_assert(kRowSteps * kStep == Config::kBlockN, "the walk must come out even");

 public:
  __device__ __forceinline__ TeamCopy(const QfAttnParams& p, const Aligned& aligned) : p_(p), aligned_(aligned) {}

  // Looks up the pages of the tile that copy() takes next; the loads are in flight while the tile before is attended
  // to. Pages of whole tiles are looked up once per tile.
  __device__ __forceinline__ void look_up(const TeamWalk<Config>& next) {
    if constexpr (Config::kPaged) {
      const PageRow table(p_.kv, next.b);
      if (in_one_page()) {
        pages_[0] = table.page_of(max(next.key0, next.seen.begin));
      } else if constexpr (kAsync) {
        const int row = fresh_tid() % Config::kTeamThreads / Tile::kChunks;
#pragma unroll
        for (int step = 0; step < kRowSteps; ++step) {
          const int key = next.key0 + row + step * kStep;
          pages_[step] = key >= next.seen.begin && key < next.seen.end ? table.page_of(key) : -1;
        }
      }
    }
  }

  // Keys that no row sees and channels past the last are zeros, and so is what is in no page of the pool.
  __device__ __forceinline__ void copy(const TeamWalk<Config>& tile, char* s_k) const {
    if constexpr (kAsync) {
      copy_async(tile, s_k);
    } else {
      if (!Config::kPaged && p_.rope.cos)  // pages hold rotated keys
        copy_rotated_keys(tile, s_k);
      else
        copy_chunks(tile, s_k, p_.kv.k, aligned_.k);
      copy_chunks(tile, s_k + Tile::kBytes, p_.kv.v, aligned_.v);
      if constexpr (Config::kInt8) copy_scales(tile, s_k + kScaleRow);
    }
  }

 private:
  // The same for all tiles of a call.
  __device__ __forceinline__ bool in_one_page() const { return p_.kv.page_size % Config::kBlockN == 0; }
  __device__ static __forceinline__ bool sees(const TeamWalk<Config>& tile, int key) {
    return key >= tile.seen.begin && key < tile.seen.end;
  }
  // For arrays, the sequence replaces the page.
  __device__ static __forceinline__ const char* row_of(const QfTensor& x, int page, int token, int kv_head) {
    return static_cast<const char*>(x.data) +
           (page * x.stride_b + int64_t(token) * x.stride_t + kv_head * x.stride_h) * kBytes;
  }
  __device__ static __forceinline__ const float* scale_of(const QfScales& x, int page, int token, int kv_head) {
    return x.scale + page * x.stride_b + kv_head * x.stride_h + token;
  }

  __device__ __forceinline__ void copy_async(const TeamWalk<Config>& tile, char* s_k) const {
    const int thread = fresh_tid() % Config::kTeamThreads, row0 = thread / Tile::kChunks;
    const int chunk = thread % Tile::kChunks, d = chunk * kChunkElements;
    // The swizzle repeats every eight rows; four rows further on, chunks are four apart.
    static_assert(kStep % 8 == 0 || (kStep == 4 && Tile::kChunks == 8), "");
    const int first_offset = Swizzle<Tile::kChunks>::offset(row0, chunk);
    // The first two threads of a row copy its scales, too: K's and V's.
    const QfScales& scales = chunk == 0 ? p_.kv.k_scales : p_.kv.v_scales;
    const auto copy_row = [&](int step, const char* g_k, const char* g_v, const float* g_scale, bool found) {
      char* const s_row =
          s_k + ((first_offset ^ (kStep % 8 == 0 ? 0 : step % 2 * 64)) + step * kStep * Tile::kRowBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kCount; ++panel) {
        const bool valid = found && d + panel * Tile::kPanelColumns < p_.head_dim;
        cp_async_16(s_row + panel * Tile::kPanelBytes, g_k + panel * Tile::kRowBytes, valid);
        cp_async_16(s_row + Tile::kBytes + panel * Tile::kPanelBytes, g_v + panel * Tile::kRowBytes, valid);
      }
      if constexpr (Config::kInt8)
        if (chunk < 2)
          cp_async_4(s_k + kScaleRow + (chunk * Config::kBlockN + row0 + step * kStep) * 4, g_scale, found);
    };
    if (!Config::kPaged || in_one_page()) {
      const int page = Config::kPaged ? pages_[0] : tile.b, key = tile.key0 + row0;
      const int token = Config::kPaged ? PageRow(p_.kv, tile.b).in_page(tile.key0) + row0 : key;
      const int first = tile.seen.begin - key, end = page < 0 ? first : tile.seen.end - key;  // range of row steps
      const char* g_k = row_of(p_.kv.k, page, token, tile.kv_head) + d * kBytes;
      const char* g_v = row_of(p_.kv.v, page, token, tile.kv_head) + d * kBytes;
      const float* const g_scale = Config::kInt8 ? scale_of(scales, page, token, tile.kv_head) : nullptr;
      const int64_t k_step = p_.kv.k.stride_t * (kStep * kBytes), v_step = p_.kv.v.stride_t * (kStep * kBytes);
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step, g_k += k_step, g_v += v_step)
        copy_row(step, g_k, g_v, g_scale + step * kStep, step * kStep >= first && step * kStep < end);
    } else {
      const PageRow table(p_.kv, tile.b);
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step) {
        const int page = pages_[step], token = table.in_page(tile.key0 + row0 + step * kStep);
        copy_row(step, row_of(p_.kv.k, page, token, tile.kv_head) + d * kBytes,
                 row_of(p_.kv.v, page, token, tile.kv_head) + d * kBytes,
                 Config::kInt8 ? scale_of(scales, page, token, tile.kv_head) : nullptr, page >= 0);
      }
    }
  }

  // Through registers. False: no row sees the key, so it is not looked up, or it is in no page of the pool.
  __device__ __forceinline__ bool find(const TeamWalk<Config>& tile, int key, Place& place) const {
    place = {tile.b, key};
    if (!sees(tile, key)) return false;
    if constexpr (!Config::kPaged) {
      return true;
    } else {
      const PageRow table(p_.kv, tile.b);
      place = {in_one_page() ? pages_[0] : table.page_of(key), table.in_page(key)};
      return place.page >= 0;
    }
  }
  __device__ __forceinline__ uint4 load(const char* g_row, int d, bool aligned) const {
    if constexpr (Config::kInt8)
      return load_bytes(reinterpret_cast<const int8_t*>(g_row), d, p_.head_dim, aligned);
    else
      return load_chunk(reinterpret_cast<const Element*>(g_row) + d, aligned);
  }

  static constexpr int kCopies = kRowSteps * Tile::kCount;  // per thread
  // Loads in flight: as many as fit in registers next to the outputs.
  static constexpr int kMostLoads = Config::kHeadDim <= 128 ? 8 : Config::kInt8 || Config::kBatchInvariant ? 2 : 4;
  static constexpr int kAtOnce = kCopies % kMostLoads == 0 ? kMostLoads
                                 : kCopies % 4 == 0        ? 4
                                 : kCopies % 3 == 0        ? 3
                                                           : 1;

  __device__ __forceinline__ void copy_chunks(const TeamWalk<Config>& tile, char* s_tile, const QfTensor& x,
                                              bool aligned) const {
    static_assert(kCopies % kAtOnce == 0, "");
    const int thread = fresh_tid() % Config::kTeamThreads, row0 = thread / Tile::kChunks;
    const int chunk = thread % Tile::kChunks;
#pragma unroll 1
    for (int first = 0; first < kCopies; first += kAtOnce) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = tile.key0 + row0 + (first + i) / Tile::kCount * kStep;
        const int d = (first + i) % Tile::kCount * Tile::kPanelColumns + chunk * kChunkElements;
        raw[i] = make_uint4(0, 0, 0, 0);
        Place place;
        if (d < p_.head_dim && find(tile, key, place))
          raw[i] = load(row_of(x, place.page, place.token, tile.kv_head), d, aligned);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = row0 + (first + i) / Tile::kCount * kStep, panel = (first + i) % Tile::kCount;
        *reinterpret_cast<uint4*>(s_tile + panel * Tile::kPanelBytes + Swizzle<Tile::kChunks>::offset(row, chunk)) =
            raw[i];
      }
    }
  }
  __device__ __forceinline__ void copy_scales(const TeamWalk<Config>& tile, char* s_scales) const {
    for (int i = fresh_tid() % Config::kTeamThreads; i < 2 * Config::kBlockN; i += Config::kTeamThreads) {
      const QfScales& scales = i < Config::kBlockN ? p_.kv.k_scales : p_.kv.v_scales;
      Place place;
      float scale = 0.0f;
      if (find(tile, tile.key0 + i % Config::kBlockN, place))
        scale = *scale_of(scales, place.page, place.token, tile.kv_head);
      reinterpret_cast<float*>(s_scales)[i] = scale;
    }
  }
  // Rotated: half a chunk at a time, because partners, cosines and sines take registers, too.
  __device__ __forceinline__ void copy_rotated_keys(const TeamWalk<Config>& tile, char* s_k) const {
    const int thread = fresh_tid() % Config::kTeamThreads, row0 = thread / Tile::kChunks;
    const int chunk = thread % Tile::kChunks;
#pragma unroll 1
    for (int half = 0; half < 2 * kCopies; ++half) {
      const int row = row0 + half / 2 / Tile::kCount * kStep, panel = half / 2 % Tile::kCount;
      const int key = tile.key0 + row;
      const int d = panel * Tile::kPanelColumns + chunk * kChunkElements + half % 2 * 4;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (d < p_.head_dim && sees(tile, key)) {
        const auto* const g_row = reinterpret_cast<const Element*>(row_of(p_.kv.k, tile.b, key, tile.kv_head));
        x = to_float4(load4(g_row, d, p_.head_dim, aligned_.k), g_row);
        x = rope4(p_.rope, g_row, d, p_.head_dim, position_k(p_.rope, tile.b, 0, key), x, aligned_.k && aligned_.rope);
      }
      char* const s_chunk = s_k + panel * Tile::kPanelBytes + Swizzle<Tile::kChunks>::offset(row, chunk);
      write4(reinterpret_cast<Element*>(s_chunk) + half % 2 * 4, x);
    }
  }

  const QfAttnParams& p_;
  const Aligned& aligned_;
  int pages_[Config::kPaged && kAsync ? kRowSteps : 1];  // of the tile to be copied next, -1: none
};

}  // namespace decode
}  // namespace qf
