// AMX: eight tile registers of up to 16 rows of 64 bytes, and products of them.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#ifndef QF_ISA
#error "QF_ISA must name this object's instruction set"
#endif

namespace qf {
namespace QF_ISA {

constexpr int kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;

// Forces everything written to memory, including what `p` points to: GCC's tile instructions do not declare what they
// read.
static inline void settle(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Tile registers are configured for the lifetime of this object and released at its end. tmm6 and tmm7, the right
// operands, have all their rows; results and left operands, the others, have `rows`, and no memory beyond these is
// accessed.
class TileSession {
 public:
  explicit TileSession(int rows = kTileRows) {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.row_bytes[t] = kTileRowBytes;
      config.rows[t] = uint8_t(t < 6 ? rows : kTileRows);
    }
    settle(&config);
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

}  // namespace QF_ISA
}  // namespace qf
