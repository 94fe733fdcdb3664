// `merge`, specialised for -DQF_DTYPE (a QfDtype, of a and out) alone: any head_dim, any architecture.
#pragma once

#include "common/elements.cuh"

namespace qf {
namespace merge {

using Element = ElementOf<QF_DTYPE>::Type;
constexpr int kThreads = 256;

}  // namespace merge
}  // namespace qf
