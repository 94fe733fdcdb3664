// Which keys a query sees. The diagonal of query i is key i + len_k - len_q (aligned to the bottom right); the window
// reaches from `left` keys before it to `right` keys after it, -1 is open. Both edges are monotonic in i, so the keys
// of a block of rows extend from the begin of its first row to the end of its last.
#pragma once

#include <stdint.h>

namespace qf {

struct KeyRange {
  int begin, end;  // keys begin .. end-1; empty when begin == end
};

struct Mask {
  int left, right;  // -1: open
  int len_q, len_k;

  __device__ __forceinline__ KeyRange visible(int i) const {
    const int64_t diagonal = int64_t(i) + len_k - len_q;
    int64_t begin = left < 0 ? 0 : diagonal - left;
    int64_t end = right < 0 ? len_k : diagonal + right + 1;
    begin = begin < 0 ? 0 : begin;
    end = end > len_k ? len_k : end;
    if (begin >= end) return {0, 0};
    return {int(begin), int(end)};
  }

  // The smallest range that holds every key some row of first .. last sees, and the largest that all of them see.
  __host__ __device__ __forceinline__ KeyRange seen_by_any(int first, int last) const {
    const KeyRange edges = {edge_begin(first), edge_end(last)};
    return edges.begin < edges.end ? edges : KeyRange{0, 0};
  }
  __device__ __forceinline__ KeyRange seen_by_all(int first, int last) const {
    const KeyRange edges = {edge_begin(last), edge_end(first)};
    return edges.begin < edges.end ? edges : KeyRange{0, 0};
  }

  // The window of row i in a sequence without ends. Edges are clamped where that means the same for the `rows` rows
  // from i on, whose windows move by one key per row.
  __device__ __forceinline__ KeyRange window_at(int i, int rows) const {
    const int64_t diagonal = int64_t(i) + len_k - len_q;
    const int least = -rows, most = 0x7fffffff - rows;
    const auto held = [&](int64_t edge) { return int(edge < least ? least : edge > most ? most : edge); };
    return {left < 0 ? least : held(diagonal - left), right < 0 ? most : held(diagonal + right + 1)};
  }

 private:
  __host__ __device__ __forceinline__ int edge_begin(int i) const {
    const int64_t begin = left < 0 ? 0 : int64_t(i) + len_k - len_q - left;
    return begin < 0 ? 0 : begin > len_k ? len_k : int(begin);
  }
  __host__ __device__ __forceinline__ int edge_end(int i) const {
    const int64_t end = right < 0 ? len_k : int64_t(i) + len_k - len_q + right + 1;
    return end < 0 ? 0 : end > len_k ? len_k : int(end);
  }
};

// Visibility inside a tile that starts at key0, for a lane whose rows are row0, row0 + kRowStep, ...: the r-th of them
// sees the keys begin(r) .. end(r)-1, counted from key0. Cheap enough to be recomputed for every masked tile, in 32
// bits: distances from the diagonal are clamped to within 2^30, which no finite window reaches.
template <int kRowStep>
struct TileMask {
  int left, right;  // first and last visible key of row row0, from key0
  int keys_left;    // keys from key0 to the end of the sequence

  __device__ __forceinline__ TileMask(const Mask& mask, int row0, int key0) {
    const int64_t diagonal = int64_t(row0) + mask.len_k - mask.len_q - key0, limit = int64_t(1) << 30;
    const int held = int(diagonal < -limit ? -limit : diagonal > limit ? limit : diagonal);
    left = mask.left < 0 ? -(1 << 30) - (1 << 29) : held - mask.left;
    right = mask.right < 0 ? (1 << 30) : held + mask.right;
    keys_left = mask.len_k - key0;
  }
  __device__ __forceinline__ int begin(int r) const { return left + r * kRowStep; }
  __device__ __forceinline__ int end(int r) const { return min(right + r * kRowStep + 1, keys_left); }
  __device__ __forceinline__ bool operator()(int r, int j) const { return j >= begin(r) && j < end(r); }
};

}  // namespace qf
