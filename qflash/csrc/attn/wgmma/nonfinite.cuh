// NaN and infinity in V. A masked key has weight 0, but 0 times NaN is NaN: so two warps, the inspectors, scan the
// tiles of V that are not whole, set NaN and infinity in them to zero and record that in the work tile. Consumers wait
// for them in such tiles only, and output.cuh adds the values to the rows that do see them.
//
// Kernel::Inspector: wanted(work) returns whether tiles of that work tile's V need a scan, and clear(s_tile, thread)
// sets NaN and infinity in one to zero and returns whether there were any.
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/wgmma/shared_memory.cuh"
#include "ptx/fma.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace wgmma {

template <class Inspector, class Config>
__device__ __forceinline__ void inspect(const SharedMemory<Config>& s, int thread, const Inspector& inspector) {
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<Config::kStages> v_at, inspected_at;
  for (;; work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    WorkTile<Config>& work = s.work[work_at.stage()];
    const int tiles = work.tiles;
    if (tiles < 0) return;
    const bool wanted = tiles > 0 && inspector.wanted(work);
    for (int n = 0; n < tiles; ++n, v_at.advance()) {
      v_at.wait_full(*s.v_ring);
      const bool whole = work.whole(work.keys.begin + n * Config::kBlockN);
      const bool found = !whole && wanted && inspector.clear(s.v + v_at.stage() * Config::VTile::kBytes, thread);
      const bool cleared = __any_sync(0xffffffffu, found);
      __syncwarp();  // the zeros of every lane are in place
      if (thread % 32 == 0) {
        if (cleared) work.v_cleared = 1;
        if (!whole) mbarrier_arrive(&s.v_inspected[inspected_at.stage()]);
        v_at.release(*s.v_ring);  // otherwise another tile could arrive there, and its phase be taken for this one's
      }
      if (!whole) inspected_at.advance();
    }
    __syncwarp();  // every lane has read the work tile
    if (thread % 32 == 0) work_at.release(*s.work_ring);
  }
}

// For V of 16-bit elements.
template <class Config>
struct SixteenBitInspector {
  using Element = typename Config::Element;

  template <class Params>
  __device__ __forceinline__ explicit SixteenBitInspector(const Params&) {}
  __device__ __forceinline__ bool wanted(const WorkTile<Config>&) const { return true; }
  __device__ __forceinline__ bool clear(char* s_tile, int thread) const {
    constexpr int kThreads = Config::kInspectorThreads, kBytes = Config::VTile::kBytes;
    uint32_t seen[2] = {};  // one instruction per word
    const auto look = [&](int i, uint32_t word) {
      seen[i] = kIsF16<Element> ? add_zero_times_f16x2(word, seen[i]) : add_zero_times_bf16x2(word, seen[i]);
    };
    constexpr int kOwn = kBytes / 16 / kThreads;      // chunks,
    constexpr int kTogether = kOwn % 4 == 0 ? 4 : 2;  // that are in flight together
    static_assert(kBytes % (16 * kThreads) == 0 && kOwn % kTogether == 0, "");
    const char* s_own = s_tile + 16 * thread;
#pragma unroll 1
    for (int i = 0; i < kOwn; i += kTogether, s_own += 16 * kThreads * kTogether) {
      uint4 x[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) x[n] = *reinterpret_cast<const uint4*>(s_own + 16 * kThreads * n);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) look(0, x[n].x), look(1, x[n].y), look(0, x[n].z), look(1, x[n].w);
    }
    if (!word_nonfinite<Element>(seen[0] | seen[1])) return false;
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += kThreads) {
      uint16_t* const s_chunk = reinterpret_cast<uint16_t*>(s_tile + 16 * i);
      for (int e = 0; e < kPerChunk; ++e)
        if (word_nonfinite<Element>(s_chunk[e])) s_chunk[e] = 0;
    }
    fence_proxy_async();  // makes the zeros visible to wgmma
    return true;
  }
};

}  // namespace wgmma
}  // namespace qf
