// Rows of a matrix, each with its own symmetric scale, without any other option: x of a linear layer in INT8.
//
//   qf_quantize_rows_kernel   a block per row: load all of it | largest magnitude | scale, round, store
//
// The integers and scales equal those of qf_quantize_kernel, which serves all other calls, bit for bit.
// Threads: as many as hold the row in kHeld places of eight channels each, 32 to 512. Each thus has kHeld independent
// 16-byte loads in flight (float32: twice as many), and few are idle at the end of a row of any length.
// Registers: the row's raw bits, 4 per place (float32: 8). They are converted to floats after the barrier.
// Shared memory: a word per warp, for the single exchange of the reduction.
// Bound: memory, one read of x and one byte written per element. Few rows: the latency of the launch, one load, two
// warp reductions, a barrier.
#pragma once

#include "common/launch.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quant/layout.cuh"
#include "quant/round.cuh"
#include "quant/share.cuh"
#include "reduce/block.cuh"

namespace qf {

constexpr int kMostRowThreads = 512;
constexpr int kFewPlaces = 4, kManyPlaces = 8;
// With shorter rows, the 32 blocks of an SM have too few bytes in flight: qf_quantize_kernel holds several tokens per
// thread.
constexpr int kShortestRow = 512;
constexpr int kLongestRow = 8 * kManyPlaces * kMostRowThreads;

// The largest of eight magnitudes, as an integer in the same order. 16-bit elements are compared without conversion:
// each of the two in a word is shifted to the top, without its sign. The bits below the top 15 are ignored in the end,
// and cannot make a smaller magnitude win.
__device__ __forceinline__ uint32_t largest_of(const Raw8<float>& raw) {
  float x[8];
  to_float8(x, raw);
  uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) largest = larger(largest, magnitude(x[e]));
  return largest;
}
template <class Element>
__device__ __forceinline__ uint32_t largest_of(const Raw8<Element>& raw) {
  const uint32_t words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = larger(largest, larger(words[i] << 17, words[i] << 1));
  return largest;
}

// The result of largest_of as a magnitude in float32.
template <class Element>
__device__ __forceinline__ uint32_t float_magnitude(uint32_t largest) {
  if constexpr (sizeof(Element) == 4)
    return largest;
  else
    return magnitude(to_float(Element{uint16_t(largest >> 17)}));
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
#endif
}

}  // namespace qf

// At least two resident blocks, so that one loads while another rounds; long rows of float32 leave room for only one.
template <class Element, int kHeld>
__global__ void __launch_bounds__(qf::kMostRowThreads, kHeld * sizeof(Element) > 16 ? 1 : 2)
    qf_quantize_rows_kernel(const __grid_constant__ QfQuantizeParams p) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  wait_for_previous_grid();  // it wrote x, and may still read values and scales
  let_next_grid_start();     // which waits in turn before it reads what is written here
  const int64_t row = blockIdx.x;
  // A warp's channels are contiguous, 8 * 32 per place: the places are at constant offsets from one address.
  const int first = 8 * int(threadIdx.x / 32 * 32 * kHeld + threadIdx.x % 32), left = p.head_dim - first;
  const Element* const g_x = static_cast<const Element*>(p.x.data) + row * p.x.stride_t + first;
  int8_t* const g_values = static_cast<int8_t*>(p.values.data) + row * p.values.stride_t + first;

  Raw8<Element> raw[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) raw[i] = load8(g_x, 8 * 32 * i, left, true);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) largest = larger(largest, largest_of(raw[i]));
  uint32_t* const s_words = reinterpret_cast<uint32_t*>(s_memory);
  largest = reduce_block(largest, [](uint32_t value, int) { return largest_of_warp(value); }, 0u, s_words);

  const uint32_t key = token_key(float_magnitude<Element>(largest));
  const Scale scale = symmetric_scale(key);
  if (threadIdx.x == 0) p.scale[row] = scale.scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    float x[8];
    to_float8(x, raw[i]);
    uint2 bytes = make_uint2(nearest4(x, scale.inverse), nearest4(x + 4, scale.inverse));
    if (key == kNotFinite) bytes = make_uint2(0x80808080u, 0x80808080u);
    if (8 * 32 * i < left) *reinterpret_cast<uint2*>(g_values + 8 * 32 * i) = bytes;
  }
}

namespace qf {

// Whether run_rows serves a call that check_quantize accepts.
inline bool is_rows(const QfQuantizeParams& p) {
  const bool matrix = p.batch == 1 && p.heads == 1 && !p.lens && !p.cu_seqlens;
  const bool plain = p.symmetric && p.rounding == QF_NEAREST && p.granularity == QF_PER_GROUP && p.group == 1;
  const bool alone = !p.smooth && !p.rope.cos && !p.sums && !p.q_dot_mean;
  return matrix && plain && alone && p.head_dim >= kShortestRow && p.head_dim <= kLongestRow &&
         vectorises8(p.x, p.values, p.head_dim, p.dtype == QF_F32 ? 4 : 2);
}

// overlaps: the kernel may start before the previous one is complete.
template <class Element>
int run_rows(const QfQuantizeParams& p, bool overlaps, cudaStream_t stream) {
  if (p.length == 0) return QF_OK;
  const int pieces = p.head_dim / 8, places = pieces <= kFewPlaces * kMostRowThreads ? kFewPlaces : kManyPlaces;
  const int threads = int(ceil_of(pieces, 32 * places)) * 32;
  return launch({p.length, threads, block_bytes<uint32_t>(), stream, overlaps},
                places == kFewPlaces ? qf_quantize_rows_kernel<Element, kFewPlaces>
                                     : qf_quantize_rows_kernel<Element, kManyPlaces>,
                p);
}

}  // namespace qf
