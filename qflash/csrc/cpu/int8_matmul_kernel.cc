// int8_matmul of one instruction set: compiled once for each, into namespace qf::QF_ISA. See int8_matmul.h.
#include "int8_matmul.h"

#if defined(__AMX_INT8__)
#include "int8_tiles_amx.h"
#else
#include "int8_tiles_simd.h"
#endif

#include "int8_matmul_pack.h"
#include "linear_end.h"

namespace qf {
namespace QF_ISA {
namespace {

constexpr int kColumns = kStepKeys;
constexpr int kBlockPanels = kColumns / kInt8Panel;
constexpr int kTaskRows = 8 * kRowBlock;  // that use a chunk of packed columns while it is in the cache
static_assert(kInt8KeyStep % kInt8Panel == 0, "columns are padded to whole panels");

int products_of(const QfLinearParams& p) { return p.activation == QF_SWIGLU ? 2 : 1; }

int64_t chunk_bytes() { return kBlockPanels * panel_bytes_of(kDepth); }
int64_t weight_bytes(int64_t k) { return ceil_div(k, kDepth) * chunk_bytes(); }
int64_t block_bytes(const QfLinearParams& p) { return products_of(p) * weight_bytes(p.k); }

// A task's memory: sums of all its rows, for each weight; the products of a row block; a row block of a; and, where
// nothing is packed for it, a chunk of each weight.
constexpr int64_t kSumBytes = int64_t(kTaskRows) * kColumns * 4;
constexpr int64_t kProductBytes = int64_t(kRowBlock) * kScoreStride;
constexpr int64_t kRowsBytes = int64_t(kRowBlock) * kRowStride * sizeof(Integer);
int64_t scratch_bytes(const QfLinearParams& p) {
  return products_of(p) * (kSumBytes + chunk_bytes()) + kProductBytes + kRowsBytes;
}

int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

// Values [k0, k0 + kDepth) of the columns [first, first + kColumns) of weight i, as many of both as exist.
void pack_chunk(const QfLinearParams& p, int i, int64_t first, int64_t k0, char* chunk) {
  const Int8Weight weights[2] = {{static_cast<const int8_t*>(p.w), p.w_stride_k, p.w_stride_n},
                                 {static_cast<const int8_t*>(p.up), p.up_stride_k, p.up_stride_n}};
  const int columns = smaller(p.n - first, kColumns), depth = smaller(p.k - k0, kDepth);
  for (int c = 0; c < round_up(columns, kInt8KeyStep); c += kInt8Panel, chunk += panel_bytes_of(depth))
    pack_panel(weights[i], first + c, smaller(columns - c, kInt8Panel), k0, depth, chunk);
}

void pack(const QfLinearParams& p, int64_t first, char* block) {
  for (int i = 0; i < products_of(p); i++)
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth, block += chunk_bytes()) pack_chunk(p, i, first, k0, block);
}

// sums[r][c] += products[r][c], or = for the first chunk.
void add_products(int32_t* sums, const char* products, int rows, int columns, bool first) {
  using Product = decltype(Integer(0) * Integer(0));  // int, or float where integers are stored as floats
  for (int r = 0; r < rows; r++, sums += kColumns, products += kScoreStride) {
    const Product* row = reinterpret_cast<const Product*>(products);
    if (first) {
      for (int c = 0; c < columns; c++) sums[c] = int32_t(row[c]);
    } else {
      for (int c = 0; c < columns; c++) sums[c] += int32_t(row[c]);
    }
  }
}

// Scale and bias of a task's columns, of one weight.
struct Columns {
  float scale[kColumns], bias[kColumns];

  void load(const float* scales, int64_t stride, const void* biases, int32_t bias_dtype, int64_t first, int count) {
    for (int c = 0; c < count; c++) scale[c] = scales ? scales[(first + c) * stride] : 1.0f;
    load_bias(bias, biases, bias_dtype, first, count);
  }

  // h <- fma(float(sum) * x_scale, w_scale, bias): as csrc/gemm/epilogue.cuh on the GPU.
  void apply(const int32_t* sums, float x_scale, float* h, int count) const {
    for (int c = 0; c < count; c++) h[c] = __builtin_fmaf(float(sums[c]) * x_scale, scale[c], bias[c]);
  }
};

// Epilogue: from the sums of a task to its block of out.
void end_rows(const QfLinearParams& p, int64_t row, int rows, int64_t first, int count, const int32_t* sums) {
  if (p.out_dtype == QF_I32) {
    for (int r = 0; r < rows; r++, sums += kColumns)
      memcpy(static_cast<int32_t*>(p.out) + (row + r) * p.out_stride_m + first, sums, size_t(count) * 4);
    return;
  }
  Columns of_w, of_up;
  of_w.load(p.w_scale, p.w_scale_stride, p.bias, p.bias_dtype, first, count);
  const bool two = products_of(p) == 2;
  if (two) of_up.load(p.up_scale, p.up_scale_stride, p.up_bias, p.bias_dtype, first, count);
  float h[kColumns], u[kColumns], spare[kColumns];
  for (int r = 0; r < rows; r++, sums += kColumns) {
    const float x_scale = p.x_scale ? p.x_scale[(row + r) * p.x_scale_stride] : 1.0f;
    of_w.apply(sums, x_scale, h, count);
    if (two) of_up.apply(sums + kSumBytes / 4, x_scale, u, count);
    end_row(p, row + r, first, count, h, u, spare);
  }
}

void multiply(const QfLinearParams& p, int64_t row, int64_t column, const char* block, char* scratch) {
  const TileSession session;
  const int weights = products_of(p);
  int32_t* const sums = reinterpret_cast<int32_t*>(scratch);
  char* const products = scratch + weights * kSumBytes;
  Integer* const packed = reinterpret_cast<Integer*>(products + kProductBytes);
  char* const own_chunks = products + kProductBytes + kRowsBytes;
  const int rows = smaller(p.m - row, kTaskRows), columns = smaller(p.n - column, kColumns);
  const int padded = int(round_up(columns, kInt8KeyStep));
  if (p.k == 0) memset(sums, 0, size_t(weights * kSumBytes));
  for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    const int depth = smaller(p.k - k0, kDepth);
    const char* chunks[2];
    for (int i = 0; i < weights; i++) {
      chunks[i] = block ? block + i * weight_bytes(p.k) + k0 / kDepth * chunk_bytes() : own_chunks + i * chunk_bytes();
      if (!block) pack_chunk(p, i, column, k0, own_chunks + i * chunk_bytes());
    }
    for (int r = 0; r < rows; r += kRowBlock) {
      const int count = smaller(rows - r, kRowBlock);
      pack_rows(p, row + r, count, k0, depth, packed);
      for (int i = 0; i < weights; i++) {
        score_block(session, packed, kRowStride, count, chunks[i], panel_bytes_of(depth), groups_of(depth), padded,
                    products);
        add_products(sums + i * (kSumBytes / 4) + int64_t(r) * kColumns, products, count, columns, k0 == 0);
      }
    }
  }
  end_rows(p, row, rows, column, columns, sums);
}

}  // namespace

extern const Int8MatmulKernel int8_matmul_kernel = {kTaskRows, kColumns, block_bytes, scratch_bytes, pack, multiply};

}  // namespace QF_ISA
}  // namespace qf
