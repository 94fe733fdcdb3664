// `quantize`, specialised for -DQF_DTYPE (a QfDtype) alone: any head_dim, any architecture.
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace quantize {

using Element = ElementOf<QF_DTYPE>::Type;

}  // namespace quantize
}  // namespace qf
