// Host side of quantization: what is launched for a QfQuantizeParams, and the workspace it needs. How a kernel is
// launched is the caller's: launch(kernel, blocks, arguments...), kQuantizeThreads threads and kQuantizeSharedBytes
// each.
#pragma once

#include "attn/quantize_kernel.cuh"
#include "attn/quantize_mean.cuh"

namespace qf {

constexpr int kQuantizeSharedBytes = kQuantizeThreads / 32 * kHeld * 4;  // reduce_team's scratch
constexpr int64_t kAmplitudeBlocks = 2048;                               // enough for any GPU, few enough for one slot

struct QuantizePlan {
  Unit unit;
  bool two_passes;
  Layout layout;
  Layout sums;  // of the pass over chunks that smoothing needs
  int64_t slots, chunks;
  int64_t slot_bytes, sum_bytes, finite_bytes;

  int64_t workspace_bytes() const { return slot_bytes + sum_bytes + finite_bytes; }
};

inline int64_t round_up16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

inline QuantizePlan plan_quantize(const QfQuantizeParams& p) {
  QuantizePlan plan{};
  const bool per_tensor = p.granularity == QF_PER_TENSOR;
  Layout& l = plan.layout;
  l.row_lanes = l.unit_lanes = row_lanes(p.head_dim);
  l.vector = vectorises8(p.x, p.values, p.head_dim, p.dtype == QF_F32 ? 4 : 2);
  l.rope_vector = l.vector && rotate_vectorises(p.rope);
  l.group = per_tensor ? (p.length > 0 ? p.length : 1) : p.group;
  l.groups = int(ceil_of(p.length, l.group));
  l.parts = 1;
  // A group is held whole where its tokens fit a block; its threads are as few as can hold it.
  const bool wide = p.head_dim > kWide;
  if (!per_tensor && !wide && l.group > 1)
    while (l.unit_lanes < kQuantizeThreads && l.unit_lanes / l.row_lanes * kHeld < l.group) l.unit_lanes *= 2;
  plan.two_passes = per_tensor || (l.group > 1 && (wide || l.unit_lanes / l.row_lanes * kHeld < l.group));
  if (plan.two_passes) {
    l.unit_lanes = l.row_lanes;
    l.parts = int(ceil_of(l.group, wide ? 1 : kHeld));
  }
  plan.unit = wide ? Unit::kWideToken : !plan.two_passes && l.group == 1 ? Unit::kToken : Unit::kGroup;
  deal(l, int64_t(l.groups) * l.parts, p.heads, plan.unit == Unit::kToken ? kHeld : 1);

  plan.slots = plan.two_passes ? (per_tensor ? 1 : int64_t(p.batch) * p.heads * l.groups) : 0;
  plan.slot_bytes = plan.slots * int64_t(sizeof(Slot));
  if (p.smooth) {
    plan.sums = l;
    plan.sums.unit_lanes = l.row_lanes;
    plan.chunks = ceil_of(p.length, kMeanChunk);
    deal(plan.sums, plan.chunks, p.heads, 1);
    const int64_t rows = int64_t(p.batch) * p.heads * plan.chunks;
    plan.sum_bytes = round_up16(rows * p.head_dim * int64_t(sizeof(float)));
    plan.finite_bytes = round_up16(rows * int64_t(sizeof(int32_t)));
  }
  return plan;
}

inline int check_quantize(const QfQuantizeParams& p) {
  if (p.struct_bytes != int32_t(sizeof(QfQuantizeParams))) return QF_BAD_ABI;
  if (p.head_dim < 1 || p.group < 1) return QF_UNSUPPORTED;
  if (p.granularity != QF_PER_TENSOR && !p.symmetric) return QF_UNSUPPORTED;
  if (p.head_dim > kWide && (p.rope.cos || p.lift)) return QF_UNSUPPORTED;
  return QF_OK;
}

// The passes over x, for a unit of work and with or without rope.
template <class Element, Unit kUnit, bool kRope, class Launch>
int launch_passes(const QfQuantizeParams& p, const QuantizePlan& plan, Slot* g_slots, Launch& launch) {
  const int64_t blocks = int64_t(plan.layout.tiles) * p.batch;
  if (!plan.two_passes)
    return launch(qf_quantize_kernel<Element, kUnit, kRope, Scales::kFound>, blocks, p, plan.layout, g_slots);
  if constexpr (kUnit == Unit::kToken) {
    return QF_UNSUPPORTED;  // tokens with scales of their own need no second pass
  } else {
    if (int status = launch(qf_quantize_clear_kernel, ceil_of(plan.slots, kQuantizeThreads), p, g_slots, plan.slots))
      return status;
    if (int status = launch(qf_quantize_amplitude_kernel<Element, kUnit, kRope>,
                            blocks < kAmplitudeBlocks ? blocks : kAmplitudeBlocks, p, plan.layout, g_slots))
      return status;
    return launch(qf_quantize_kernel<Element, kUnit, kRope, Scales::kGiven>, blocks, p, plan.layout, g_slots);
  }
}

template <class Element, bool kRope, class Launch>
int launch_units(const QfQuantizeParams& p, const QuantizePlan& plan, Slot* g_slots, Launch& launch) {
  if (plan.unit == Unit::kToken) return launch_passes<Element, Unit::kToken, kRope>(p, plan, g_slots, launch);
  return launch_passes<Element, Unit::kGroup, kRope>(p, plan, g_slots, launch);
}

// Everything a call needs, in order. Launches of 0 blocks are left out. kWideTokens: false leaves the kernels for
// head_dim above kWide uncompiled.
template <class Element, bool kWideTokens, class Launch>
int run_quantize(const QfQuantizeParams& p, Launch launch_some) {
  const QuantizePlan plan = plan_quantize(p);
  if (!fits(int64_t(plan.layout.groups) * plan.layout.parts, plan.layout, p.heads, p.batch)) return QF_UNSUPPORTED;
  if (plan.workspace_bytes() > 0 && (!p.workspace || p.workspace_bytes < plan.workspace_bytes())) return QF_NO_MEMORY;
  const auto launch = [&](auto* kernel, int64_t blocks, const auto&... arguments) {
    return blocks > 0 ? launch_some(kernel, blocks, arguments...) : int(QF_OK);
  };
  char* const workspace = static_cast<char*>(p.workspace);
  if (p.smooth) {
    const ChunkSums chunks = {reinterpret_cast<float*>(workspace + plan.slot_bytes),
                              reinterpret_cast<int32_t*>(workspace + plan.slot_bytes + plan.sum_bytes),
                              int(plan.chunks)};
    if (!fits(plan.chunks, plan.sums, p.heads, p.batch)) return QF_UNSUPPORTED;
    const int64_t channels = int64_t(p.batch) * p.heads * p.head_dim;
    auto* sum_kernel = !p.rope.cos               ? qf_quantize_sum_kernel<Element, Turns::kNone>
                       : plan.layout.rope_vector ? qf_quantize_sum_kernel<Element, Turns::kVectors>
                                                 : qf_quantize_sum_kernel<Element, Turns::kSingly>;
    if (int status = launch(sum_kernel, int64_t(plan.sums.tiles) * p.batch, p, plan.sums, chunks)) return status;
    if (int status = launch(qf_quantize_mean_kernel, ceil_of(channels, kQuantizeThreads), p, chunks)) return status;
  }
  Slot* const g_slots = reinterpret_cast<Slot*>(workspace);
  if (plan.unit == Unit::kWideToken) {
    if constexpr (kWideTokens) return launch_passes<Element, Unit::kWideToken, false>(p, plan, g_slots, launch);
    return QF_UNSUPPORTED;
  }
  return p.rope.cos ? launch_units<Element, true>(p, plan, g_slots, launch)
                    : launch_units<Element, false>(p, plan, g_slots, launch);
}

}  // namespace qf
