// `sm90_quantize`, specialised for -DQF_DTYPE (QF_F16 or QF_BF16) and -DQF_HEAD_DIM (a bucket: 64, 128 or 256; the
// actual head_dim is a run-time argument).
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace sm90_quantize {

constexpr int kHeadDim = QF_HEAD_DIM;
using Element = ElementOf<QF_DTYPE>::Type;

}  // namespace sm90_quantize
}  // namespace qf
