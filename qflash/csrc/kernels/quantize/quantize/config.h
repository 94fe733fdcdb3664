// `quantize`, specialised for -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten): any head_dim.
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace quantize {

using Element = ElementOf<QF_DTYPE>::Type;

// griddepcontrol needs Hopper; code for older architectures does not wait, so its launches must not overlap.
constexpr bool kOverlaps = QF_ARCH >= 90;

}  // namespace quantize
}  // namespace qf
