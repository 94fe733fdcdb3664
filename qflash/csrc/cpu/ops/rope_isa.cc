// rope of rows. They are rotated as attention rotates q and k, by the same function compiled in the same way, so that
// results in float32 are the same bit for bit.
#include "memory.h"
#include "rope.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {

int rope_rows(const QfRopeParams& p, const TokenPositions& positions, int64_t begin, int64_t end) {
  const int rotary_dim = p.rope.rotary_dim;
  const int64_t rotated_bytes = rotary_dim * element_bytes(p.dtype);
  const int64_t rest_bytes = p.head_dim * element_bytes(p.dtype) - rotated_bytes;
  const bool in_place = p.dtype == QF_F32;  // rows are rotated in out
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(rotary_dim) * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  for (int64_t row = begin; row < end; row++) {
    const int64_t h = row % p.heads, t = row / p.heads % p.length, b = row / p.heads / p.length;
    const char* x = row_address(p.x, p.dtype, b, t, h);
    char* out = row_address(p.out, p.dtype, b, t, h);
    float* rotated = in_place ? reinterpret_cast<float*>(out) : scratch;
    load_row(rotated, x, p.dtype, rotary_dim);
    rotate_row(rotated, p.rope, position_of(positions, b, t), p.inverse != 0);
    if (!in_place) store_row(out, rotated, p.dtype, rotary_dim);
    memcpy(out + rotated_bytes, x + rotated_bytes, size_t(rest_bytes));
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
