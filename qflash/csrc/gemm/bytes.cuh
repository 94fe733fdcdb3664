// Loads of matrices in global memory, sixteen bytes of a row at a time, at any alignment; and the 4 x 4 byte transpose
// from rows of int8 along n to words along k.
#pragma once

#include <stdint.h>

#include "ptx/prmt.cuh"

namespace qf {
namespace gemm {

struct Bytes16 {
  uint32_t word[4];
};

// A matrix of any element type as rows of bytes: strides and columns are in bytes. `columns` are contiguous. begin ..
// end is the memory from the first to the last element.
struct ByteMatrix {
  const int8_t *g_data, *g_begin, *g_end;
  int64_t stride;
  int rows, columns;
  bool vector;  // 16-byte chunks of all rows are aligned, and columns is a multiple of 16
};

// Host side. size: bytes of an element; stride and columns are in elements.
inline ByteMatrix byte_matrix(const void* elements, int size, int64_t stride, int64_t rows, int64_t columns) {
  stride *= size, columns *= size;
  const int8_t* const data = static_cast<const int8_t*>(elements);
  const int64_t span = rows > 0 ? (rows - 1) * stride : 0;
  const int8_t* const begin = data + (span < 0 ? span : 0);
  const bool vector = columns % 16 == 0 && stride % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {data, begin, data + (span > 0 ? span : 0) + columns, stride, int(rows), int(columns), vector};
}

// Sixteen bytes from any address: five aligned words, shifted into place. Only begin .. end may be read, and these
// words can reach up to three bytes past its edges; there, and past the last column, bytes are loaded one by one.
__device__ __forceinline__ Bytes16 load_unaligned(const ByteMatrix& x, const int8_t* g_from, int left) {
  Bytes16 value{};
  const int shift = int(reinterpret_cast<uintptr_t>(g_from) % 4);
  const int8_t* const g_aligned = g_from - shift;
  if (left >= 16 && g_aligned >= x.g_begin && g_aligned + 20 <= x.g_end) {
    const uint32_t* const g_words = reinterpret_cast<const uint32_t*>(g_aligned);
    const uint32_t selector = 0x3210u + 0x1111u * shift;
    uint32_t low = g_words[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = g_words[i + 1];
      value.word[i] = prmt(low, high, selector);
      low = high;
    }
  } else {
    auto& word = value.word;
#pragma unroll 1  // rare, and sixteen guarded loads at every call site would bloat the code
    for (int i = 0; i < 16; i += 4) {
      uint32_t four = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (i + e < left) four |= uint32_t(uint8_t(g_from[i + e])) << 8 * e;
      word[0] = word[1], word[1] = word[2], word[2] = word[3], word[3] = four;
    }
  }
  return value;
}

// x[row][column ..+15], zeros outside.
__device__ __forceinline__ Bytes16 load16(const ByteMatrix& x, int row, int column) {
  Bytes16 value{};
  if (row >= x.rows || column >= x.columns) return value;
  const int8_t* const g_from = x.g_data + row * x.stride + column;
  if (x.vector) {
    const uint4 raw = *reinterpret_cast<const uint4*>(g_from);
    value.word[0] = raw.x, value.word[1] = raw.y, value.word[2] = raw.z, value.word[3] = raw.w;
    return value;
  }
  return load_unaligned(x, g_from, x.columns - column);
}

// word[j] <- byte j of each of the four rows, the first row's in the lowest byte.
__device__ __forceinline__ void transpose4x4(uint32_t (&word)[4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t low01 = prmt(r0, r1, 0x5140), high01 = prmt(r0, r1, 0x7362);  // bytes 0 and 1, 2 and 3 of two rows
  const uint32_t low23 = prmt(r2, r3, 0x5140), high23 = prmt(r2, r3, 0x7362);
  word[0] = prmt(low01, low23, 0x5410), word[1] = prmt(low01, low23, 0x7632);
  word[2] = prmt(high01, high23, 0x5410), word[3] = prmt(high01, high23, 0x7632);
}

}  // namespace gemm
}  // namespace qf
