// Blocks of x and w copied into float32 scratch in the order the product reads them.
#pragma once

#include "qflash.h"
#include "sizes.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

// Elements in memory, read as float32.
struct F32 {
  using Type = float;
  static Vec read(const Type* p) { return load(p); }
  static Vec read_part(const Type* p, int n) { return load_part(p, n); }
};
template <Vec (*kLoad)(const uint16_t*)>
struct Half {
  using Type = uint16_t;
  static Vec read(const Type* p) { return kLoad(p); }
  static Vec read_part(const Type* p, int n) {
    Type part[kLanes] = {};
    for (int i = 0; i < n; i++) part[i] = p[i];
    return kLoad(part);
  }
};
using F16 = Half<load_f16>;
using BF16 = Half<load_bf16>;

// to[r][c] = from[r][c]; columns are padded with zeros to whole vectors.
template <class Element>
static void copy_block(const typename Element::Type* from, int64_t stride, int rows, int columns, float* to,
                       int64_t pitch) {
  for (int r = 0; r < rows; r++, from += stride, to += pitch) {
    int c = 0;
    for (; c + kLanes <= columns; c += kLanes) store(to + c, Element::read(from + c));
    if (c < columns) store(to + c, Element::read_part(from + c, columns - c));
  }
}

// to[c][r] = from[r][c]; rows are padded with zeros to whole vectors.
template <class Element>
static void transpose_block(const typename Element::Type* from, int64_t stride, int rows, int columns, float* to,
                            int64_t pitch) {
  for (int r = 0; r < rows; r += kLanes, from += kLanes * stride, to += kLanes) {
    const int height = rows - r < kLanes ? rows - r : kLanes;
    for (int c = 0; c < columns; c += kLanes) {
      const int width = columns - c < kLanes ? columns - c : kLanes;
      Vec block[kLanes];
      if (height == kLanes && width == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) block[i] = Element::read(from + i * stride + c);
      } else {
        for (int i = 0; i < kLanes; i++)
          block[i] = i < height ? Element::read_part(from + i * stride + c, width) : zero();
      }
      transpose(block);
      if (width == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) store(to + (c + i) * pitch, block[i]);
      } else {
        for (int i = 0; i < width; i++) store(to + (c + i) * pitch, block[i]);
      }
    }
  }
}

// A matrix in memory; one of the strides is 1.
struct Matrix {
  const void* data;
  int64_t row_stride, column_stride;
};

template <class Element>
static inline void pack_elements(const Matrix& m, int64_t row, int rows, int64_t column, int columns, float* to,
                                 int64_t pitch) {
  const auto* from = static_cast<const typename Element::Type*>(m.data) + row * m.row_stride + column * m.column_stride;
  if (m.column_stride == 1)
    copy_block<Element>(from, m.row_stride, rows, columns, to, pitch);
  else
    transpose_block<Element>(from, m.column_stride, columns, rows, to, pitch);
}

// to[r][c] = m[row + r][column + c] as float32; columns are padded with zeros to whole vectors.
static inline void pack_block(const Matrix& m, int32_t dtype, int64_t row, int rows, int64_t column, int columns,
                              float* to, int64_t pitch) {
  if (dtype == QF_F32) return pack_elements<F32>(m, row, rows, column, columns, to, pitch);
  if (dtype == QF_F16) return pack_elements<F16>(m, row, rows, column, columns, to, pitch);
  pack_elements<BF16>(m, row, rows, column, columns, to, pitch);
}

}  // namespace QF_ISA
}  // namespace qf
