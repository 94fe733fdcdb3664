// Blocks of linear layers, of one instruction set: compiled once for each, into namespace qf::QF_ISA. See linear.h.
#include "interrupt.h"
#include "linear.h"
#include "linear_end.h"
#include "linear_pack.h"
#include "linear_tile.h"
#include "scratch.h"

namespace qf {
namespace QF_ISA {
namespace {

constexpr int kMostRows = kLanes == 16 ? 192 : 96;
constexpr int kMostColumns = kLanes == 16 ? 256 : 128;
constexpr int kDepth = 256;           // of a chunk of k
constexpr int kPitch = kDepth + 16;   // between packed rows of x: not a power of two
static_assert(kMostRows % kMaxRows == 0 && kMostColumns % kPanel == 0, "blocks are whole tiles");

// A task's memory. Rows of sums are as long as the columns in whole panels.
struct Scratch {
  int64_t width;
  float *sums[2], *x, *w, *bias[2], *spare;
  size_t bytes;

  Scratch(void* base, int rows, int columns, int products) : width(round_up(columns, kPanel)) {
    FloatArena arena(base);
    x = arena.take(int64_t(rows) * kPitch);
    w = arena.take(kDepth * width);
    spare = arena.take(width);
    for (int i = 0; i < products; i++) {
      sums[i] = arena.take(rows * width);
      bias[i] = arena.take(width);
    }
    bytes = arena.used();
  }
};

int64_t scratch_bytes(int rows, int columns, int products) {
  return int64_t(Scratch(nullptr, rows, columns, products).bytes);
}

int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

// w[k0 .. +depth][first .. +columns] in panels.
void pack_w(const Matrix& w, int32_t dtype, int64_t k0, int depth, int64_t first, int columns, float* packed) {
  for (int c = 0; c < columns; c += kPanel, packed += int64_t(kDepth) * kPanel)
    pack_block(w, dtype, k0, depth, first + c, smaller(columns - c, kPanel), packed, kPanel);
}

// sums (+)= packed x times packed w.
void multiply_chunk(const LinearBlock& block, const Scratch& s, float* sums, int depth, bool first) {
  const float* panel = s.w;
  for (int c = 0; c < block.columns; c += kPanel, panel += int64_t(kDepth) * kPanel) {
    const int vectors = int(ceil_div(smaller(block.columns - c, kPanel), kLanes));
    product<FloatDots>(vectors, block.rows, s.x, kPitch, panel, sums + c, s.width, depth, first);
  }
}

void end_rows(const QfLinearParams& p, const LinearBlock& block, const Scratch& s, int products) {
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

int multiply(const LinearCall& call, const LinearBlock& block, void* scratch) {
  const QfLinearParams& p = call.p;
  const int products = p.activation == QF_SWIGLU ? 2 : 1;
  const Scratch s(scratch, block.rows, block.columns, products);
  const Matrix weights[2] = {{p.w, p.w_stride_k, p.w_stride_n}, {p.up, p.up_stride_k, p.up_stride_n}};
  const void* terms[2] = {p.x, call.second_x};
  for (int i = 0; i < products && p.k == 0; i++) memset(s.sums[i], 0, size_t(block.rows * s.width) * 4);
  for (int term = 0; term < 2 && terms[term]; term++) {
    const Matrix x = {terms[term], p.x_stride_m, p.x_stride_k};
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
      if (interrupted()) return QF_INTERRUPTED;
      const int depth = smaller(p.k - k0, kDepth);
      pack_block(x, p.dtype, block.row, block.rows, k0, depth, s.x, kPitch);
      for (int i = 0; i < products; i++) {
        pack_w(weights[term + i], p.dtype, k0, depth, block.column, block.columns, s.w);
        multiply_chunk(block, s, s.sums[i], depth, term == 0 && k0 == 0);
      }
    }
  }
  end_rows(p, block, s, products);
  return QF_OK;
}

}  // namespace

extern const LinearKernel linear_floats = {kMaxRows, kMostRows, kPanel, kMostColumns, scratch_bytes, multiply};

}  // namespace QF_ISA
}  // namespace qf
