// Loads a rectangle of q, k or v from global to shared memory: either fetched into registers as raw vectors of four and
// stashed into shared memory as float32 later, or copied unchanged, asynchronously where the architecture can. In both
// cases the loads are in flight while something else is computed.
#pragma once

#include "attn/rope.cuh"
#include "common/elements.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tid.cuh"

namespace qf {

// Threads cover the rectangle row by row, four channels each: neighbouring lanes read and write neighbouring words.
template <int kTileRows, int kTileCols, int kThreads>
struct TileWalk {
  static constexpr int kPerRow = kTileCols / 4;
  static constexpr int kVecs = kTileRows * kPerRow / kThreads;
  static_assert(kTileCols % 4 == 0 && kVecs * kThreads == kTileRows * kPerRow, "the walk must come out even");

  __device__ static __forceinline__ int row(int thread, int i) { return (thread + i * kThreads) / kPerRow; }
  __device__ static __forceinline__ int column(int thread, int i) { return (thread + i * kThreads) % kPerRow * 4; }
};

// One head of one sequence of q, k or v.
template <class Element>
struct HeadRows {
  const Element* g_head;  // row 0, channel 0
  int64_t stride_t;
  int length, head_dim;
  bool vector;  // load4's condition holds for every row

  __device__ __forceinline__ HeadRows(const QfTensor& x, int b, int64_t row0, int h, int len, int dim, bool vectorises)
      : g_head(static_cast<const Element*>(x.data) + b * x.stride_b + row0 * x.stride_t + h * x.stride_h),
        stride_t(x.stride_t),
        length(len),
        head_dim(dim),
        vector(vectorises) {}

  __device__ __forceinline__ HeadRows(const Element* head, int64_t stride, int len, int dim, bool vectorises)
      : g_head(head), stride_t(stride), length(len), head_dim(dim), vector(vectorises) {}

  __device__ __forceinline__ const Element* row(int i) const { return g_head + i * stride_t; }
};

// raw <- rows row0 .., channels d0 ..; zeros past the last row and the last channel.
template <class Walk, class Element, class Raw, int kHeld>
__device__ __forceinline__ void fetch(Raw (&raw)[kHeld], const HeadRows<Element>& x, int row0, int d0) {
  static_assert(Walk::kVecs <= kHeld, "the array is too small");
  const int thread = fresh_tid();
#pragma unroll
  for (int i = 0; i < Walk::kVecs; ++i) {
    const int row = row0 + Walk::row(thread, i);
    raw[i] = Raw{};
    if (row < x.length) raw[i] = load4(x.row(row), d0 + Walk::column(thread, i), x.head_dim, x.vector);
  }
}

// s_tile[row][column] <- float32(raw), rows kStride floats apart. Returns whether all of it is finite.
template <class Walk, int kStride, class Element, class Raw, int kHeld>
__device__ __forceinline__ bool stash(float* s_tile, const Raw (&raw)[kHeld], const HeadRows<Element>& x) {
  const int thread = fresh_tid();
  bool all_finite = true;
#pragma unroll
  for (int i = 0; i < Walk::kVecs; ++i) {
    const float4 value = to_float4(raw[i], x.g_head);
    all_finite &= finite(value);
    *reinterpret_cast<float4*>(s_tile + Walk::row(thread, i) * kStride + Walk::column(thread, i)) = value;
  }
  return all_finite;
}

// s_tile <- rows row0 .. unchanged; zeros past the last row and the last channel. With kAsync the copies of a tensor
// that may be read in vectors belong to the thread's open group of cp.async.
template <class Walk, int kStride, bool kAsync, class Element>
__device__ __forceinline__ void copy_tile(Element* s_tile, const HeadRows<Element>& x, int row0) {
  using Raw = typename Raw4<Element>::Type;
  const int thread = fresh_tid();
  if (kAsync && x.vector) {
#pragma unroll
    for (int i = 0; i < Walk::kVecs; ++i) {
      const int row = row0 + Walk::row(thread, i), d = Walk::column(thread, i);
      Element* const s_to = s_tile + Walk::row(thread, i) * kStride + d;
      const bool valid = row < x.length && d < x.head_dim;
      if constexpr (sizeof(Raw) == 16)
        cp_async_16(s_to, x.row(row) + d, valid);
      else
        cp_async_8(s_to, x.row(row) + d, valid);
    }
  } else {
#pragma unroll 2
    for (int i = 0; i < Walk::kVecs; ++i) {
      const int row = row0 + Walk::row(thread, i), d = Walk::column(thread, i);
      Raw raw{};
      if (row < x.length) raw = load4(x.row(row), d, x.head_dim, x.vector);
      *reinterpret_cast<Raw*>(s_tile + Walk::row(thread, i) * kStride + d) = raw;
    }
  }
}

// s_tile <- factor * x, rotated where there is a rope, in one pass: for q, which is loaded once, and for rotated k,
// whose partners, cosines and sines would not fit into registers next to everything else. Rounded where s_tile is 16
// bits wide.
template <class Walk, int kStride, class Stored, class Element, class Position>
__device__ __forceinline__ void load_scaled(Stored* s_tile, const HeadRows<Element>& x, int row0, int d0, float factor,
                                            const QfRope& rope, bool rope_vector, Position position) {
  const int thread = fresh_tid();
#pragma unroll 2
  for (int i = 0; i < Walk::kVecs; ++i) {
    const int row = row0 + Walk::row(thread, i), d = d0 + Walk::column(thread, i);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < x.length) {
      value = to_float4(load4(x.row(row), d, x.head_dim, x.vector), x.g_head);
      if (rope.cos) value = rope4(rope, x.row(row), d, x.head_dim, position(row), value, rope_vector && x.vector);
    }
    value = make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
    write4(s_tile + Walk::row(thread, i) * kStride + Walk::column(thread, i), value);
  }
}

// The same without a rope; the compiler removes its code.
template <class Walk, int kStride, class Stored, class Element>
__device__ __forceinline__ void load_scaled(Stored* s_tile, const HeadRows<Element>& x, int row0, int d0,
                                            float factor) {
  load_scaled<Walk, kStride>(s_tile, x, row0, d0, factor, QfRope{}, false, [](int) { return 0; });
}

// Which tensors may be read in vectors of four. Host side.
struct Vectorises {
  bool q, k, v, out, rope;
};

inline bool tensor_vectorises(const QfTensor& x, int head_dim, int element_bytes) {
  return head_dim % 4 == 0 && x.stride_b % 4 == 0 && x.stride_t % 4 == 0 && x.stride_h % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % (4 * element_bytes) == 0;
}

inline Vectorises vectorises(const QfAttnParams& p) {
  const int bytes = p.dtype == QF_F32 ? 4 : 2;
  return {tensor_vectorises(p.q, p.head_dim, bytes), tensor_vectorises(p.kv.k, p.head_dim, bytes),
          tensor_vectorises(p.kv.v, p.head_dim, bytes), tensor_vectorises(p.out, p.head_dim, bytes),
          rope_tables_vectorise(p.rope)};
}

// May x be copied 16 bytes at a time? Host side.
inline bool chunks_aligned(const QfTensor& x, int head_dim, int element_bytes) {
  const int per_chunk = 16 / element_bytes;
  return head_dim % per_chunk == 0 && x.stride_b % per_chunk == 0 && x.stride_t % per_chunk == 0 &&
         x.stride_h % per_chunk == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace qf
