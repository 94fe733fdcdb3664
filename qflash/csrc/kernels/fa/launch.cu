// C entry of `fa`.
#include "attn/entry.cuh"
#include "kernels/fa/kernel.cuh"

QF_EXPORT int64_t qf_fa_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa(const QfAttnParams* p, void* stream) {
  static std::atomic<uint64_t> devices_done{0};
  if (const int status = qf::check_params(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > qf::fa::kHeadDim) return QF_UNSUPPORTED;
  qf::fa::Grid grid = qf::fa::grid_of(*p);
  if (grid.items == 0) return QF_OK;
  if (const int status = qf::allow_shared_memory(qf_fa_kernel, qf::fa::kSharedBytes, devices_done)) return status;
  for (; grid.first < grid.items; grid.first += qf::kMaxGrid) {
    const int64_t left = grid.items - grid.first;
    const unsigned blocks = left < qf::kMaxGrid ? left : qf::kMaxGrid;
    qf_fa_kernel<<<blocks, qf::fa::kThreads, qf::fa::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(*p, grid);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return QF_OK;
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa", status); }
