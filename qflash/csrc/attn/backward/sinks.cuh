// The gradient of sinks, after delta: dsinks[h] = -sum over the rows of head h of exp(sinks[h] - lse) delta.
//
// A sink is a key without a value: its weight exp(sink - lse) and dP = 0 give dS = -weight * delta; the gradient
// through lse, which delta includes, has the same form. A row that sees no key has its sink as lse and contributes
// nothing to O; with params.partial that lse indicates that it sees no key elsewhere, either. One block processes one
// head and adds in double, in an order that the problem alone fixes: no atomics, no workspace.
#pragma once

#include "attn/backward/delta.cuh"
#include "common/launch.cuh"
#include "reduce/block.cuh"

namespace qf {

constexpr int kSinkThreads = 512;

struct SinkTotal {
  double sum;
};

struct SinkTotalOfWarp {
  __device__ __forceinline__ SinkTotal operator()(const SinkTotal& mine, int width) const {
    return reduce_warp(mine, [](const SinkTotal& a, const SinkTotal& b) { return SinkTotal{a.sum + b.sum}; }, width);
  }
};

constexpr int kSinkSharedBytes = block_bytes<SinkTotal>();

// The contribution of row i. NaN in dout of a row that sees nothing reaches delta, and is left out here.
__device__ __forceinline__ float sink_share(const QfAttnBwdParams& params, const Mask& mask, float sink, int64_t at,
                                            int i) {
  const KeyRange keys = mask.visible(i);
  const float dlse = params.dlse ? params.dlse[at] : 0.0f;
  const float lse = params.fwd.lse[at];
  const bool sees = keys.begin < keys.end || (params.partial && lse != sink);
  const float delta = sees ? static_cast<const float*>(params.workspace)[at] : -dlse;
  return -sink_weight(sink, lse) * delta;
}

// The pass: block h processes head h. A sequence whose description is out of range makes the sums NaN.
__device__ __forceinline__ void write_sink_gradient(const QfAttnBwdParams& params, uint32_t* s_words) {
  const QfAttnParams& p = params.fwd;
  const int h = blockIdx.x;
  const float sink = p.sinks[h];
  const bool rows_fall = packed_rows_fall(p);
  SinkTotal total = {0.0};
  for (int b = 0; b < p.batch; ++b) {
    const Sequence seq = sequence_of(p, b, rows_fall);
    if (!seq.good && seq.owned > 0) total.sum += double(nan());
    if (!seq.good || sink == -infinity()) continue;  // no sink
    const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
    for (int i = threadIdx.x; i < seq.len_q; i += kSinkThreads)
      total.sum += double(sink_share(params, mask, sink, statistics_at(p, b, h, seq.q0, i), i));
  }
  total = reduce_block<false>(total, SinkTotalOfWarp{}, SinkTotal{0.0}, s_words);
  if (threadIdx.x == 0) params.dsinks[h] = float(total.sum);
}

// `kernel`: its __global__ function.
template <class Kernel>
int launch_sink_gradient(Kernel* kernel, const QfAttnBwdParams& params, void* stream) {
  if (!params.fwd.sinks || !params.dsinks || params.fwd.q_heads == 0) return QF_OK;
  const Launch how = {params.fwd.q_heads, kSinkThreads, kSinkSharedBytes, static_cast<cudaStream_t>(stream)};
  return launch(how, kernel, params);
}

}  // namespace qf
