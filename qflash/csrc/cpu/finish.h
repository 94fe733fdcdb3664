// From the accumulators of a row to its out and lse.
#pragma once

#include <math.h>

#include "denominator.h"
#include "pack.h"
#include "softmax.h"

namespace qf {
namespace QF_ISA {

static inline ScoreMap score_map(const QfAttnParams& p) {
  const float scale = fabsf(p.scale), factor = p.softcap != 0.0f ? kLog2e : scale * kLog2e;
  if (p.softcap != 0.0f) return {factor, -126.0f / factor, p.softcap, scale / p.softcap, 1.0f};
  return {factor, -126.0f / factor, 0.0f, 0.0f, scale};
}

// Writes out = o / l and lse = unit * m + ln l; a sink, one more logit, is added to l. A row that sees no key gives
// zeros and its sink, or -inf; one that sees keys whose scores are all -inf, and no sink, has l = 0 and gives NaN, as
// softmax does. o is overwritten.
static inline void finish_row(const QfAttnParams& p, const Sequence& s, int64_t head, int64_t query, float* o,
                              RowState state, const ScoreMap& map) {
  const KeyRange range = visible_keys(p, s, query);
  const bool sees = range.begin < range.end;
  const double sink = p.sinks ? double(p.sinks[head]) : -INFINITY;
  const Denominator total = denominator(double(state.m) * map.unit, state.l, sink);
  for (int d = 0; d < p.head_dim; d += kLanes) store(o + d, sees ? load(o + d) / broadcast(total.l) : zero());
  char* out = row_address(p.out, p.dtype, s.batch, s.first_q + query, head);
  store_row(out, o, p.dtype, p.head_dim);
  if (!p.lse) return;
  p.lse[s.batch * p.lse_stride_b + head * p.lse_stride_h + s.first_q + query] = float(sees ? total.lse : sink);
}

}  // namespace QF_ISA
}  // namespace qf
