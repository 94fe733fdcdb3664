// Loads tiles of q, k and v into swizzled shared memory, 16 bytes (kPerChunk elements) at a time: asynchronously where
// rows are aligned and unchanged, through registers where they are rotated or start at odd addresses.
#pragma once

#include "attn/pages.cuh"
#include "attn/rope.cuh"
#include "attn/tile_load.cuh"
#include "ptx/cp_async.cuh"
#include "smem/swizzle.cuh"

namespace qf {

constexpr int kPerChunk = 8;  // 16-bit elements in 16 bytes

// How the threads of a block divide a tile: kAcross neighbouring threads take neighbouring chunks of a row, up to 128
// bytes of it, and the block takes kStep rows at once. kStep is a multiple of the swizzle's period and kAcross of its
// width, so all chunks of a thread are at one offset plus constants: copy i is row step i / kColumns, column step
// i % kColumns.
template <int kTileRows, int kRowChunks, int kThreads>
struct ChunkWalk {
  static constexpr int kAcross = kRowChunks % 8 == 0 ? 8 : kRowChunks % 4 == 0 ? 4 : 2;
  static constexpr int kStep = kThreads / kAcross;
  static constexpr int kColumns = kRowChunks / kAcross, kRowSteps = kTileRows / kStep;
  static constexpr int kCopies = kColumns * kRowSteps;
  static_assert(kStep % 8 == 0 && kRowSteps * kStep == kTileRows, "the walk must come out even");

  __device__ static __forceinline__ int first_row() { return fresh_tid() / kAcross; }
  __device__ static __forceinline__ int first_chunk() { return fresh_tid() % kAcross; }
  __device__ static __forceinline__ int row(int i) { return first_row() + i / kColumns * kStep; }
  __device__ static __forceinline__ int chunk(int i) { return first_chunk() + i % kColumns * kAcross; }
  // Byte offset in the tile of this thread's first chunk, and from there to its i-th.
  __device__ static __forceinline__ int first_offset() {
    return Swizzle<kRowChunks>::offset(first_row(), first_chunk());
  }
  static constexpr __device__ __forceinline__ int shift(int i) {
    return i / kColumns * (kStep * kRowChunks * 16) + i % kColumns * (kAcross * 16);
  }
  __device__ static __forceinline__ int offset(int i) { return first_offset() + shift(i); }
};

// Which row of the tensor is in row r of a tile: the same one, ...
struct InOrder {
  __device__ static __forceinline__ int source(int row) { return row; }
  static constexpr __device__ __forceinline__ int step(int rows) { return rows; }  // of sources, per rows of the tile
};
// ... or, for K and V, the one that assigns each lane a run of kTileRows / 4 neighbouring keys. Lane t of a quad holds
// the scores of rows 2t and 2t + 1 of every 8, and V's rows are multiplied by the weights in the same order.
template <int kTileRows>
struct InRuns {
  static constexpr int kRun = kTileRows / 4;
  __device__ static __forceinline__ int source(int row) { return row % 8 / 2 * kRun + row / 8 * 2 + row % 2; }
  static constexpr __device__ __forceinline__ int step(int rows) { return rows / 4; }  // rows: a multiple of 8
};

// s_tile <- rows row0 .. of the head at g_head, asynchronously; zeros from row `length` and channel `head_dim` on.
// Every row starts at a multiple of 16 bytes.
template <class Walk, class Order = InOrder, class Element>
__device__ __forceinline__ void copy_async(char* s_tile, const Element* g_head, int64_t stride_t, int row0, int length,
                                           int head_dim) {
  constexpr int kElements = 16 / sizeof(Element);  // per chunk
  const int first_row = row0 + Order::source(Walk::first_row()), first_channel = Walk::first_chunk() * kElements;
  const Element* const g_first = g_head + first_row * stride_t + first_channel;
  char* const s_first = s_tile + Walk::first_offset();
#pragma unroll
  for (int r = 0; r < Walk::kRowSteps; ++r) {
    const Element* const g_row = g_first + r * (Order::step(Walk::kStep) * stride_t);
#pragma unroll
    for (int c = 0; c < Walk::kColumns; ++c) {
      constexpr int kChannels = Walk::kAcross * kElements;
      const bool valid = first_row + r * Order::step(Walk::kStep) < length && first_channel + c * kChannels < head_dim;
      cp_async_16(s_first + Walk::shift(r * Walk::kColumns + c), g_row + c * kChannels, valid);
    }
  }
}

// s_k, s_v <- tokens row0 .. of K and V in the same pages, asynchronously; zeros where copy_async writes them, and for
// pages out of range, whose tokens no row sees.
template <class Walk, class Element>
__device__ __forceinline__ void copy_pages_async(char* s_k, char* s_v, const PagedRows<Element>& k,
                                                 const PagedRows<Element>& v, int row0) {
  constexpr int kElements = 16 / sizeof(Element), kChannels = Walk::kAcross * kElements;
  const int first_row = row0 + Walk::first_row(), first_channel = Walk::first_chunk() * kElements;
  int pages[Walk::kRowSteps];  // all in flight before one is waited for
#pragma unroll
  for (int r = 0; r < Walk::kRowSteps; ++r) {
    const int row = first_row + r * Walk::kStep;
    pages[r] = row < k.length ? k.table.page_of(row) : -1;
  }
  const auto copy = [&](char* s_tile, const PagedRows<Element>& x) {
    char* const s_first = s_tile + Walk::first_offset();
#pragma unroll
    for (int r = 0; r < Walk::kRowSteps; ++r) {
      const Element* const g_row = x.row(pages[r], first_row + r * Walk::kStep) + first_channel;
#pragma unroll
      for (int c = 0; c < Walk::kColumns; ++c)
        cp_async_16(s_first + Walk::shift(r * Walk::kColumns + c), g_row + c * kChannels,
                    pages[r] >= 0 && first_channel + c * kChannels < x.head_dim);
    }
  };
  copy(s_k, k);
  copy(s_v, v);
}

template <class Element>
__device__ __forceinline__ uint4 chunk_of(const float4& low, const float4& high) {
  const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  Element y[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) from_float(x[e], y[e]);
  uint2 half[2];
  pack(y, half[0]);
  pack(y + 4, half[1]);
  return make_uint4(half[0].x, half[0].y, half[1].x, half[1].y);
}

// The same through registers: load(row, d) returns the chunk of row `row` that starts at channel d, both inside.
template <class Walk, class Order = InOrder, class Load>
__device__ __forceinline__ void copy_through_registers(char* s_tile, int row0, int length, int head_dim,
                                                       int chunk_elements, Load load) {
  constexpr int kAtOnce = Walk::kCopies % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int first = 0; first < Walk::kCopies; first += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row0 + Order::source(Walk::row(first + i)), d = Walk::chunk(first + i) * chunk_elements;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (row < length && d < head_dim) raw[i] = load(row, d);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) *reinterpret_cast<uint4*>(s_tile + Walk::offset(first + i)) = raw[i];
  }
}

