// C entry of `sm90_gemm`, for -DQF_PRECISION (0: native, 1: int8, as PRECISIONS of call/spec.py), -DQF_DTYPE (native:
// of x and w; int8: of out) and -DQF_ACTIVATION.
#include "kernels/linear/sm90_gemm/run.cuh"

namespace {

using namespace qf;
constexpr bool kInt8 = QF_PRECISION == 1;
template <bool kWAlongN>
using Problem = sm90_gemm::Problem<kInt8, QF_DTYPE, QF_ACTIVATION, false, kWAlongN>;
template <bool kWAlongN>
using Large = gemm::wgmma::TileConfig<sm90_gemm::Large<Problem<kWAlongN>>>;
template <bool kWAlongN>
using Small = gemm::wgmma::TileConfig<sm90_gemm::Small<Problem<kWAlongN>>>;

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

template <bool kWAlongN>
int run(const QfLinearParams& p, cudaStream_t stream) {
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  if (processors > gemm::wgmma::kMostProcessors) processors = gemm::wgmma::kMostProcessors;
  const gemm::Choice90 choice = gemm::choose_tile(sm90_gemm::problem_of<Small<kWAlongN>>(p), processors);
  return choice.large ? sm90_gemm::run<Large<kWAlongN>>(p, processors, choice.splits, stream)
                      : sm90_gemm::run<Small<kWAlongN>>(p, processors, choice.splits, stream);
}

}  // namespace

QF_EXPORT int64_t qf_sm90_gemm_workspace(const QfLinearParams* p) {
  return p->w_stride_k == 1 ? sm90_gemm::workspace_bytes<Small<false>>(*p)
                            : sm90_gemm::workspace_bytes<Small<!kInt8>>(*p);
}

QF_EXPORT int qf_sm90_gemm(const QfLinearParams* p, void* stream) {
  if (const int status = check(p)) return status;
  if (p->m == 0 || p->n == 0) return QF_OK;
  if (p->w_stride_k == 1) return run<false>(*p, static_cast<cudaStream_t>(stream));
  return run<!kInt8>(*p, static_cast<cudaStream_t>(stream));  // integers were refused above
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
