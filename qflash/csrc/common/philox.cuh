// Philox-4x32-10: random words as a pure function of a counter and a key. Every element of a tensor gets its own word,
// independent of thread and order. J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
#pragma once

#include <stdint.h>

namespace qf {

// words[0..3] of block `counter` under `key`; the counter's upper 64 bits are 0.
__device__ __forceinline__ void philox(uint32_t (&words)[4], uint64_t counter, uint64_t key) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The words of elements `first` .. first + 3: element i has word i % 4 of block i / 4. kWhole: all four are in one
// block.
template <bool kWhole>
__device__ __forceinline__ void philox4(uint32_t (&words)[4], uint64_t first, uint64_t key) {
  philox(words, first / 4, key);
  const unsigned offset = first % 4;
  if (kWhole || offset == 0) return;
  uint32_t next[4];
  philox(next, first / 4 + 1, key);
  if (offset & 1) {
    words[0] = words[1], words[1] = words[2], words[2] = words[3], words[3] = next[0];
    next[0] = next[1], next[1] = next[2];
  }
  if (offset & 2) words[0] = words[2], words[1] = words[3], words[2] = next[0], words[3] = next[1];
}

}  // namespace qf
