// Epilogue: O from wmma fragments to global memory, through shared memory that only this warp uses.
#pragma once

#include "attn/wmma/tile.cuh"
#include "ptx/wmma.cuh"

namespace qf {

// The largest finite value: a rounded mean of finite values is not infinite; only overflowed sums are.
template <class Element>
struct Largest;
template <>
struct Largest<F16> {
  static constexpr float kValue = 65504.0f;
};
template <>
struct Largest<BF16> {
  static constexpr float kValue = 3.3895313892515355e38f;
};

// One warp's rows of out. kColumns channels pass through shared memory at a time.
template <class Element, int kWarpRows, int kHeadDim, int kColumns>
struct WarpOut {
  static constexpr int kRowChunks = kColumns / kPerChunk;
  static constexpr int kStride = kColumns + 4;  // floats, in s_rows
  static_assert(kHeadDim % kColumns == 0 && kWarpRows * kRowChunks % 32 == 0, "chunks must come out even");

  Element* g_out;  // the warp's first row
  int64_t stride_t;
  int rows, head_dim;  // rows that exist; head_dim is a multiple of kPerChunk
  bool aligned;        // rows start at multiples of 16 bytes

  // Stores O, already divided by the sums of weights, to out. s_rows: kWarpRows * kStride floats.
  template <int kMTiles, int kOTiles>
  __device__ __forceinline__ void store(const float (&O)[kMTiles][kOTiles][8], float* s_rows) const {
#pragma unroll
    for (int first = 0; first < kHeadDim; first += kColumns) {
      __syncwarp();  // the warp is done with what s_rows held
#pragma unroll
      for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int j = 0; j < kColumns / 16; ++j)
          wmma_store_row(s_rows + 16 * i * kStride + 16 * j, O[i][first / 16 + j], kStride);
      __syncwarp();  // other lanes read what this one wrote
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < kWarpRows * kRowChunks; i += 32) {
        const int row = i / kRowChunks, column = i % kRowChunks * kPerChunk;
        if (row < rows && first + column < head_dim)
          store_chunk(g_out + row * stride_t + first + column, s_rows + row * kStride + column);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_chunk(Element* g_chunk, const float* s_chunk) const {
    Element y[kPerChunk];
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) {
      constexpr float kMost = Largest<Element>::kValue;
      float x = s_chunk[e];
      if (fabsf(x) > kMost && fabsf(x) < infinity()) x = copysignf(kMost, x);  // a NaN stays
      from_float(x, y[e]);
    }
    if (aligned) {
      uint2 low, high;
      pack(y, low);
      pack(y + 4, high);
      *reinterpret_cast<uint4*>(g_chunk) = make_uint4(low.x, low.y, high.x, high.y);
    } else {
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) g_chunk[e] = y[e];
    }
  }
};

}  // namespace qf
