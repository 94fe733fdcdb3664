// C entry of `sm90_int8`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16, of out, and of V if it is not quantized), bucket
// of head dims (-DQF_HEAD_DIM) and precision (-DQF_PRECISION): quantizes q, and K and V unless they already are,
// attends.
#include "common/parts.h"
#include "kernels/quantize_kv/sm90_quantize/launches.cuh"

#if QF_IN_PART(0)
#include "kernels/attention/sm90_int8/attend.cuh"

namespace {

static_assert(QF_PRECISION == QF_INT8 || QF_PRECISION == QF_INT8_FP8, "a precision with INT8 scores");
using Element = qf::ElementOf<QF_DTYPE>::Type;
template <bool kPlain>
using Kernel = qf::sm90_int8::Kernel<Element, QF_HEAD_DIM, QF_PRECISION == QF_INT8_FP8, kPlain>;

}  // namespace

QF_EXPORT int64_t qf_sm90_int8_workspace(const QfAttnParams* p) {
  return qf::sm90_int8::workspace_bytes<Kernel<true>::Config>(*p);  // the same for any scores
}

QF_EXPORT int qf_sm90_int8(const QfAttnParams* p, void* stream) {
  if (const int status = qf::check_params(p, QF_DTYPE, QF_PRECISION)) return status;
  return qf::by_scores(qf::scales_plainly(p->scale, p->softcap), [&](auto plain) {
    return qf::sm90_int8::attend<Kernel<decltype(plain)::value>>(*p, static_cast<cudaStream_t>(stream));
  });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8", status); }
#endif
