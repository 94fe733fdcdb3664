// `rope`, specialised for -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten): any head_dim.
#pragma once

#include "reduce/row.cuh"

namespace qf {
namespace rope {

using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kThreads = 128;
constexpr int kResidentBlocks = 4;  // of a multiprocessor at least: some load while others store
constexpr int kHeads = 4;           // of a thread, which has two granules of each under way
constexpr int kVector = kGranule<Element>;

// Griddepcontrol came with Hopper; code for an older architecture does not wait, so its launches must not overlap.
constexpr bool kOverlaps = QF_ARCH >= 90;

}  // namespace rope
}  // namespace qf
