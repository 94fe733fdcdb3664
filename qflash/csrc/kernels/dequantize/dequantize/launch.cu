// C entry of `dequantize`.
#include "common/launch.cuh"
#include "kernels/dequantize/dequantize/kernel.cuh"

QF_EXPORT int64_t qf_dequantize_workspace(const QfDequantizeParams*) { return 0; }

QF_EXPORT int qf_dequantize(const QfDequantizeParams* p, void* stream) {
  if (p->struct_bytes != int32_t(sizeof *p)) return QF_BAD_ABI;
  if (p->dtype != QF_DTYPE || p->head_dim < 1 || p->group < 1) return QF_UNSUPPORTED;
  qf::DequantizeGrid grid;
  if (const int status = qf::find_grid(*p, grid)) return status;
  if (grid.blocks == 0) return QF_OK;
  return qf::launch({grid.blocks, qf::kQuantizeThreads, 0, static_cast<cudaStream_t>(stream)}, qf_dequantize_kernel, *p,
                    grid.layout, grid.group_of, grid.vector);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("dequantize", status); }
