// NaN and infinity in tiles of V of 16-bit elements, for the threads that inspect them (attn/wgmma/producer.cuh).
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/wgmma/producer.cuh"
#include "ptx/fma.cuh"

namespace qf {
namespace sm90 {

struct SixteenBits {
  __device__ __forceinline__ bool wanted(const Record&) const { return true; }
  __device__ __forceinline__ bool clear(char* s_tile, int thread) const {
    uint32_t seen[2] = {};  // an instruction a word
    const auto look = [&](int i, uint32_t word) {
      seen[i] = QF_DTYPE == QF_F16 ? add_zero_times_f16x2(word, seen[i]) : add_zero_times_bf16x2(word, seen[i]);
    };
    constexpr int kOwn = VTile::kBytes / 16 / kInspectors;  // chunks,
    constexpr int kTogether = kOwn % 4 == 0 ? 4 : 2;        // of which as many are on their way at once
    static_assert(VTile::kBytes % (16 * kInspectors) == 0 && kOwn % kTogether == 0, "");
    const char* s_own = s_tile + 16 * thread;
#pragma unroll 1
    for (int i = 0; i < kOwn; i += kTogether, s_own += 16 * kInspectors * kTogether) {
      uint4 x[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) x[n] = *reinterpret_cast<const uint4*>(s_own + 16 * kInspectors * n);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) look(0, x[n].x), look(1, x[n].y), look(0, x[n].z), look(1, x[n].w);
    }
    if (!word_nonfinite<Element>(seen[0] | seen[1])) return false;
#pragma unroll 1
    for (int i = thread; i < VTile::kBytes / 16; i += kInspectors) {
      uint16_t* const s_chunk = reinterpret_cast<uint16_t*>(s_tile + 16 * i);
      for (int e = 0; e < kPerChunk; ++e)
        if (word_nonfinite<Element>(s_chunk[e])) s_chunk[e] = 0;
    }
    fence_proxy_async();  // the zeros, to wgmma
    return true;
  }
};

}  // namespace sm90
}  // namespace qf
