// The host side of the attention libraries: checks of what none can serve, and launches of one block per row tile.
#pragma once

#include "attn/kv.h"
#include "attn/schedule.cuh"
#include "common/launch.cuh"
#include "quant/sm90/kept.h"

namespace qf {

// What no kernel library can serve, whatever its kernel.
inline int check_params(const QfAttnParams* p, int dtype, int precision = QF_NATIVE) {
  if (p->struct_bytes != int32_t(sizeof(QfAttnParams))) return QF_BAD_ABI;
  if (p->dtype != dtype || p->precision != precision) return QF_UNSUPPORTED;
  if (p->q_len > kMaxLength || p->k_len > kMaxLength) return QF_UNSUPPORTED;
  return QF_OK;
}

// The same for a kernel that takes K and V as arrays alone.
inline int check_arrays(const QfAttnParams* p, int dtype) {
  if (const int status = check_params(p, dtype)) return status;
  return kv_is_arrays(*p) ? QF_OK : QF_UNSUPPORTED;
}

// The same for a kernel that takes K and V in pages.
inline int check_pages(const QfAttnParams* p, int dtype) {
  if (const int status = check_params(p, dtype)) return status;
  return kv_is_pages(*p) ? QF_OK : QF_UNSUPPORTED;
}

// The same for pages of int8 whose scales are copied in runs.
inline int check_int8_pages(const QfAttnParams* p, int dtype) {
  if (const int status = check_params(p, dtype)) return status;
  return kv_is_int8_pages(*p) && scales_copy_in_runs(*p) ? QF_OK : QF_UNSUPPORTED;
}

// The same for KV from quantize_kv, in one precision.
inline int check_kept(const QfAttnParams* p, int dtype, int precision) {
  if (const int status = check_params(p, dtype, precision)) return status;
  const bool kept = is_kept(p->kv, precision, dtype, p->batch, p->k_len, p->kv_heads, p->head_dim);
  return kept && !p->cu_seqlens_k ? QF_OK : QF_UNSUPPORTED;
}

// The same for a kernel that decodes one kind of K and V: INT8 from quantize_kv, arrays or pages.
template <int kKind>
int check_kv(const QfAttnParams* p, int dtype) {
  if constexpr (kKind == QF_KV_KEPT) return check_kept(p, dtype, QF_INT8);
  if constexpr (kKind == QF_KV_PAGES_INT8) return check_int8_pages(p, dtype);
  return kKind == QF_KV_PAGES ? check_pages(p, dtype) : check_arrays(p, dtype);
}

// The same for a rung without rope, packed arrays and sinks, as its row of dispatch.KERNELS specifies.
inline int check_unrotated_arrays(const QfAttnParams* p, int dtype) {
  if (const int status = check_arrays(p, dtype)) return status;
  return p->rope.cos || p->cu_seqlens_q || p->cu_seqlens_k || p->sinks ? QF_UNSUPPORTED : QF_OK;
}

// One block per work tile of the grid, in as many launches as needed. `more`: the kernel's further arguments.
template <class Kernel, class... More>
int launch_grid(Kernel* kernel, const QfAttnParams& p, Grid grid, int threads, int shared_bytes, void* stream,
                const More&... more) {
  for (grid.first = 0; grid.first < grid.work_tiles; grid.first += kMostBlocks) {
    const int64_t left = grid.work_tiles - grid.first, blocks = left < kMostBlocks ? left : kMostBlocks;
    const Launch how = {blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)};
    if (const int status = launch(how, kernel, p, grid, more...)) return status;
  }
  return QF_OK;
}

}  // namespace qf
