// Host side of quantization, for the library `quantize` and as a pass of others: fill a QfQuantizeParams, give it
// quantize_workspace() bytes, run_quantize().
#pragma once

#include "common/launch.cuh"
#include "kernels/quantize/quantize/kernel.cuh"
#include "kernels/quantize/quantize/mean.cuh"

namespace qf {

constexpr int kQuantizeSharedBytes = kQuantizeThreads / 32 * kMostPlaces * 4;  // reduce_team's scratch
constexpr int64_t kAmplitudeBlocks = 2048;  // enough to fill any GPU, few enough to share one slot

struct QuantizePasses {
  Unit unit;
  Moves moves;
  bool two_passes;
  Layout layout;
  Layout sums;    // of the pass over chunks that smoothing needs
  int64_t outer;  // units of a head
  int64_t slots, chunks;
  int64_t slot_bytes, sum_bytes, finite_bytes;

  int64_t workspace_bytes() const { return slot_bytes + sum_bytes + finite_bytes; }
};

inline int64_t round_up16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

inline QuantizePasses passes_of(const QfQuantizeParams& p) {
  QuantizePasses passes{};
  const bool per_tensor = p.granularity == QF_PER_TENSOR, wide = p.head_dim > kWide;
  Layout& l = passes.layout;
  l.row_lanes = l.unit_lanes = row_lanes(p.head_dim);
  const bool vectors = vectorises8(p.x, p.values, p.head_dim, p.dtype == QF_F32 ? 4 : 2);
  passes.moves = !vectors || (p.rope.cos && !rotate_vectorises(p.rope)) ? Moves::kSingly
                 : p.rope.cos                                           ? Moves::kRotated
                                                                        : Moves::kVectors;
  l.group = per_tensor ? (p.length > 0 ? p.length : 1) : p.group;
  l.scales = int(ceil_of(p.length, l.group));
  // A block holds a complete group if its tokens fit, however memory is read (a workspace must not depend on pointers);
  // it uses as few threads as can hold the group.
  const int places = passes.moves == Moves::kVectors ? kMostPlaces : kLeastPlaces;  // except for wide tokens
  const int64_t most = int64_t(kQuantizeThreads) / l.row_lanes * kLeastPlaces;
  passes.two_passes = per_tensor || (l.group > 1 && (wide || most < l.group));
  if (!passes.two_passes && l.group > 1)
    while (int64_t(l.unit_lanes) / l.row_lanes * places < l.group) l.unit_lanes *= 2;
  passes.unit = wide ? Unit::kWideToken : !passes.two_passes && l.group == 1 ? Unit::kToken : Unit::kGroup;
  if (passes.unit == Unit::kToken) l.group = places;
  l.parts = divider(passes.two_passes ? uint32_t(ceil_of(l.group, wide ? 1 : places)) : 1);
  passes.outer = ceil_of(p.length, l.group) * l.parts.divisor;
  deal(l, passes.outer, p.heads);

  passes.slots = passes.two_passes ? (per_tensor ? 1 : int64_t(p.batch) * p.heads * l.scales) : 0;
  passes.slot_bytes = passes.slots * int64_t(sizeof(Slot));
  if (p.smooth) {
    passes.sums = l;
    passes.sums.unit_lanes = l.row_lanes;
    passes.chunks = ceil_of(p.length, kMeanChunk);
    deal(passes.sums, passes.chunks, p.heads);
    const int64_t rows = int64_t(p.batch) * p.heads * passes.chunks;
    passes.sum_bytes = round_up16(rows * p.head_dim * int64_t(sizeof(float)));
    passes.finite_bytes = round_up16(rows * int64_t(sizeof(int32_t)));
  }
  return passes;
}

inline int check_quantize(const QfQuantizeParams& p) {
  if (p.struct_bytes != int32_t(sizeof(QfQuantizeParams))) return QF_BAD_ABI;
  if (p.head_dim < 1 || p.group < 1) return QF_UNSUPPORTED;
  if (p.granularity != QF_PER_TENSOR && !p.symmetric) return QF_UNSUPPORTED;
  if (p.head_dim > kWide && (p.rope.cos || p.q_dot_mean)) return QF_UNSUPPORTED;
  return QF_OK;
}

// Launches the passes over x, for one kind of unit and of memory access.
template <class Element, Unit kUnit, Moves kMoves, bool kLarge, class Launch>
int launch_passes(const QfQuantizeParams& p, const QuantizePasses& passes, Slot* g_slots, Launch& launch) {
  const int64_t blocks = tiles_of(passes.outer, passes.layout, p.heads) * p.batch;
  if (!passes.two_passes)
    return launch(qf_quantize_kernel<Element, kUnit, kMoves, Scales::kFound>, blocks, p, passes.layout, g_slots);
  if constexpr (kUnit == Unit::kToken || !kLarge) {
    return QF_UNSUPPORTED;  // tokens with their own scales need no second pass
  } else {
    if (int status =
            launch(qf_quantize_clear_kernel, ceil_of(passes.slots, kQuantizeThreads), p, g_slots, passes.slots))
      return status;
    if (int status = launch(qf_quantize_amplitude_kernel<Element, kUnit, kMoves>,
                            blocks < kAmplitudeBlocks ? blocks : kAmplitudeBlocks, p, passes.layout, g_slots))
      return status;
    return launch(qf_quantize_kernel<Element, kUnit, kMoves, Scales::kGiven>, blocks, p, passes.layout, g_slots);
  }
}

template <class Element, Moves kMoves, bool kLarge, class Launch>
int launch_units(const QfQuantizeParams& p, const QuantizePasses& passes, Slot* g_slots, Launch& launch) {
  if (passes.unit == Unit::kToken)
    return launch_passes<Element, Unit::kToken, kMoves, kLarge>(p, passes, g_slots, launch);
  if (passes.unit == Unit::kGroup)
    return launch_passes<Element, Unit::kGroup, kMoves, kLarge>(p, passes, g_slots, launch);
  if constexpr (kLarge && kMoves != Moves::kRotated)
    return launch_passes<Element, Unit::kWideToken, kMoves, kLarge>(p, passes, g_slots, launch);
  return QF_UNSUPPORTED;
}

// Bytes that run_quantize needs for these shapes and options; pointers are ignored.
inline int64_t quantize_workspace(const QfQuantizeParams& p) {
  return check_quantize(p) == QF_OK ? passes_of(p).workspace_bytes() : 0;
}

// All launches of a call, in order, on one stream. Launches of 0 blocks are skipped. kLarge = false: kernels for
// head_dim above kWide, and for scales of more tokens than a block holds, are not compiled.
template <class Element, bool kLarge = false>
int run_quantize(const QfQuantizeParams& p, cudaStream_t stream) {
  if (const int status = check_quantize(p)) return status;
  const QuantizePasses passes = passes_of(p);
  if (!fits(passes.outer, passes.layout, p.heads, p.batch)) return QF_UNSUPPORTED;
  if (passes.workspace_bytes() > 0 && (!p.workspace || p.workspace_bytes < passes.workspace_bytes()))
    return QF_NO_MEMORY;
  const auto launch = [&](auto* kernel, int64_t blocks, const auto&... arguments) -> int {
    if (blocks == 0) return QF_OK;
    return qf::launch({blocks, kQuantizeThreads, kQuantizeSharedBytes, stream}, kernel, arguments...);
  };
  char* const workspace = static_cast<char*>(p.workspace);
  if (p.smooth) {
    const ChunkSums chunks = {reinterpret_cast<float*>(workspace + passes.slot_bytes),
                              reinterpret_cast<int32_t*>(workspace + passes.slot_bytes + passes.sum_bytes),
                              int(passes.chunks)};
    if (!fits(passes.chunks, passes.sums, p.heads, p.batch)) return QF_UNSUPPORTED;
    const int64_t channels = int64_t(p.batch) * p.heads * p.head_dim;
    auto* sum_kernel = passes.moves == Moves::kVectors   ? qf_quantize_sum_kernel<Element, Moves::kVectors>
                       : passes.moves == Moves::kRotated ? qf_quantize_sum_kernel<Element, Moves::kRotated>
                                                         : qf_quantize_sum_kernel<Element, Moves::kSingly>;
    if (int status =
            launch(sum_kernel, tiles_of(passes.chunks, passes.sums, p.heads) * p.batch, p, passes.sums, chunks))
      return status;
    if (int status = launch(qf_quantize_mean_kernel, ceil_of(channels, kQuantizeThreads), p, chunks)) return status;
  }
  Slot* const g_slots = reinterpret_cast<Slot*>(workspace);
  switch (passes.moves) {
    case Moves::kVectors:
      return launch_units<Element, Moves::kVectors, kLarge>(p, passes, g_slots, launch);
    case Moves::kRotated:
      return launch_units<Element, Moves::kRotated, kLarge>(p, passes, g_slots, launch);
    default:
      return launch_units<Element, Moves::kSingly, kLarge>(p, passes, g_slots, launch);
  }
}

}  // namespace qf
