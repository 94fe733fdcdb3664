// setmaxnreg: warpgroups of one block reallocate registers. sm_90a. The kernel needs __launch_bounds__ with a minimum
// of blocks, and every warp of a warpgroup must execute it.
#pragma once

namespace qf {

// Keeps at most kRegisters from now on; releases the rest to the block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH__
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#elif defined(QF_EMULATOR)
  emulate::set_registers(kRegisters);
#endif
}

// Waits until the block has enough free registers, then has kRegisters.
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
