// qf_cpu_rope: positions are checked before anything is written; then rows are rotated on all threads.
#include "rope.h"

#include <algorithm>

#include "checks.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

constexpr int64_t kBlockElements = 1 << 15;  // worth a thread's while

TokenPositions positions_of(const QfRopeParams& p) {
  if (p.positions) return {p.positions, p.stride_positions_b, "positions"};
  if (p.rope.positions_k) return {p.rope.positions_k, p.rope.stride_positions_k_b, "rope.positions_k"};
  return {nullptr, 0, "the position of token"};
}

// Front ends reject these first, but a stored program bypasses them.
int check_shape(const QfRopeParams& p) {
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  if (p.rope.rotary_dim < 0 || p.rope.rotary_dim > p.head_dim || p.rope.rotary_dim % 2 != 0)
    return fail(QF_UNSUPPORTED, "rope.cos rotates %d channels; allowed: an even number up to %d, head_dim",
                p.rope.rotary_dim, p.head_dim);
  if (!p.rope.cos || !p.rope.sin) return fail(QF_UNSUPPORTED, "rope.cos or rope.sin is NULL; allowed: two tables");
  return QF_OK;
}

int check_positions(const QfRopeParams& p, const TokenPositions& positions) {
  const int64_t sequences = positions.stride_b == 0 ? std::min(p.batch, 1) : p.batch;
  // Without positions the last token bounds the rest.
  const int64_t first = positions.values ? 0 : std::max(p.length - 1, 0);
  for (int64_t b = 0; b < sequences; b++)
    for (int64_t t = first; t < p.length; t++)
      if (int status = check_position(positions.name, t, position_of(positions, b, t), p.rope)) return status;
  return QF_OK;
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_rope(const QfRopeParams* params, void*) {
  using namespace qf;
  const QfRopeParams& p = *params;
  if (int status = check_shape(p)) return status;
  const TokenPositions positions = positions_of(p);
  if (int status = check_positions(p, positions)) return status;
  Isa isa;
  if (int status = choose_isa(&isa)) return status;
  const int64_t rows = int64_t(p.batch) * p.length * p.heads;
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max(1, p.head_dim));
  auto task = [&, rotate = QF_PICK(isa, rope_rows)](int64_t i) {
    return rotate(p, positions, i * block, std::min(rows, (i + 1) * block));
  };
  return parallel_for(ceil_div(rows, block), p.num_threads, task);
}
