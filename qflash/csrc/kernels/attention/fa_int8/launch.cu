// C entry of `fa_int8`, for one kind of K and V (-DQF_KV_KIND): QF_KV_ARRAYS, of which q and k are quantized into the
// workspace first, or QF_KV_QUANTIZED.
#include "attn/entry.cuh"
#include "kernels/attention/fa_int8/instances.h"
#include "kernels/attention/fa_int8/workspace.h"
#include "kernels/quantize/quantize/passes.cuh"

namespace qf {
namespace fa_int8 {

// A template, so that only the instances of one kind are compiled.
template <int kKind>
int attend(const QfAttnParams& p, cudaStream_t on) {
  const auto launch_instance = [on](const QfAttnParams& quantized, auto instance, const Access& access) -> int {
    return launch_grid(instance.kernel, quantized, grid_of(quantized, kBlockM, 1), kThreads, instance.kBytes, on,
                       access);
  };
  if constexpr (kKind == QF_KV_QUANTIZED) {
    if (!serves_quantized(p)) return QF_UNSUPPORTED;
    return run_quantized(p, launch_instance);
  } else {
    if (!kv_is_arrays(p)) return QF_UNSUPPORTED;
    Workspace workspace(p);
    if (workspace.bytes > 0 && (!p.workspace || p.workspace_bytes < workspace.bytes)) return QF_NO_MEMORY;
    const QfAttnParams quantized = workspace.place(p);
    if (padded(p.head_dim) != p.head_dim)  // the channels that quantization does not write
      if (const cudaError_t error = cudaMemsetAsync(p.workspace, 0, workspace.q_scales, on)) return error;
    if (const int status = run_quantize<Element>(workspace.k, on)) return status;
    if (const int status = run_quantize<Element>(workspace.q, on)) return status;
    return run_after_quantizing(quantized, launch_instance);
  }
}

}  // namespace fa_int8
}  // namespace qf

QF_EXPORT int64_t qf_fa_int8_workspace(const QfAttnParams* p) {
  return QF_KV_KIND == QF_KV_ARRAYS ? qf::fa_int8::Workspace(*p).bytes : 0;
}

QF_EXPORT int qf_fa_int8(const QfAttnParams* p, void* stream) {
  if (const int status = qf::check_params(p, QF_DTYPE, QF_INT8)) return status;
  if (p->head_dim < 1 || p->head_dim > qf::fa_int8::kHeadDim) return QF_UNSUPPORTED;
  return qf::fa_int8::attend<QF_KV_KIND>(*p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_int8", status); }
