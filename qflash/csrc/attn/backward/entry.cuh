// The host side of the backward libraries: checks of what none of them can serve, their workspace, and launches of one
// block per row tile and per key tile.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/keys.cuh"
#include "attn/entry.cuh"

namespace qf {

// What no backward library can serve, whatever its kernel.
inline int check_backward(const QfAttnBwdParams* params, int dtype) {
  if (params->struct_bytes != int32_t(sizeof(QfAttnBwdParams))) return QF_BAD_ABI;
  if (const int status = check_arrays(&params->fwd, dtype)) return status;
  return params->fwd.lse ? QF_OK : QF_UNSUPPORTED;
}

// Bytes of delta, one float per row of lse: the workspace. Also called before pointers are known.
inline int64_t delta_bytes(const QfAttnParams& p) {
  if (p.batch == 0 && p.lse_stride_b != 0) return 0;
  const int64_t batches = p.lse_stride_b == 0 ? 0 : int64_t(p.batch - 1) * p.lse_stride_b;
  return 4 * (batches + int64_t(p.q_heads) * p.lse_stride_h);
}

// Is there a workspace, if anything is to be written to it?
inline int check_workspace(const QfAttnBwdParams& params) {
  const int64_t bytes = delta_bytes(params.fwd);
  return bytes > 0 && (!params.workspace || params.workspace_bytes < bytes) ? QF_NO_MEMORY : QF_OK;
}

// One block per work tile of a grid (Grid or KeyGrid), in as many launches as needed.
template <class Kernel, class SomeGrid, class... More>
int launch_backward(Kernel* kernel, const QfAttnBwdParams& params, SomeGrid grid, int threads, int shared_bytes,
                    void* stream, const More&... more) {
  for (grid.first = 0; grid.first < grid.work_tiles; grid.first += kMostBlocks) {
    const int64_t left = grid.work_tiles - grid.first, blocks = left < kMostBlocks ? left : kMostBlocks;
    const Launch how = {blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)};
    if (const int status = launch(how, kernel, params, grid, more...)) return status;
  }
  return QF_OK;
}

// The passes that run first: `kernel`, and `few` for rows of few keys, are __global__ functions of the library.
template <class Kernel, class Few>
int launch_delta(Kernel* kernel, Few* few, const QfAttnBwdParams& params, void* stream) {
  const QfAttnParams& p = params.fwd;
  const int bytes = p.dtype == QF_F32 ? 4 : 2;
  const DeltaAccess access = {
      tensor_vectorises(params.dout, p.head_dim, bytes),
      chunks_aligned(params.dout, p.head_dim, bytes) && chunks_aligned(p.out, p.head_dim, bytes)};
  if (const int status = launch_backward(kernel, params, grid_of(p, kDeltaRows, 1), kDeltaThreads, 0, stream, access))
    return status;
  if (params.partial || !delta_has_few(p)) return QF_OK;  // P and dP of only some keys do not give a row's delta
  return launch_backward(few, params, grid_of(p, kFewRows, 1), kDeltaThreads, 0, stream, access);
}

}  // namespace qf