// Eight 16-bit elements, all of which exist. aligned: their address is a multiple of 16.
template <class Element>
__device__ __forceinline__ uint4 load_chunk(const Element* g_chunk, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(g_chunk);
  const auto two = [&](int e) { return uint32_t(g_chunk[e].bits) | uint32_t(g_chunk[e + 1].bits) << 16; };
  return make_uint4(two(0), two(2), two(4), two(6));
}

// The same for a row of any alignment, whose last elements may be missing.
template <class Element>
__device__ __forceinline__ uint4 load_chunk(const HeadRows<Element>& x, int row, int d, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(x.row(row) + d);
  const uint2 low = load4(x.row(row), d, x.head_dim, x.vector);
  const uint2 high = load4(x.row(row), d + 4, x.head_dim, x.vector);
  return make_uint4(low.x, low.y, high.x, high.y);
}
// Zeros for a page out of range, whose tokens no row sees.
template <class Element>
__device__ __forceinline__ uint4 load_chunk(const PagedRows<Element>& x, int row, int d, bool aligned) {
  const int page = x.table.page_of(row);
  if (page < 0) return make_uint4(0, 0, 0, 0);
  const Element* const g_row = x.row(page, row);
  if (aligned) return *reinterpret_cast<const uint4*>(g_row + d);
  const uint2 low = load4(g_row, d, x.head_dim, x.vector), high = load4(g_row, d + 4, x.head_dim, x.vector);
  return make_uint4(low.x, low.y, high.x, high.y);
}
template <class Walk, class Order = InOrder, class Rows>
__device__ __forceinline__ void copy_through_registers(char* s_tile, const Rows& x, int row0, bool aligned) {
  copy_through_registers<Walk, Order>(s_tile, row0, x.length, x.head_dim, kPerChunk,
                                      [&](int row, int d) { return load_chunk(x, row, d, aligned); });
}

// Eight channels from d on of the row at g_row, rotated. vector: the row may be read in vectors of four, rope_vector:
// so may the tables.
template <class Element>
__device__ __forceinline__ uint4 rotated_chunk(const QfRope& rope, const Element* g_row, int d, int head_dim,
                                               int position, bool vector, bool rope_vector) {
  const auto rotated = [&](int channel) {
    return rope4(rope, g_row, channel, head_dim, position, to_float4(load4(g_row, channel, head_dim, vector), g_row),
                 rope_vector && vector);
  };
  return chunk_of<Element>(rotated(d), rotated(d + 4));
}

// The same, rotated: position(row) returns the position of a row.
template <class Walk, class Element, class Position>
__device__ __forceinline__ void copy_rotated(char* s_tile, const HeadRows<Element>& x, int row0, const QfRope& rope,
                                             bool rope_vector, Position position) {
#pragma unroll 1
  for (int i = 0; i < Walk::kCopies; ++i) {
    const int row = row0 + Walk::row(i), d = Walk::chunk(i) * kPerChunk;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (row < x.length && d < x.head_dim)
      raw = rotated_chunk(rope, x.row(row), d, x.head_dim, position(row), x.vector, rope_vector);
    *reinterpret_cast<uint4*>(s_tile + Walk::offset(i)) = raw;
  }
}
}  // namespace qf
