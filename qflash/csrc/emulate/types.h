// What nvcc provides without any header: CUDA's keywords, vector types, the built-in variables of a thread.
#pragma once

#include <algorithm>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// One thread runs at a time; the scheduler sets these for it.
inline dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

// Dynamic shared memory, by its name in every kernel: one page more than a block's maximum. Blocks of a cluster run
// together: each has a window of it, and a kernel for clusters requests its own (ptx/cluster.cuh).
constexpr int kMostSharedBytes = 227 * 1024, kMostClusterBlocks = 2;
constexpr int kSharedWindow = kMostSharedBytes + 4096;
alignas(1024) inline float4 s_memory[kMostClusterBlocks * kSharedWindow / sizeof(float4)];
