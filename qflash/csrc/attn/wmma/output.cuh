// O from wmma fragments to global memory, through shared memory that only this warp uses; and, on the way there, NaN
// and infinity from V, which never enter the fragments: nobody could tell which element to take them out of again.
//
// A tile of V that holds some is set to zero in their place, and what the rows that see them must get is added up in
// `out` itself. Every element of out belongs to one thread, which adds to it, reads it back, and at the end adds it to
// the mean of the finite values. A visible key's weight is never zero, so what it adds is its V itself; that also holds
// where the weight is too small for 16 bits, and 0 times infinity would have been NaN.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/nonfinite.cuh"
#include "attn/wmma/tile.cuh"
#include "ptx/wmma.cuh"

namespace qf {

// The largest finite value: a mean of finite values, rounded, is not infinite; only sums that overflowed are.
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

// One warp's rows of out, seen in chunks of 8 channels. kColumns channels pass through shared memory at a time.
template <class Element, int kWarpRows, int kHeadDim, int kColumns>
struct WarpOut {
  static constexpr int kRowChunks = kColumns / kPerChunk;
  static constexpr int kStride = kColumns + 4;              // floats, in s_rows
  static constexpr int kVStride = padded_stride(kHeadDim);  // elements, in s_v
  static_assert(kHeadDim % kColumns == 0 && kWarpRows * kRowChunks % 32 == 0, "chunks must come out even");

  Element* g_out;  // the warp's first row
  int64_t stride_t;
  int rows, head_dim;  // rows that exist
  bool aligned;        // rows start at multiples of 16 bytes

  // Calls visit(row, column within the block of kColumns, its place in g_out) for every chunk of this lane.
  template <class Visit>
  __device__ __forceinline__ void each_chunk(int first_column, Visit visit) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kWarpRows * kRowChunks; i += 32) {
      const int row = i / kRowChunks, column = i % kRowChunks * kPerChunk, d = first_column + column;
      if (row < rows && d < head_dim) visit(row, column, g_out + row * stride_t + d, min(kPerChunk, head_dim - d));
    }
  }

  // What is not finite in s_v (kKeys keys from key0 on, padded rows) into out, for the rows that see it. `tainted`: out
  // holds the like already. row0: the warp's first row in its sequence.
  template <int kKeys>
  __device__ __forceinline__ void add_nonfinite(const Element* s_v, int key0, const Mask& mask, int row0,
                                                bool tainted) const {
#pragma unroll 1
    for (int first = 0; first < kHeadDim; first += kColumns)
      each_chunk(first, [&](int row, int column, Element* g_chunk, int count) {
        const KeyRange seen = mask.visible(row0 + row);
        const int begin = max(seen.begin - key0, 0), end = min(seen.end - key0, kKeys);
#pragma unroll 1
        for (int e = 0; e < count; ++e) {
          float sum = tainted ? to_float(g_chunk[e]) : 0.0f;
          for (int key = begin; key < end; ++key) {
            const float x = to_float(s_v[key * kVStride + first + column + e]);
            if (x * 0.0f != 0.0f) sum += x;
          }
          from_float(sum, g_chunk[e]);
        }
      });
  }

  // O, already divided by the sums of weights, to out. s_rows: kWarpRows * kStride floats.
  template <int kMTiles, int kOTiles>
  __device__ __forceinline__ void store(const float (&O)[kMTiles][kOTiles][8], float* s_rows, bool tainted) const {
#pragma unroll
    for (int first = 0; first < kHeadDim; first += kColumns) {
      __syncwarp();  // the warp is done with what s_rows held
#pragma unroll
      for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int j = 0; j < kColumns / 16; ++j)
          wmma_store_row(s_rows + 16 * i * kStride + 16 * j, O[i][first / 16 + j], kStride);
      __syncwarp();  // other lanes read what this one wrote
      each_chunk(first, [&](int row, int column, Element* g_chunk, int count) {
        float x[kPerChunk];
        Element y[kPerChunk];
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) {
          constexpr float kMost = Largest<Element>::kValue;
          x[e] = s_rows[row * kStride + column + e];
          if (fabsf(x[e]) > kMost && fabsf(x[e]) < infinity()) x[e] = copysignf(kMost, x[e]);  // a NaN stays
          if (tainted && e < count) x[e] += to_float(g_chunk[e]);
          from_float(x[e], y[e]);
        }
        if (aligned) {
          uint2 low, high;
          pack(y, low);
          pack(y + 4, high);
          *reinterpret_cast<uint4*>(g_chunk) = make_uint4(low.x, low.y, high.x, high.y);
        } else {
#pragma unroll
          for (int e = 0; e < kPerChunk; ++e)
            if (e < count) g_chunk[e] = y[e];
        }
      });
    }
  }
};

}  // namespace qf
