// A block of a linear layer: x and w are packed a chunk of k at a time and multiplied, then its rows go through the
// epilogue. See linear.h.
#pragma once

#include "interrupt.h"
#include "linear.h"
#include "linear_end.h"
#include "linear_few.h"
#include "linear_pack.h"
#if defined(__AMX_BF16__)
#include "linear_tiles_amx.h"
#else
#include "linear_tile.h"
#endif
#include "scratch.h"

namespace qf {
namespace QF_ISA {

// The sums of a block and x of a chunk: 610 KB on AVX-512, 210 KB elsewhere, which a core's own cache holds; a panel of
// w, 32 or 8 KB, fits the first level.
constexpr int kMostRows = kLanes == 16 ? 384 : 192;
constexpr int kMostColumns = kLanes == 16 ? 256 : 128;
constexpr int kChunkWords = 128;
constexpr int kRowPitch = kChunkWords + 16;  // between packed rows of x: not a power of two
static_assert(kMostRows % kRowStep == 0 && kMostColumns % kPanel == 0, "blocks are whole tiles");

// A task's memory. Rows of sums are whole panels.
struct BlockScratch {
  int64_t width;
  float *sums[2], *x, *w, *bias[2], *spare;
  size_t bytes;

  BlockScratch(void* base, int rows, int columns, int products) : width(round_up(columns, kPanel)) {
    FloatArena arena(base);
    x = arena.take(int64_t(rows) * kRowPitch);
    w = arena.take(kChunkWords * kPanel);
    spare = arena.take(width);
    for (int i = 0; i < products; i++) {
      sums[i] = arena.take(rows * width);
      bias[i] = arena.take(width);
    }
    bytes = arena.used();
  }
};

static int64_t block_scratch_bytes(int rows, int columns, int products) {
  return int64_t(BlockScratch(nullptr, rows, columns, products).bytes);
}

// A weight in memory; one of the strides is 1.
template <class Words>
struct Weight {
  using Number = typename Words::Number;
  const Number* data;
  int64_t k_stride, column_stride;

  const Number* at(int64_t k, int64_t column) const { return data + k * k_stride + column * column_stride; }
};

// A panel of a weight, unpacked.
struct Panel {
  int64_t k0;
  int depth;
  int64_t column;
  int columns;
};

// What is prefetched of the next panel: while this one is packed, and with each step of its product.
struct NextPanel {
  PackAhead packing = {0, 0};
  LinesAhead multiplying;

