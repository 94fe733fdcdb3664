// `rope`, specialised for -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten): any head_dim.
#pragma once

#include "reduce/row.cuh"

namespace qf {
namespace rope {

using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // of a thread: as many granules under way as two times this, and tables read once for them
constexpr int kVector = kGranule<Element>;

// Griddepcontrol came with Hopper; code for an older architecture does not wait, so its launches must not overlap.
constexpr bool kOverlaps = QF_ARCH >= 90;

}  // namespace rope
}  // namespace qf
