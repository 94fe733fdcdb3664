// The two matrix products of a block in AMX tiles: tdpbssd for the scores, tdpbf16ps for weights times values.
//
// A tile is 16 rows of 64 bytes. Each product computes 2 x 2 tiles of its result (tmm0..3) from two of its left operand
// (tmm4, tmm5) and two of its right one (tmm6, tmm7), so four products share four loads. A right operand needs groups
// of four bytes side by side: packed keys have that layout (a panel of 16 keys, 64 channels are one tile); values are
// packed as bfloat16 tiles [32 keys][16 channels] with two keys of a channel side by side.
#pragma once

#include "amx.h"
#include "int8.h"
#include "int8_dots.h"

namespace qf {
namespace QF_ISA {

constexpr int kTileChannels = 16;

static inline int value_width(int head_dim) { return int(round_up(head_dim, 2 * kTileChannels)); }
static inline int64_t value_bytes(int head_dim) { return int64_t(value_width(head_dim)) * 2; }

// bfloat16 of finite x in the low half of each lane, saturating: finite values stay finite.
static inline __m512i to_bf16(Vec x) {
  const Vec largest = broadcast(3.38953138925153547590470800371487866880e+38f);
  const Vec bounded = vmin(largest, vmax(-largest, x));
  return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(bounded));
}

// kInt8KeyStep rows of float32 [value_width] become value_width / 16 tiles.
static inline void pack_values(char* values, const float* rows, int head_dim, int keys) {
  const int width = value_width(head_dim);
  for (int key = 0; key < keys; key += kInt8KeyStep, values += kInt8KeyStep * width * 2)
    for (int pair = 0; pair < kInt8KeyStep / 2; pair++) {
      const float* even = rows + int64_t(key + 2 * pair) * width;
      for (int d = 0; d < width; d += kTileChannels) {
        const __m512i low = to_bf16(load(even + d)), high = to_bf16(load(even + width + d));
        _mm512_storeu_si512(values + d / kTileChannels * kTileBytes + pair * 64,
                            _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
}

static inline void store_weights(char* row, int key, Vec first, Vec second) {
  _mm512_storeu_si512(row + key * 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// scores[r][j] = q[r] . k[j] for `keys` keys, a multiple of kInt8KeyStep; all of kRowBlock rows may be written.
static inline void score_block(const TileSession&, const Integer* q, int q_stride, int rows, const char* panels,
                               int64_t panel_stride, int groups, int keys, char* scores) {
  const int steps = groups * kPack / 64;
  const bool two = rows > 16;
  settle(panels);
  const Integer* q_low = q + 16 * q_stride;
  char* scores_low = scores + 16 * kScoreStride;
  _tile_loadd(4, q, q_stride);
  if (two) _tile_loadd(5, q_low, q_stride);
  for (int key = 0; key < keys; key += kInt8KeyStep, panels += 2 * panel_stride) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step++) {
      if (steps > 1) {
        _tile_loadd(4, q + step * 64, q_stride);
        if (two) _tile_loadd(5, q_low + step * 64, q_stride);
      }
      _tile_loadd(6, panels + step * kTileBytes, 64);
      _tile_loadd(7, panels + panel_stride + step * kTileBytes, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (two) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, scores + key * 4, kScoreStride);
    _tile_stored(1, scores + key * 4 + 64, kScoreStride);
    if (two) {
      _tile_stored(2, scores_low + key * 4, kScoreStride);
      _tile_stored(3, scores_low + key * 4 + 64, kScoreStride);
    }
  }
}

// out[r] += weights[r] . values for `keys` keys; all of kRowBlock rows are touched.
static inline void value_block(const TileSession&, const char* weights, int rows, const char* values, int head_dim,
                               int keys, float* out) {
  const int width = value_width(head_dim);
  const int64_t out_stride = int64_t(width) * 4, group_bytes = int64_t(kInt8KeyStep) * width * 2;
  const bool two = rows > 16;
  settle(weights);
  const char* weights_low = weights + 16 * kScoreStride;
  for (int d = 0; d < width; d += 2 * kTileChannels) {
    float* o = out + d;
    float* o_low = o + 16 * width;
    _tile_loadd(0, o, out_stride);
    _tile_loadd(1, o + kTileChannels, out_stride);
    if (two) {
      _tile_loadd(2, o_low, out_stride);
      _tile_loadd(3, o_low + kTileChannels, out_stride);
    }
    const char* tile = values + d / kTileChannels * kTileBytes;
    for (int key = 0; key < keys; key += kInt8KeyStep, tile += group_bytes) {
      _tile_loadd(4, weights + key * 2, kScoreStride);
      _tile_loadd(6, tile, 64);
      _tile_loadd(7, tile + kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, weights_low + key * 2, kScoreStride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o, out_stride);
    _tile_stored(1, o + kTileChannels, out_stride);
    if (two) {
      _tile_stored(2, o_low, out_stride);
      _tile_stored(3, o_low + kTileChannels, out_stride);
    }
  }
}

}  // namespace QF_ISA
}  // namespace qf