  // The product prefetches one line with each of its `steps`, the packing does so for the runs left over.
  template <class Words>
  NextPanel(const Weight<Words>& w, const Panel& here, const Panel& next, int64_t steps) {
    if (next.depth <= 0 || next.columns <= 0) return;
    constexpr int64_t kBytes = sizeof(typename Words::Number);
    const bool along_k = w.column_stride != 1;
    const int64_t runs = along_k ? next.columns : next.depth, stride = along_k ? w.column_stride : w.k_stride;
    const int64_t bytes = (along_k ? next.depth : next.columns) * kBytes;
    const int64_t later = steps / ceil_div(bytes, LinesAhead::kLine);
    const int64_t packed = later < runs ? round_up(runs - later, along_k ? kLanes : Words::kPack) : 0;
    const auto* from = w.at(next.k0, next.column);
    packing = {from - w.at(here.k0, here.column), int(packed)};
    if (packed < runs) multiplying = {from + packed * stride, stride * kBytes, int(runs - packed), bytes};
  }
};

// sums (+)= packed x times w[k0 .. +depth], which is packed panel by panel.
template <class Words>
static void multiply_chunk(const LinearBlock& block, const BlockScratch& s, const Weight<Words>& w, int64_t k0,
                           int64_t k, float* sums, bool first, LinesAhead& after) {
  constexpr int kDepth = kChunkWords * Words::kPack;
  const auto panel_at = [&](int64_t from, int c) {
    return Panel{from, smaller(k - from, kDepth), block.column + c, smaller(block.columns - c, kPanel)};
  };
  for (int c = 0; c < block.columns; c += kPanel) {
    const Panel here = panel_at(k0, c);
    const int words = int(ceil_div(here.depth, Words::kPack));
    const bool last = c + kPanel >= block.columns;
    NextPanel next(w, here, last ? panel_at(k0 + here.depth, 0) : panel_at(k0, c + kPanel),
                   product_steps(block.rows, here.columns, words));
    pack_panel<Words>(w.at(k0, here.column), w.k_stride, w.column_stride, here.columns, here.depth, s.w, next.packing);
    Wanted wanted = {next.multiplying, after};
    product<Words>(int(ceil_div(here.columns, kLanes)), block.rows, s.x, kRowPitch, s.w, sums + c, s.width, words,
                   first, wanted);
  }
}

// The same for few rows, with w read in place.
template <class Words>
static void multiply_chunk_of_few(const LinearBlock& block, const BlockScratch& s, const Weight<Words>& w, int64_t k0,
                                  int64_t k, float* sums, bool first) {
  const int depth = smaller(k - k0, kChunkWords * Words::kPack);
  FewRows<Words>{s.x,     kRowPitch, w.at(k0, block.column), w.k_stride, w.column_stride, block.columns, depth, sums,
                 s.width, first}
      .multiply(block.rows);
}

static void end_rows(const QfLinearParams& p, const LinearBlock& block, const BlockScratch& s, int products) {
  const void* const biases[2] = {p.bias, p.up_bias};
  for (int i = 0; i < products; i++)
    if (biases[i]) load_bias(s.bias[i], biases[i], p.bias_dtype, block.column, block.columns);
  for (int r = 0; r < block.rows; r++) {
    float* rows[2] = {};
    for (int i = 0; i < products; i++) {
      rows[i] = s.sums[i] + r * s.width;
      if (!biases[i]) continue;
      for (int c = 0; c < block.columns; c += kLanes) store(rows[i] + c, load(rows[i] + c) + load(s.bias[i] + c));
    }
    end_row(p, block.row + r, block.column, block.columns, rows[0], rows[1], s.spare);
  }
}

// What a block reads or writes after the chunk at k0: x of the next one or, after the last, its part of out.
template <class Words>
static LinesAhead lines_after(const QfLinearParams& p, const LinearBlock& block, const typename Words::Number* x,
                              int64_t k0) {
  constexpr int kBytes = sizeof(typename Words::Number), kDepth = kChunkWords * Words::kPack;
  const int64_t next = k0 + kDepth;
  if (next >= p.k) {
    const int64_t bytes = element_bytes(p.out_dtype), first = block.row * p.out_stride_m + block.column;
    return {static_cast<const char*>(p.out) + first * bytes, p.out_stride_m * bytes, block.rows, block.columns * bytes};
  }
  x += next * p.x_stride_k;
  const int depth = smaller(p.k - next, kDepth);
  if (p.x_stride_k == 1) return {x, p.x_stride_m * kBytes, block.rows, depth * kBytes};
  return {x, p.x_stride_k * kBytes, depth, block.rows * kBytes};
}

template <class Words>
static int multiply_block(const LinearCall& call, const LinearBlock& block, void* scratch) {
  constexpr int kDepth = kChunkWords * Words::kPack;
  const QfLinearParams& p = call.p;
  const int products = p.activation == QF_SWIGLU ? 2 : 1;
  const BlockScratch s(scratch, block.rows, block.columns, products);
  using Number = typename Words::Number;
  const Weight<Words> weights[2] = {{static_cast<const Number*>(p.w), p.w_stride_k, p.w_stride_n},
                                    {static_cast<const Number*>(p.up), p.up_stride_k, p.up_stride_n}};
  const void* terms[2] = {p.x, call.second_x};
  for (int i = 0; i < products && p.k == 0; i++) memset(s.sums[i], 0, size_t(block.rows * s.width) * 4);
  for (int term = 0; term < 2 && terms[term]; term++) {
    const auto* x = static_cast<const Number*>(terms[term]) + block.row * p.x_stride_m;
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
      if (interrupted()) return QF_INTERRUPTED;
      pack_x<Words>(x + k0 * p.x_stride_k, p.x_stride_m, p.x_stride_k, block.rows, smaller(p.k - k0, kDepth), s.x,
                    kRowPitch);
      LinesAhead after = lines_after<Words>(p, block, x, k0);
      for (int i = 0; i < products; i++) {
        const Weight<Words>& w = weights[term + i];
        const bool first = term == 0 && k0 == 0;
        if (are_few<Words>(block.rows, w.column_stride != 1)) {
          if constexpr (are_few<Words>(1, true)) multiply_chunk_of_few(block, s, w, k0, p.k, s.sums[i], first);
        } else {
          multiply_chunk(block, s, w, k0, p.k, s.sums[i], first, after);
        }
      }
    }
  }
  end_rows(p, block, s, products);
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
