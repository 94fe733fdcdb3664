// New tokens into pages, row by row. See kv_write.h.
#include "hadamard.h"
#include "kv_write.h"
#include "rounding.h"
#include "rows.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {
namespace {

// A token and head of a pool.
struct Slot {
  int64_t page, token, head;
};

char* address_of(const QfTensor& pool, int64_t bytes, const Slot& slot) {
  return static_cast<char*>(pool.data) + offset_of(pool, slot.page, slot.token, slot.head) * bytes;
}

// values and scale <- x[0, n), which is overwritten.
void quantize_row(const QfTensor& pool, const QfScales& scales, const Slot& slot, float* x, int n) {
  int8_t* values = reinterpret_cast<int8_t*>(address_of(pool, 1, slot));
  float* scale = scales.scale + slot.page * scales.stride_b + slot.head * scales.stride_h + slot.token;
  const uint32_t largest = largest_magnitude(x, n);
  if (largest >= kInfinityBits) {
    *scale = NAN;
    memset(values, 0, size_t(n));
    return;
  }
  const Scale of_row = scale_of_amplitude(number_of(largest));
  *scale = of_row.scale;
  for (int d = 0; d < n; d++) x[d] *= of_row.inverse;
  for (int d = 0; d < n; d++) values[d] = int8_t(int32_t((x[d] + kIntegers) - kIntegers));
}

void write_key(const QfKvWriteParams& p, const Slot& slot, const char* source, int64_t position) {
  const int n = p.head_dim;
  const bool integers = p.kv.kind == QF_KV_PAGES_INT8;
  if (!integers && !p.rope.cos) {
    memcpy(address_of(p.kv.k, element_bytes(p.dtype), slot), source, size_t(n * element_bytes(p.dtype)));
    return;
  }
  float row[kMaxHeadDim];
  load_row(row, source, p.dtype, n);
  rotate_row(row, p.rope, position);
  if (!integers) {
    store_row(address_of(p.kv.k, element_bytes(p.dtype), slot), row, p.dtype, n);
    return;
  }
  if (p.kv.k_mean)
    for (int d = 0; d < n; d++) row[d] -= p.kv.k_mean[slot.head * n + d];
  multiply_by_hadamard(row, n);
  quantize_row(p.kv.k, p.kv.k_scales, slot, row, n);
}

void write_value(const QfKvWriteParams& p, const Slot& slot, const char* source) {
  const int n = p.head_dim;
  if (p.kv.kind != QF_KV_PAGES_INT8) {
    memcpy(address_of(p.kv.v, element_bytes(p.dtype), slot), source, size_t(n * element_bytes(p.dtype)));
    return;
  }
  float row[kMaxHeadDim];
  load_row(row, source, p.dtype, n);
  quantize_row(p.kv.v, p.kv.v_scales, slot, row, n);
}

}  // namespace

void write_tokens(const QfKvWriteParams& p, const NewTokens& tokens) {
  const int32_t* table = p.kv.page_table + tokens.batch * p.kv.page_table_stride;
  const int32_t* positions = p.rope.positions_k;
  for (int64_t t = tokens.first; t < tokens.first + tokens.count; t++) {
    const int64_t place = tokens.place + t, row = tokens.first_row + t;
    const int64_t position = positions ? positions[tokens.batch * p.rope.stride_positions_k_b + row] : place;
    for (int64_t head = 0; head < p.kv_heads; head++) {
      const Slot slot{table[place / p.kv.page_size], place % p.kv.page_size, head};
      write_key(p, slot, row_address(p.k, p.dtype, tokens.batch, row, head), position);
      write_value(p, slot, row_address(p.v, p.dtype, tokens.batch, row, head));
    }
  }
}

}  // namespace QF_ISA
}  // namespace qf
