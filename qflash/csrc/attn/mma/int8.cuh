// Scores in INT8: exact integer dot products, and their conversion to floats.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/softmax.cuh"
#include "common/elements.cuh"
#include "qflash_ops.h"
#include "smem/swizzle.cuh"

namespace qf {

// Integers below 2^22 in size, added to the bit pattern of 1.5 * 2^23, are floats: kMagic + s, exactly. So an
// accumulator that starts there needs no conversion, and the offset disappears in the multiplication that scales the
// score. With values in -127 .. 127 and a row of -128 at most, |s| <= 128 * 127 * 256 < 2^22; with a zero point
// |(q - zq).k| <= 255 * 128 * D < 2^22 up to head_dim 128.
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;
constexpr int kMostMagicDim = 128;  // with zero points

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void start_with(int32_t (&dots)[kMTiles][kNTiles][4], int32_t value) {
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dots[i][j][e] = value;
}

// With zero points the dot product of (q - zq) and (k - zk) is q.k - zq sum(k) - zk sum(q) + D zq zk. The last two
// terms are the same for all keys of a row and are added to its bias. The rest is (q - zq).k: accumulators start at -zq
// sum(k), from s_starts, which has one for every row of the tile and points at this lane's first.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void start_with_each(int32_t (&dots)[kMTiles][kNTiles][4], const int32_t* s_starts) {
#pragma unroll
  for (int j = 0; j < kNTiles; ++j) {
    const int2 start = *reinterpret_cast<const int2*>(s_starts + 8 * j);
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) {
      dots[r / 2][j][r % 2 * 2] = start.x;
      dots[r / 2][j][r % 2 * 2 + 1] = start.y;
    }
  }
}

// kConvert: plain integers; otherwise integers that started at kMagicBits.
template <bool kConvert, int kMTiles, int kNTiles>
__device__ __forceinline__ void to_floats(float (&S)[kMTiles][kNTiles][4], const int32_t (&dots)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[i][j][e] = kConvert ? float(dots[i][j][e]) : bits_to_float(uint32_t(dots[i][j][e]));
}

// The offset of kMagic times a slope is rounded before it disappears, which shifts scores by up to 0.75 slopes. That is
// negligible up to this slope (rounding q and k shifts them by a hundred); for steeper ones the offset is subtracted
// exactly.
constexpr float kSteep = 1.0f / 2048;

// Base-2 scores with all that precedes the exponential, where that is more than a slope: (S + offset) slope is |scale|
// log2(e) q.k without the terms that all keys of a row have in common, which s_row_bias has for the lane's rows (NULL:
// they are left out); scale may be negative or 0; softcap follows.
template <int kParts, int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_and_bias(float (&S)[kMTiles][kNTiles][4],
                                               const float (&slopes)[2 * kMTiles][kParts], float offset,
                                               const float* s_row_bias, const QfAttnParams& a) {
  const float sign = a.scale < 0.0f ? -1.0f : 1.0f;
  const bool coarsely = softens_coarsely(a.softcap);
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
    float bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = s_row_bias ? s_row_bias[16 * i + 8 * h] * a.scale * kLog2e : 0.0f;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {  // one branch per four, as in scale_scores and for the same reason
      float (&s)[4] = S[i][j];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[e] = fmaf(s[e] + offset, sign * slopes[2 * i + e / 2][j * kParts / kNTiles], bias[e / 2]);
      soften_four(s, a.softcap, coarsely);
    }
  }
}

// A slope, the product of a query's and a key's scale, must stay positive: masked scores of -inf times 0 would be NaN,
// and all-zero rows have scale 0. Adding this little leaves every score unchanged. NaN stays NaN.
constexpr float kLeastSlope = 1e-30f;
__device__ __forceinline__ float slope_of(float q_scale, float k_scale) { return fmaf(q_scale, k_scale, kLeastSlope); }

// Computes slopes of the lane's rows and groups of keys. Returns whether one of them is steep.
template <int kParts, int kLaneRows>
__device__ __forceinline__ bool find_slopes(float (&slopes)[kLaneRows][kParts], const float (&q_scale)[kLaneRows],
                                            const float (&k_scale)[kParts]) {
  bool steep = false;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      slopes[r][c] = slope_of(q_scale[r], k_scale[c]);
      steep |= slopes[r][c] > kSteep;
    }
  return steep;
}
template <int kParts, int kLaneRows>
__device__ __forceinline__ void set_slopes(float (&slopes)[kLaneRows][kParts], float slope) {
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
    for (int c = 0; c < kParts; ++c) slopes[r][c] = slope;
}

// The scale of a group without a finite key is NaN. Its keys are detected by their values (spoil_nonfinite), so here it
// must not reach the rows that do not see them. Scales are never negative.
__device__ __forceinline__ float number_or_zero(float scale) { return fmaxf(scale, 0.0f); }

__device__ __forceinline__ float scale_at(const QfScales& s, int b, int h, int token) {
  return s.scale[b * s.stride_b + h * s.stride_h + token / s.group];
}

// Is one of the keys whose first chunk this thread copied nonfinite: -128 in its first channel, as in no other key?
// Needs no barrier, only that its own copies are done.
template <class Walk>
__device__ __forceinline__ bool own_rows_nonfinite(const char* s_k) {
  if (Walk::first_chunk() != 0) return false;
  bool found = false;
#pragma unroll
  for (int r = 0; r < Walk::kRowSteps; ++r)
    found |= static_cast<signed char>(s_k[Walk::offset(r * Walk::kColumns)]) == -128;
  return found;
}

// Sets the scores of such keys to NaN. S[.][j][.] of this lane belongs to rows 8 j + column and the next of the tile.
template <int kChunks, int kMTiles, int kNTiles>
__device__ inline void spoil_nonfinite(float (&S)[kMTiles][kNTiles][4], const char* s_k, int column) {
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (static_cast<signed char>(s_k[Swizzle<kChunks>::offset(8 * j + column + e, 0)]) != -128) continue;
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r) S[r / 2][j][r % 2 * 2 + e] = nan();
    }
}

// Sixteen int8 of a row of any alignment; zeros from head_dim on.
__device__ inline uint4 load_bytes(const int8_t* g_row, int d, int head_dim, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(g_row + d);
  uint32_t words[4] = {};
#pragma unroll
  for (int e = 0; e < 16; ++e)
    if (d + e < head_dim) words[e / 4] |= uint32_t(uint8_t(g_row[d + e])) << 8 * (e % 4);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace qf
