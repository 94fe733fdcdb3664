// Host side of `sm90_int8`: quantize, make tensor maps, attend.
#pragma once

#include "attn/entry.cuh"
#include "attn/kv.h"
#include "attn/plain_scores.h"
#include "kernels/attention/sm90_int8/kernel.cuh"
// Compiled for those tiles, too.
#include "attn/wgmma/relayout.cuh"
#include "kernels/attention/sm90_int8/workspace.h"
#include "kernels/quantize_kv/sm90_quantize/run.cuh"

namespace qf {
namespace sm90_int8 {

// q and K reach TMA through the quantization pass; so does V in E4M3.
template <class Config>
wgmma::Relayout relayout_of(const QfAttnParams& p, bool addressed) {
  return wgmma::Relayout(p, addressed, wgmma::Which(Config::kFp8 ? wgmma::kV + 1 : wgmma::kV));
}

template <class Config>
int64_t workspace_bytes(const QfAttnParams& p) {
  return Workspace<Config>(p, relayout_of<Config>(p, false).bytes).bytes;
}

// K and V are arrays, still to be quantized, or as written by quantize_kv.
inline bool serves(const QfAttnParams& p) {
  if (p.kv.kind == QF_KV_ARRAYS) return kv_is_arrays(p);
  return !p.cu_seqlens_q && is_kept(p.kv, p.precision, p.dtype, p.batch, p.k_len, p.kv_heads, p.head_dim);
}

template <class Kernel>
int attend(const QfAttnParams& p, cudaStream_t stream) {
  using Config = typename Kernel::Config;
  using Element = typename Config::Element;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr bool kFp8 = Config::kFp8;
  using wgmma::extents_of;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const bool kept = p.kv.kind == QF_KV_KEPT;
  if (!serves(p)) return QF_UNSUPPORTED;
  if (p.head_dim < 1 || p.head_dim > kHeadDim || p.head_dim % 8 != 0) return QF_UNSUPPORTED;
  TileSchedule schedule = wgmma::schedule_of(p, Config::kBlockM);
  if (schedule.count == 0) return QF_OK;
  if (schedule.count == schedule.kTooMany) return QF_UNSUPPORTED;
  const wgmma::Relayout reserved = relayout_of<Config>(p, false), relayout = relayout_of<Config>(p, true);
  const Workspace<Config> w(p, reserved.bytes);
  if (!p.workspace || p.workspace_bytes < w.bytes) return QF_NO_MEMORY;
  char* const base = static_cast<char*>(p.workspace);
  char* copies = base + w.copies;
  Borrowed borrowed{stream};
  if (relayout.bytes > reserved.bytes) {  // for copies that become necessary once addresses are known
    if (borrowed.take(relayout.bytes) != cudaSuccess) return QF_NO_MEMORY;
    copies = static_cast<char*>(borrowed.memory);
  }
  if (schedule.count <= processors) schedule.dynamic = false;  // at most one per block
  schedule.next = reinterpret_cast<unsigned*>(base + w.counter);

  QuantizedProblem a{};
  a.attn = p;
  a.kv = kept ? kept_of(p.kv) : w.kv(base);
  a.q_scale = reinterpret_cast<float*>(base + w.q_scale);
  if (p.lse || p.sinks || !Kernel::kPlain) a.q_dot_mean = reinterpret_cast<float*>(base + w.q_dot_mean);
  a.v_columns = w.v_columns;
  QuantizeAll all{};
  all.attn = p;
  all.kv = a.kv;
  if (kept) all.kv.k = nullptr, all.kv.v = nullptr;
  if (p.q.data)  // else its integers are still there from the previous call: this times attention alone
    all.q = {reinterpret_cast<int8_t*>(base + w.q), const_cast<float*>(a.q_scale), const_cast<float*>(a.q_dot_mean)};
  all.counter = schedule.next;
  all.rounding = p.rounding, all.seed = p.seed;
  if (const int status = run_sm90_quantize<Element, kHeadDim>(all, stream)) return status;
  if (relayout.bytes > 0)
    if (const int status = launch({3 * relayout.blocks(processors), wgmma::kRelayoutThreads, 0, stream},
                                  qf_sm90_int8_relayout_kernel<Element>, p, relayout, copies, false))
      return status;

  const bool packed = p.cu_seqlens_q;
  const int batch = packed ? 1 : p.batch;
  const auto integers = [&](void* data, int64_t rows, int heads) {
    return extents_of({data, rows * heads * w.width, heads * w.width, w.width}, w.width, rows, heads, batch);
  };
  const int64_t rows_q = packed ? p.total_q : p.q_len, rows_k = packed ? p.total_k : p.k_len;
  wgmma::TensorMaps maps{};
  if (const int error =
          encode_tensor_map<typename Config::QTile>(maps.q, integers(base + w.q, rows_q, p.q_heads), Config::kBlockM))
    return error;
  if (rows_k > 0) {
    if (const int error =
            encode_tensor_map<typename Config::KTile>(maps.k, integers(a.kv.k, rows_k, p.kv_heads), Config::kBlockN))
      return error;
    using VTile = typename Config::VTile;
    const int64_t of_head = p.head_dim * w.v_columns;
    const QfTensor transposed = {a.kv.v, p.kv_heads * of_head, w.v_columns, of_head};
    const TensorExtents extents = extents_of(transposed, w.v_columns, p.head_dim, p.kv_heads, batch);
    if (const int error = kFp8 ? encode_tensor_map<VTile>(maps.v, extents, kHeadDim)
                               : relayout.map<VTile>(maps.v, wgmma::kV, copies, p.head_dim, Config::kBlockN))
      return error;
  }
  const int blocks = schedule.count < processors ? schedule.count : processors;
  return launch({blocks, Config::kThreads, Config::kSharedBytes, stream}, qf_sm90_int8_kernel<Kernel>, a, maps,
                schedule, chunks_aligned(p.out, p.head_dim, 2));
}

}  // namespace sm90_int8
}  // namespace qf
