// `kv_write`, specialised for -DQF_DTYPE (a QfDtype: of the tokens) and -DQF_ARCH (compute capability times ten).
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace kv_write {

using Element = ElementOf<QF_DTYPE>::Type;

// griddepcontrol needs Hopper; code for older architectures does not wait, so its launches must not overlap.
constexpr bool kOverlaps = QF_ARCH >= 90;

}  // namespace kv_write
}  // namespace qf
