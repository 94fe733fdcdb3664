// C entry of `dequantize`.
#include "common/launch.cuh"
#include "kernels/dequantize/dequantize/kernel.cuh"

QF_EXPORT int64_t qf_dequantize_workspace(const QfDequantizeParams*) { return 0; }

QF_EXPORT int qf_dequantize(const QfDequantizeParams* p, void* stream) {
  if (p->struct_bytes != int32_t(sizeof *p)) return QF_BAD_ABI;
  if (p->dtype != QF_DTYPE || p->head_dim < 1 || p->group < 1) return QF_UNSUPPORTED;
  qf::DequantizePlan plan;
  if (const int status = qf::plan_dequantize(*p, plan)) return status;
  if (plan.blocks == 0) return QF_OK;
  return qf::launch({plan.blocks, qf::kQuantizeThreads, 0, static_cast<cudaStream_t>(stream)}, qf_dequantize_kernel, *p,
                    plan.layout, plan.group_of, plan.vector);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("dequantize", status); }
