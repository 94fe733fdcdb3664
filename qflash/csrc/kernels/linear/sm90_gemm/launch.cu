// C entry of `sm90_gemm`, for -DQF_PRECISION (0: native, 1: int8, as PRECISIONS of call/spec.py), -DQF_DTYPE (native:
// of x and w; int8: of out) and -DQF_ACTIVATION.
#include "kernels/linear/sm90_gemm/run.cuh"

namespace {

using namespace qf;
constexpr bool kInt8 = QF_PRECISION == 1;
template <bool kWAlongN>
using Problem = sm90_gemm::Problem<kInt8, QF_DTYPE, QF_ACTIVATION, false, kWAlongN>;
constexpr bool kTakesWAlongN = !kInt8;

constexpr int64_t kMostK = kInt8 ? 131071 : kMaxLength;  // -128 * -128 * k must fit an int32

int check(const QfLinearParams* p) {
  if (p->struct_bytes != int32_t(sizeof(QfLinearParams))) return QF_BAD_ABI;
  const bool types = kInt8 ? p->dtype == QF_I8 && p->out_dtype == QF_DTYPE
                           : p->dtype == QF_DTYPE && (p->out_dtype == QF_DTYPE || p->out_dtype == QF_F32);
  if (!types || p->activation != QF_ACTIVATION) return QF_UNSUPPORTED;
  if (p->m < 0 || p->n < 0 || p->k < 0 || p->m > kMaxLength || p->n > kMaxLength || p->k > kMostK)
    return QF_UNSUPPORTED;
  if (p->x_stride_k != 1 || (p->w_stride_k != 1 && (kInt8 || p->w_stride_n != 1))) return QF_UNSUPPORTED;
  if (QF_ACTIVATION == QF_SWIGLU && (p->w_stride_k == 1 ? p->up_stride_k : p->up_stride_n) != 1) return QF_UNSUPPORTED;
  return QF_OK;
}

}  // namespace

QF_EXPORT int64_t qf_sm90_gemm_workspace(const QfLinearParams* p) {
  using sm90_gemm::SmallTile, sm90_gemm::workspace_bytes;
  return p->w_stride_k == 1 ? workspace_bytes<SmallTile<Problem<false>>>(*p)
                            : workspace_bytes<SmallTile<Problem<kTakesWAlongN>>>(*p);
}

QF_EXPORT int qf_sm90_gemm(const QfLinearParams* p, void* stream) {
  if (const int status = check(p)) return status;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (p->w_stride_k == 1) return sm90_gemm::run_fastest<Problem<false>>(*p, on);
  return sm90_gemm::run_fastest<Problem<kTakesWAlongN>>(*p, on);  // integers were rejected above
}

QF_EXPORT const char* qf_status_text(int status) {
  static thread_local char text[256];
  if (status != QF_UNSUPPORTED) return status_text("sm90_gemm", status);
  snprintf(text, sizeof text,
           "kernel 'sm90_gemm' was built for another dtype, out_dtype or activation, or x is not contiguous along k, w "
           "along neither k nor n (int8: not along k; up not as w), k past %lld, or the work past what 32 bits count",
           static_cast<long long>(kMostK));
  return text;
}
