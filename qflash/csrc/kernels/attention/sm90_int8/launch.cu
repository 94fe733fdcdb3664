// C entry of `sm90_int8`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16, out's, and V's where that stays as it is),
// bucket of head dims (-DQF_HEAD_DIM) and precision (-DQF_PRECISION): quantize q, and K and V unless they are kept,
// attend.
#include "kernels/attention/sm90_int8/attend.cuh"

namespace {

static_assert(QF_PRECISION == QF_INT8 || QF_PRECISION == QF_INT8_FP8, "a precision with INT8 scores");
constexpr bool kFp8 = QF_PRECISION == QF_INT8_FP8;
using Element = qf::ElementOf<QF_DTYPE>::Type;
using Config = qf::sm90_int8::Kernel<Element, QF_HEAD_DIM, kFp8, true>::Config;

}  // namespace

QF_EXPORT int64_t qf_sm90_int8_workspace(const QfAttnParams* p) { return qf::sm90_int8::workspace_bytes<Config>(*p); }

QF_EXPORT int qf_sm90_int8(const QfAttnParams* p, void* stream) {
  if (const int status = qf::check_params(p, QF_DTYPE, QF_PRECISION)) return status;
  return qf::sm90_int8::attend<Element, QF_HEAD_DIM, kFp8>(*p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8", status); }
