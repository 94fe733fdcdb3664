// A kernel without a race in which racecheck reports some: nvcc -arch=sm_90 racecheck.cu, then
//   compute-sanitizer --tool racecheck ./a.out 1    (0 hazards)
//   compute-sanitizer --tool racecheck ./a.out 2    (4 hazards, as with 5)
// The argument: how often the first of two teams of warps meets for once that the second does. All then write, meet at
// barrier 1, read, and meet there again.
#include <cstdio>
#include <cstdlib>

template <int kId, int kThreads>
__device__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

__global__ void __launch_bounds__(384, 1) teams(float* out, int meetings) {
  extern __shared__ float area[];
  __syncthreads();
  if (threadIdx.x >= 256) return;
  const bool first = threadIdx.x < 128;
  float sum = 0.0f;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < (first ? meetings : 1); ++i) {
      if (first)
        meet<2, 128>();
      else
        meet<3, 128>();
    }
    for (int pass = 0; pass < 2; ++pass) {
      for (int j = 0; j < 8; ++j) area[threadIdx.x * 8 + j] = float(round + threadIdx.x + j + pass);
      meet<1, 256>();
      for (int j = 0; j < 8; ++j) sum += area[(threadIdx.x + 128) % 256 * 8 + j];
      meet<1, 256>();
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}

int main(int count, char** words) {
  float* out;
  cudaMalloc(&out, 4 * 256 * sizeof(float));
  teams<<<4, 384, 8192>>>(out, count > 1 ? std::atoi(words[1]) : 1);
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
