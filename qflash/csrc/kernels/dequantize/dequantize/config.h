// `dequantize`, specialised for -DQF_DTYPE (a QfDtype) alone: any head_dim, any architecture.
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace dequantize {

using Element = ElementOf<QF_DTYPE>::Type;

}  // namespace dequantize
}  // namespace qf
