// K and V tiles copied into float32 scratch in the order the matrix product reads them.
#pragma once

#include "kv_rows.h"
#include "multiply.h"
#include "rows.h"
#include "sequence.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

// Key `key`, stored at `row`, as float32, rotated: in place when it already is, else in `row_buffer`.
static inline const float* key_row(const QfAttnParams& p, const Sequence& s, int64_t key, const KvRows& k,
                                   const char* row, float scale, float* row_buffer) {
  if (!rotates_keys(p)) return k.floats(row, scale, row_buffer);
  load_row(row_buffer, row, p.dtype, p.head_dim);
  rotate_row(row_buffer, p.rope, key_position(p, s, key));
  return row_buffer;
}

// K[first, first + count) transposed: panels of kPanel keys, each [head_dim][kPanel]; keys past the end are zero.
// `row_buffer` holds kLanes rows of round_up(head_dim, kLanes).
static inline void pack_keys(const QfAttnParams& p, const Sequence& s, int64_t first, int64_t count, int64_t head,
                             float* row_buffer, float* packed) {
  const int dim = p.head_dim;
  const int64_t pitch = round_up(dim, kLanes);
  const KvRows k = key_rows(p, s, head);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int keys = int(count - j < kLanes ? count - j : kLanes);
    const float* rows[kLanes];
    k.each(first + j, keys, [&](int i, const char* row, float scale) {
      rows[i] = key_row(p, s, first + j + i, k, row, scale, row_buffer + i * pitch);
    });
    float* column = packed + j / kPanel * kPanel * dim + j % kPanel;
    for (int d = 0; d < dim; d += kLanes) {
      const int n = dim - d < kLanes ? dim - d : kLanes;
      Vec block[kLanes];
      if (keys == kLanes && n == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) block[i] = load(rows[i] + d);
      } else {
        for (int i = 0; i < kLanes; i++) block[i] = i < keys ? load_part(rows[i] + d, n) : zero();
      }
      transpose(block);
      if (n == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) store(column + (d + i) * kPanel, block[i]);
      } else {
        for (int i = 0; i < n; i++) store(column + (d + i) * kPanel, block[i]);
      }
    }
  }
  // The last panel's missing keys: the product reads whole panels.
  const int64_t filled = round_up(count, kLanes), end = round_up(count, kPanel);
  if (filled == end) return;
  float* panel = packed + (end - kPanel) * dim;
  for (int d = 0; d < dim; d++)
    for (int64_t j = filled % kPanel; j < kPanel; j += kLanes) store(panel + d * kPanel + j, zero());
}

// V[first, first + count) in panels of kPanel channels, each [kTile rows][panel width], channels padded with zeros to
// whole vectors. `rows` is the pitch of a panel in rows. `row_buffer` holds one padded row. Returns whether all is
// finite.
static inline bool pack_values(const QfAttnParams& p, const Sequence& s, int64_t first, int64_t count, int64_t head,
                               int64_t rows, float* row_buffer, float* packed) {
  const int dim = p.head_dim;
  const int64_t padded = round_up(dim, kLanes);
  FiniteCheck check;
  const KvRows v = value_rows(p, s, head);
  v.each(first, int(count), [&](int j, const char* place, float scale) {
    const float* row = v.floats(place, scale, row_buffer);
    for (int64_t start = 0; start < padded; start += kPanel) {
      const int64_t width = padded - start < kPanel ? padded - start : kPanel;
      float* destination = packed + start * rows + j * width;
      for (int64_t d = start; d < start + width; d += kLanes) {
        const Vec x = d + kLanes <= dim ? load(row + d) : load_part(row + d, int(dim - d));
        check.add(x);
        store(destination + d - start, x);
      }
    }
  });
  return check.finite();
}

}  // namespace QF_ISA
}  // namespace qf
