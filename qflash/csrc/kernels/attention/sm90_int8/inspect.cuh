// NaN in tiles of V in E4M3, for the threads that inspect them (attn/wgmma/producer.cuh).
#pragma once

#include "attn/wgmma/producer.cuh"
#include "kernels/attention/sm90_int8/params.h"

namespace qf {
namespace sm90 {

struct EightBits {
  const Quantized& a;

  __device__ __forceinline__ bool wanted(const Record& record) const {
    return a.kv.v_nonfinite[record.facts.head] != 0;
  }
  __device__ __forceinline__ bool clear(char* s_tile, int thread) const {
    bool found = false;
    for (int i = thread; i < VTile::kBytes / 4; i += kInspectors) {
      uint32_t& word = reinterpret_cast<uint32_t*>(s_tile)[i];
      const uint32_t nan = (word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;  // 0x80 for every byte that is one
      if (nan == 0) continue;
      word &= ~((nan >> 7) * 0xffu);
      found = true;
    }
    if (found) fence_proxy_async();  // the zeros, to wgmma
    return found;
  }
};

// Is V of channel d NaN in the position of `column`, which counts keys in their order in the sequence?
__device__ inline bool transposed_is_nan(const Quantized& a, int64_t head, int64_t column, int d) {
  const int64_t in_block = column % 16;  // see attn/sm90_quantize: pairs of keys of two blocks of 8 in turn
  const int64_t position = column - in_block + in_block % 8 / 2 * 4 + in_block / 8 * 2 + in_block % 2;
  return (a.kv.v[(head * a.attn.head_dim + d) * a.v_columns + position] & 0x7f) == 0x7f;
}

}  // namespace sm90
}  // namespace qf
