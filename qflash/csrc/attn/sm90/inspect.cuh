// NaN and infinity in tiles of V of 16-bit elements, for the threads that inspect them (attn/sm90/producer.cuh).
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/sm90/producer.cuh"
#include "ptx/fma.cuh"

namespace qf {
namespace sm90 {

struct SixteenBits {
  __device__ __forceinline__ bool wanted(const Record&) const { return true; }
  __device__ __forceinline__ bool clear(char* s_tile, int thread) const {
    uint32_t seen[4] = {};  // an instruction a word
    const auto look = [&](int i, uint32_t word) {
      seen[i] = QF_DTYPE == QF_F16 ? add_zero_times_f16x2(word, seen[i]) : add_zero_times_bf16x2(word, seen[i]);
    };
#pragma unroll 4
    for (int i = thread; i < VTile::kBytes / 16; i += kInspectors) {
      const uint4 x = *reinterpret_cast<const uint4*>(s_tile + 16 * i);
      look(0, x.x), look(1, x.y), look(2, x.z), look(3, x.w);
    }
    if (!word_nonfinite<Element>(seen[0] | seen[1] | seen[2] | seen[3])) return false;
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
