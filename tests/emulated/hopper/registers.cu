// ptx/setmaxnreg.cuh: one warpgroup gives registers up, two take them and hold more values than they were launched
// with.
#include "launch_one.cuh"
#include "ptx/setmaxnreg.cuh"

namespace registers {

constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;  // 168 registers a thread at launch
constexpr int kFew = 40, kMany = 232, kValues = 200;

// Takers add the sum of their values to each of them, so that all must be kept until the last is there. x, out:
// [kValues][256]. Givers count themselves.
__global__ void __launch_bounds__(kThreads, 1) trade(const float* g_x, float* g_out, int* g_givers) {
  if (threadIdx.x < kGroupThreads) {
    qf::give_registers<kFew>();
    atomicAdd(g_givers, 1);
    return;
  }
  qf::take_registers<kMany>();
  const int taker = threadIdx.x - kGroupThreads;
  float x[kValues], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i] = g_x[i * 2 * kGroupThreads + taker];
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += x[i];
#pragma unroll
  for (int i = 0; i < kValues; ++i) g_out[i * 2 * kGroupThreads + taker] = x[i] + sum;
}

}  // namespace registers

QF_EXPORT int try_registers(const float* x, float* out, int* givers) {
  return launch_one(registers::kThreads, 0, registers::trade, x, out, givers);
}
