// precision = int8 on the CPU: INT8 QK^T with smoothed keys, softmax in float32, PV in bfloat16 (AMX) or float32.
//
// The arithmetic is a contract (docs/numerics.md), which qflash/reference/int8.py repeats bit for bit up to the final
// sums:
//
//   1  q and k become float32 and are rotated; each product is rounded, then their sum (no fused multiply-add).
//   2  mean[d] = mean over a sequence's existing, finite keys of one key head: float32 sums over chunks of
//      kInt8MeanChunk keys, chunks added in float64. k loses its mean: softmax is unaffected, integers become finer.
//   3  Every row of q and of k gets a scale of its own, s = max|x| / 127, and integers round(x * (127 / max|x|)) to
//      nearest even, so within +-127. A row below kInt8NoAmplitude has scale 0; a nonfinite one has scale NaN.
//   4  dot = q . k in exact integers; u = dot * s_k; score in base 2 is t = u * (s_q * |scale| * log2 e), scale's sign
//      going into q. With softcap, t = softcap * log2 e * tanh((u * s_q * |scale| + bias) / softcap), where
//      bias = |scale| * (q . mean) restores what smoothing removed; without it bias only enters lse.
//   5  top = the largest t of the row so far, rounded up to an integer; weight = 2^(t - top) by a polynomial of degree
//      4, not below 2^-125. When top rises, sums are multiplied by a power of two, which is exact: results do not
//      depend on how the keys were cut into blocks, only the order of the float32 sums does.
//   6  out = sum(weight * v) / sum(weight); with AMX both weight and v are rounded to bfloat16 first. lse = bias +
//      ln 2 * (top + log2 sum(weight)).
//
// A nonfinite value in a q row makes that row NaN; in a key, it makes every row NaN that sees the key. A nonfinite
// value of v is kept out of the sums and added at the end to the rows that see it, so nothing masked leaks.
#pragma once

#include <stdint.h>

#include "qflash.h"
#include "sequence.h"
#include "sizes.h"

namespace qf {

constexpr int kInt8Panel = 16;                                  // keys side by side in a packed panel
constexpr int kInt8KeyStep = 32;                                // packed keys are padded to this
constexpr int kInt8KeyBlock = 128;                              // keys of one packing task
constexpr int kInt8MeanChunk = 64;                              // see 2 above
constexpr float kInt8NoAmplitude = 7.8886090522101180541e-31f;  // 2^-100

// The packed keys and values of one key head of one sequence.
struct Int8Head {
  int64_t kv_head;
  char* keys;          // panels of kInt8Panel keys, Int8Kernel::panel_bytes each
  char* values;        // Int8Kernel::value_bytes per key
  float* key_scales;   // [padded keys]
  const float* mean;   // [kMaxHeadDim], zeros past head_dim
  uint8_t* nonfinite;  // [blocks of kInt8KeyBlock keys]: 1 where some v is nonfinite
};

// A row block's share of the keys: sums that are not divided yet, stored until the other shares are done.
struct Int8Partial {
  float* out;    // [rows, value width], not divided yet
  float* top;    // [rows]
  float* total;  // [rows]
};

// What each instruction set defines. A row r of a key head is query r / group, query head r % group of that head.
struct Int8Kernel {
  int32_t row_block;  // rows per attend()
  int64_t (*panel_bytes)(int head_dim);
  int64_t (*value_bytes)(int head_dim);
  int (*value_width)(int head_dim);

  // sum[0, head_dim) over the finite keys of [first, last), and their number.
  int32_t (*sum_keys)(const QfAttnParams& p, const Sequence& s, int64_t kv_head, int64_t first, int64_t last,
                      float* sum);
  // Smooths, quantizes and packs keys, and packs values, of block `block`.
  void (*pack_block)(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t block);
  // Rows [first_row, first_row + rows) over the keys of `share` that they see; writes out and lse, or `partial`.
  int (*attend)(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first_row, int rows,
                KeyRange share, const Int8Partial* partial);
  // Merges the shares of a row block and writes out and lse.
  int (*merge)(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first_row, int rows,
               const Int8Partial* partials, int64_t count);
};

namespace generic {
extern const Int8Kernel int8_kernel;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Int8Kernel int8_kernel;
}
namespace avx512 {
extern const Int8Kernel int8_kernel;
}
namespace amx {
extern const Int8Kernel int8_kernel;
}
#endif

}  // namespace qf
