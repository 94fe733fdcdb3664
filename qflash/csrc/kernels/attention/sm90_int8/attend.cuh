// Host side of `sm90_int8`: quantize, make tensor maps, attend.
#pragma once

#include "attn/entry.cuh"
#include "attn/kv.h"
#include "attn/plain_scores.h"
#include "kernels/attention/sm90_int8/kernel.cuh"
// Made for those tiles, too.
#include "attn/wgmma/stage.cuh"
#include "kernels/attention/sm90_int8/workspace.h"
#include "kernels/quantize_kv/sm90_quantize/plan.cuh"

namespace qf {
namespace sm90 {

inline Stage stage_of(const QfAttnParams& p, bool addressed) {
  Stage stage(p, addressed, kV);
  if (kFp8) stage = Stage(p, addressed, Which(kV + 1));  // nobody copies V
  return stage;
}

inline int64_t workspace_bytes(const QfAttnParams& p) { return Workspace(p, stage_of(p, false).bytes).bytes; }

// K and V are arrays, still to be quantized, or as quantize_kv left them.
inline bool serves(const QfAttnParams& p) {
  if (p.kv.kind == QF_KV_ARRAYS) return kv_is_arrays(p);
  return !p.cu_seqlens_q && is_kept(p.kv, p.precision, p.dtype, p.batch, p.k_len, p.kv_heads, p.head_dim);
}

inline int attend(const QfAttnParams& p, cudaStream_t stream) {
  const bool plain = scales_plainly(p.scale, p.softcap);
  if (!serves_scores(plain)) return QF_UNSUPPORTED;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const bool kept = p.kv.kind == QF_KV_KEPT;
  if (!serves(p)) return QF_UNSUPPORTED;
  if (p.head_dim < 1 || p.head_dim > kHeadDim || p.head_dim % 8 != 0) return QF_UNSUPPORTED;
  Items items = items_of(p);
  if (items.count == 0) return QF_OK;
  if (items.count == kTooMany) return QF_UNSUPPORTED;
  const Stage planned = stage_of(p, false), stage = stage_of(p, true);
  const Workspace w(p, planned.bytes);
  if (!p.workspace || p.workspace_bytes < w.bytes) return QF_NO_MEMORY;
  char* const base = static_cast<char*>(p.workspace);
  char* staged = base + w.staged;
  Borrowed borrowed{stream};
  if (stage.bytes > planned.bytes) {  // for addresses that nobody could plan for
    if (borrowed.take(stage.bytes) != cudaSuccess) return QF_NO_MEMORY;
    staged = static_cast<char*>(borrowed.memory);
  }
  if (items.count <= processors) items.drawn = false;  // one for each block at most
  items.next = reinterpret_cast<int*>(base + w.counter);

  Quantized a{};
  a.attn = p;
  a.kv = kept ? kept_of(p.kv) : w.kv(base);
  a.q_scale = reinterpret_cast<float*>(base + w.q_scale);
  if (p.lse || !plain) a.lift = reinterpret_cast<float*>(base + w.lift);
  a.v_columns = w.v_columns;
  QuantizeAll all{};
  all.attn = p;
  all.kv = a.kv;
  if (kept) all.kv.k = nullptr, all.kv.v = nullptr;
  if (p.q.data)  // else its integers are where the call before left them: so the attention is timed alone
    all.q = {reinterpret_cast<int8_t*>(base + w.q), const_cast<float*>(a.q_scale), const_cast<float*>(a.lift)};
  all.counter = items.next;
  all.rounding = p.rounding, all.seed = p.seed;
  if (const int status = run_sm90_quantize<Element, kHeadDim>(all, stream)) return status;
  if (stage.bytes > 0)
    if (const int status =
            launch({3 * stage.blocks(processors), 256, 0, stream}, qf_sm90_stage_kernel, p, stage, staged, false))
      return status;

  const bool packed = p.cu_seqlens_q;
  const int batch = packed ? 1 : p.batch;
  const auto integers = [&](void* data, int64_t rows, int heads) {
    return QfTensor{data, rows * heads * w.width, heads * w.width, w.width};
  };
  const int64_t rows_q = packed ? p.total_q : p.q_len, rows_k = packed ? p.total_k : p.k_len;
  Maps maps{};
  if (const int error = encode_tensor_map<QTile>(maps.q, integers(base + w.q, rows_q, p.q_heads), w.width, rows_q,
                                                 p.q_heads, batch, kBlockM))
    return error;
  if (rows_k > 0) {
    if (const int error = encode_tensor_map<KTile>(maps.k, integers(a.kv.k, rows_k, p.kv_heads), w.width, rows_k,
                                                   p.kv_heads, batch, kBlockN))
      return error;
    const int64_t of_head = p.head_dim * w.v_columns;
    const QfTensor transposed = {a.kv.v, p.kv_heads * of_head, w.v_columns, of_head};
    if (const int error =
            kFp8 ? encode_tensor_map<VTile>(maps.v, transposed, w.v_columns, p.head_dim, p.kv_heads, batch, kHeadDim)
                 : stage.map<VTile>(maps.v, kV, staged, p.head_dim, kBlockN))
      return error;
  }
  const int blocks = items.count < processors ? items.count : processors;
  return by_scores(plain, [&](auto kind) {
    return launch({blocks, kThreads, kSharedBytes, stream}, qf_sm90_int8_kernel<decltype(kind)::value>, a, maps, items,
                  chunks_aligned(p.out, p.head_dim, 2));
  });
}

}  // namespace sm90
}  // namespace qf
