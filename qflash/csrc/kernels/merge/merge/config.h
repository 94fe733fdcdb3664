// `merge`, specialised for -DQF_DTYPE (a QfDtype, of a and out) and -DQF_ARCH (compute capability times ten): any
// head_dim.
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace merge {

using Element = ElementOf<QF_DTYPE>::Type;
constexpr int kThreads = 256;

}  // namespace merge
}  // namespace qf
