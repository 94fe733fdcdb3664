// int8_matmul of one instruction set: compiled once for each, into namespace qf::QF_ISA. See int8_matmul.h.
#include "int8_matmul.h"

#if defined(__AMX_INT8__)
#include "int8_tiles_amx.h"
#else
#include "int8_tiles_simd.h"
#endif

#include "int8_matmul_pack.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {
namespace {

constexpr int kColumns = kStepKeys;
constexpr int kBlockPanels = kColumns / kInt8Panel;
constexpr int kTaskRows = 8 * kRowBlock;  // that meet a chunk of packed columns while it is in the cache
static_assert(kInt8KeyStep % kInt8Panel == 0, "columns are padded to whole panels");

int64_t chunk_bytes() { return kBlockPanels * panel_bytes_of(kDepth); }
int64_t block_bytes(int64_t k) { return ceil_div(k, kDepth) * chunk_bytes(); }

// A task's memory: sums of all its rows, the products of a row block, a row block of a.
constexpr int64_t kSumBytes = int64_t(kTaskRows) * kColumns * 4;
constexpr int64_t kProductBytes = int64_t(kRowBlock) * kScoreStride;
int64_t scratch_bytes() { return kSumBytes + kProductBytes + int64_t(kRowBlock) * kRowStride * sizeof(Integer); }

int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

void pack(const QfLinearParams& p, int64_t first, char* block) {
  const int columns = smaller(p.n - first, kColumns), padded = int(round_up(columns, kInt8KeyStep));
  for (int64_t k0 = 0; k0 < p.k; k0 += kDepth, block += chunk_bytes()) {
    const int depth = smaller(p.k - k0, kDepth);
    for (int c = 0; c < padded; c += kInt8Panel)
      pack_panel(p, first + c, smaller(columns - c, kInt8Panel), k0, depth,
                 block + c / kInt8Panel * panel_bytes_of(depth));
  }
}

// sums[r][c] += products[r][c], or = for the first chunk.
void add_products(int32_t* sums, const char* products, int rows, int columns, bool first) {
  using Product = decltype(Integer(0) * Integer(0));  // int, or float where integers travel as floats
  for (int r = 0; r < rows; r++, sums += kColumns, products += kScoreStride) {
    const Product* row = reinterpret_cast<const Product*>(products);
    if (first) {
      for (int c = 0; c < columns; c++) sums[c] = int32_t(row[c]);
    } else {
      for (int c = 0; c < columns; c++) sums[c] += int32_t(row[c]);
    }
  }
}

// Scale and bias of a task's columns.
struct Columns {
  float scale[kColumns], bias[kColumns];
  Columns(const QfLinearParams& p, int64_t first, int count) {
    for (int c = 0; c < count; c++) {
      scale[c] = p.w_scale ? p.w_scale[(first + c) * p.w_scale_stride] : 1.0f;
      bias[c] = p.bias ? static_cast<const float*>(p.bias)[first + c] : 0.0f;
    }
  }
};

// fma(float(sum) * x_scale, w_scale, bias): csrc/gemm/epilogue.cuh says the same for the GPU.
void store_sums(const QfLinearParams& p, int64_t row, int64_t first, const int32_t* sums, int count,
                const Columns& columns) {
  const int64_t offset = row * p.out_stride_m + first;
  if (p.out_dtype == QF_I32) {
    memcpy(static_cast<int32_t*>(p.out) + offset, sums, size_t(count) * 4);
    return;
  }
  const float x_scale = p.x_scale ? p.x_scale[row * p.x_scale_stride] : 1.0f;
  float values[kColumns];
  for (int c = 0; c < count; c++)
    values[c] = __builtin_fmaf(float(sums[c]) * x_scale, columns.scale[c], columns.bias[c]);
  store_row(static_cast<char*>(p.out) + offset * element_bytes(p.out_dtype), values, p.out_dtype, count);
}

void multiply(const QfLinearParams& p, int64_t row, int64_t column, const char* block, char* scratch) {
  const TileSession session;
  int32_t* const sums = reinterpret_cast<int32_t*>(scratch);
  char* const products = scratch + kSumBytes;
  Integer* const packed = reinterpret_cast<Integer*>(products + kProductBytes);
  const int rows = smaller(p.m - row, kTaskRows), columns = smaller(p.n - column, kColumns);
  const int padded = int(round_up(columns, kInt8KeyStep));
  if (p.k == 0) memset(sums, 0, size_t(rows) * kColumns * 4);
  for (int64_t k0 = 0; k0 < p.k; k0 += kDepth, block += chunk_bytes()) {
    const int depth = smaller(p.k - k0, kDepth);
    for (int r = 0; r < rows; r += kRowBlock) {
      const int count = smaller(rows - r, kRowBlock);
      pack_rows(p, row + r, count, k0, depth, packed);
      score_block(session, packed, kRowStride, count, block, panel_bytes_of(depth), groups_of(depth), padded, products);
      add_products(sums + int64_t(r) * kColumns, products, count, columns, k0 == 0);
    }
  }
  const Columns scales(p, column, columns);
  for (int r = 0; r < rows; r++) store_sums(p, row + r, column, sums + int64_t(r) * kColumns, columns, scales);
}

}  // namespace

extern const Int8MatmulKernel int8_matmul_kernel = {kTaskRows, kColumns, block_bytes, scratch_bytes, pack, multiply};

}  // namespace QF_ISA
}  // namespace qf
