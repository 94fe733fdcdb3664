// C entry of `fa_int8_quantized`: `fa_int8`'s kernel on arrays that are INT8 already.
#include "attn/entry.cuh"
#include "kernels/fa_int8/quantized.h"

QF_EXPORT int64_t qf_fa_int8_quantized_workspace(const QfInt8AttnParams*) { return 0; }

QF_EXPORT int qf_fa_int8_quantized(const QfInt8AttnParams* p, void* stream) {
  using namespace qf::fa_int8;
  if (p->struct_bytes != int32_t(sizeof(QfInt8AttnParams))) return QF_BAD_ABI;
  if (const int status = qf::check_params(&p->attn, QF_DTYPE, QF_INT8)) return status;
  if (p->attn.head_dim < 1 || p->attn.head_dim > kHeadDim || !serves(*p)) return QF_UNSUPPORTED;
  return run_quantized(*p, [&](auto instance, const Access& access) {
    static std::atomic<uint64_t> devices_done{0};  // one for each instance
    if (const int status = qf::allow_shared_memory(instance.kernel, instance.kBytes, devices_done)) return status;
    return qf::launch(instance.kernel, *p, qf::grid_of(p->attn, kBlockM, 1), kThreads, instance.kBytes, stream, access);
  });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_int8_quantized", status); }
