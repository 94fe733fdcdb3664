// Linear layers of one instruction set, every number as float32: compiled once for each, into namespace qf::QF_ISA.
#include "linear_block.h"

namespace qf {
namespace QF_ISA {

static int multiply_floats(const LinearCall& call, const LinearBlock& block, void* scratch) {
  if (call.p.dtype == QF_F32) return multiply_block<F32Words>(call, block, scratch);
  if (call.p.dtype == QF_F16) return multiply_block<F16Words>(call, block, scratch);
  return multiply_block<BF16Words>(call, block, scratch);
}

extern const LinearKernel linear_floats = {
    kRowStep, kMostRows, kPanel, kMostColumns, kFewRowsAlongK, kFewColumns, block_scratch_bytes, multiply_floats};

}  // namespace QF_ISA
}  // namespace qf
