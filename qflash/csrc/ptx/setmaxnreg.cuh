// setmaxnreg: warpgroups of one block trade registers. sm_90a. The kernel needs __launch_bounds__ with a minimum of
// blocks, and every warp of a warpgroup must get here.
#pragma once

namespace qf {

// Have at most kRegisters from now on; give the rest back to the block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH__
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#elif defined(QF_EMULATOR)
  emulate::set_registers(kRegisters);
#endif
}

// Wait until the block has enough of them, then have kRegisters.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH__
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#elif defined(QF_EMULATOR)
  emulate::set_registers(kRegisters);
#endif
}

}  // namespace qf
