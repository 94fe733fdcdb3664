// AMX's tile registers and instructions in software, put in front of a kernel that uses them, so that it runs on
// processors without. Denormal numbers, which AMX takes for zeros, are numbers here.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace soft_amx {

struct Tile {
  int rows, row_bytes;  // as configured: 0 if it is not
  unsigned char bytes[16][64];
};
static thread_local Tile tiles[8];

static inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "AMX in software: %s\n", what);
  abort();
}

static inline Tile& configured(int t) {
  require(tiles[t].rows > 0, "a tile is used that is not configured");
  return tiles[t];
}

static inline void configure(const void* config) {
  const auto* const bytes = static_cast<const unsigned char*>(config);
  require(bytes[0] == 1, "the palette is not 1");
  for (int t = 0; t < 8; t++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
    tiles[t].rows = bytes[48 + t], tiles[t].row_bytes = row_bytes;
    require(tiles[t].rows <= 16 && row_bytes <= 64, "a tile is configured too large");
    memset(tiles[t].bytes, 0, sizeof tiles[t].bytes);
  }
}

static inline void release() { memset(tiles, 0, sizeof tiles); }

static inline void load(int t, const void* base, long stride) {
  Tile& tile = configured(t);
  memset(tile.bytes, 0, sizeof tile.bytes);
  for (int r = 0; r < tile.rows; r++)
    memcpy(tile.bytes[r], static_cast<const char*>(base) + r * stride, size_t(tile.row_bytes));
}

static inline void store(int t, void* base, long stride) {
  const Tile& tile = configured(t);
  for (int r = 0; r < tile.rows; r++)
    memcpy(static_cast<char*>(base) + r * stride, tile.bytes[r], size_t(tile.row_bytes));
}

static inline void zero(int t) { memset(configured(t).bytes, 0, sizeof tiles[t].bytes); }

static inline float of_bf16(const unsigned char* from) {
  uint16_t half;
  memcpy(&half, from, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Products of even k and of odd k are two sums, which are added to the result at the end.
static inline void products_of_bf16(int to, int left, int right) {
  Tile &c = configured(to), &a = configured(left), &b = configured(right);
  require(c.rows == a.rows && a.row_bytes == 4 * b.rows && c.row_bytes == b.row_bytes, "tiles do not fit");
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.row_bytes / 4; n++) {
      float sums[2] = {0.0f, 0.0f}, old;
      for (int k = 0; k < b.rows; k++)
        for (int i = 0; i < 2; i++)
          sums[i] = __builtin_fmaf(of_bf16(&a.bytes[m][4 * k + 2 * i]), of_bf16(&b.bytes[k][4 * n + 2 * i]), sums[i]);
      memcpy(&old, &c.bytes[m][4 * n], 4);
      old += sums[0] + sums[1];
      memcpy(&c.bytes[m][4 * n], &old, 4);
    }
}

}  // namespace soft_amx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) soft_amx::configure(config)
#define _tile_release() soft_amx::release()
#define _tile_loadd(t, base, stride) soft_amx::load(t, base, long(stride))
#define _tile_stored(t, base, stride) soft_amx::store(t, base, long(stride))
#define _tile_zero(t) soft_amx::zero(t)
#define _tile_dpbf16ps(to, left, right) soft_amx::products_of_bf16(to, left, right)
