// `rope`, specialised for -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten): any head_dim.
#pragma once

#include "reduce/row.cuh"

namespace qf {
namespace rope {

using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kThreads = 128;
constexpr int kResidentBlocks = 4;  // per SM at least: some load while others store
constexpr int kHeads = 4;           // per thread, with two granules of each in flight
constexpr int kVector = kGranule<Element>;

// griddepcontrol needs Hopper; code for older architectures does not wait, so its launches must not overlap.
constexpr bool kOverlaps = QF_ARCH >= 90;

}  // namespace rope
}  // namespace qf
