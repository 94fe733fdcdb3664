// A block of a linear layer: x and w are packed a chunk of k at a time and multiplied, then its rows end. See linear.h.
#pragma once

#include "interrupt.h"
#include "linear.h"
#include "linear_end.h"
#include "linear_pack.h"
#include "linear_tile.h"
#include "scratch.h"

namespace qf {
namespace QF_ISA {

// The sums of a block, x of a chunk and a panel of w: 470 KB on AVX-512, 190 KB elsewhere (with SwiGLU 660 and 240),
// which a core's own cache holds.
constexpr int kMostRows = kLanes == 16 ? 192 : 96;
constexpr int kMostColumns = kLanes == 16 ? 256 : 128;
constexpr int kChunkWords = 256;
constexpr int kRowPitch = kChunkWords + 16;  // between packed rows of x: not a power of two
static_assert(kMostRows % kMaxRows == 0 && kMostColumns % kPanel == 0, "blocks are whole tiles");

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
struct Weight {
  const void* data;
  int64_t k_stride, column_stride;
};

// sums (+)= packed x times w[k0 .. +depth], which is packed first, panel by panel.
template <class Words>
static void multiply_chunk(const LinearBlock& block, const BlockScratch& s, const Weight& weight, int64_t k0, int depth,
                           float* sums, bool first) {
  const auto* w = static_cast<const typename Words::Number*>(weight.data) + k0 * weight.k_stride +
                  block.column * weight.column_stride;
  const int words = int(ceil_div(depth, Words::kPack));
  for (int c = 0; c < block.columns; c += kPanel) {
    const int columns = smaller(block.columns - c, kPanel);
    pack_panel<Words>(w + c * weight.column_stride, weight.k_stride, weight.column_stride, columns, depth, s.w);
    product<Words>(int(ceil_div(columns, kLanes)), block.rows, s.x, kRowPitch, s.w, sums + c, s.width, words, first);
  }
}

static void end_rows(const QfLinearParams& p, const LinearBlock& block, const BlockScratch& s, int products) {
  load_bias(s.bias[0], p.bias, p.bias_dtype, block.column, block.columns);
  if (products == 2) load_bias(s.bias[1], p.up_bias, p.bias_dtype, block.column, block.columns);
  for (int r = 0; r < block.rows; r++) {
    float* rows[2] = {};
    for (int i = 0; i < products; i++) {
      rows[i] = s.sums[i] + r * s.width;
      for (int c = 0; c < block.columns; c += kLanes) store(rows[i] + c, load(rows[i] + c) + load(s.bias[i] + c));
    }
    end_row(p, block.row + r, block.column, block.columns, rows[0], rows[1], s.spare);
  }
}

template <class Words>
static int multiply_block(const LinearCall& call, const LinearBlock& block, void* scratch) {
  constexpr int kDepth = kChunkWords * Words::kPack;
  const QfLinearParams& p = call.p;
  const int products = p.activation == QF_SWIGLU ? 2 : 1;
  const BlockScratch s(scratch, block.rows, block.columns, products);
  const Weight weights[2] = {{p.w, p.w_stride_k, p.w_stride_n}, {p.up, p.up_stride_k, p.up_stride_n}};
  const void* terms[2] = {p.x, call.second_x};
  for (int i = 0; i < products && p.k == 0; i++) memset(s.sums[i], 0, size_t(block.rows * s.width) * 4);
  for (int term = 0; term < 2 && terms[term]; term++) {
    const auto* x = static_cast<const typename Words::Number*>(terms[term]) + block.row * p.x_stride_m;
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
      if (interrupted()) return QF_INTERRUPTED;
      const int depth = smaller(p.k - k0, kDepth);
      pack_x<Words>(x + k0 * p.x_stride_k, p.x_stride_m, p.x_stride_k, block.rows, depth, s.x, kRowPitch);
      for (int i = 0; i < products; i++)
        multiply_chunk<Words>(block, s, weights[term + i], k0, depth, s.sums[i], term == 0 && k0 == 0);
    }
  }
  end_rows(p, block, s, products);
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
