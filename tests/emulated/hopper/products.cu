// ptx/wgmma.cuh, hopper/descriptor.cuh: 64 x 128 by 128 x N, A from shared memory or registers, B along rows of K or,
// transposed, of N. Tiles are written swizzled by ordinary stores: the fence that wgmma needs after those is tried,
// too.
#include "hopper/descriptor.cuh"
#include "launch_one.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "qflash.h"

namespace products {

constexpr int kM = 64, kK = 128;

// [rows][channels] in global memory to swizzled panels.
template <int kRows, int kChannels>
__device__ void store_panels(char* s_tile, const uint16_t* g_x) {
  using Tile = qf::Panels<kRows, kChannels>;
  for (int i = threadIdx.x; i < kRows * kChannels; i += blockDim.x) {
    const int row = i / kChannels, d = i % kChannels, chunk = d % 64 / 8;
    char* const s_panel = s_tile + d / 64 * Tile::kPanelBytes;
    reinterpret_cast<uint16_t*>(s_panel + row * Tile::kRowBytes + 16 * (chunk ^ row % 8))[d % 8] = g_x[i];
  }
}

// A as mma.sync takes it: 16 rows of a warp, channels 16 k .. 16 k + 15.
__device__ void load_a(uint32_t (&a)[4], const uint16_t* g_a, int k) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, d = 16 * k + lane % 4 * 2;
  for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const uint32_t*>(g_a + (row + i % 2 * 8) * kK + d + i / 2 * 8);
}

using A = qf::Panels<kM, kK>;
template <int kN, bool kTransposed>
using B = qf::Panels<kTransposed ? kK : kN, kTransposed ? kN : kK>;

}  // namespace products

template <class Element, int kN, bool kRegisters, bool kTransposed>
__global__ void __launch_bounds__(128) products_kernel(const uint16_t* g_a, const uint16_t* g_b, float* g_out) {
  using namespace products;
  using BTile = B<kN, kTransposed>;
  extern __shared__ float4 s_memory[];
  char* const s_a = reinterpret_cast<char*>(s_memory) +
                    (qf::kSwizzleBytes - qf::shared_address(s_memory) % qf::kSwizzleBytes) % qf::kSwizzleBytes;
  char* const s_b = s_a + A::kBytes;
  store_panels<kM, kK>(s_a, g_a);
  store_panels<kTransposed ? kK : kN, kTransposed ? kN : kK>(s_b, g_b);
  qf::fence_proxy_async();  // the tiles just written, to wgmma
  __syncthreads();
  const qf::AlongRows<A> a_rows(s_a);
  const qf::AlongRows<BTile> b_rows(s_b);
  const qf::AlongColumns<BTile> b_columns(s_b);
  const auto b = [&](int k) { return kTransposed ? b_columns.step(k) : b_rows.step(k); };
  uint32_t a[kK / 16][4];
  float d[kN / 8][4];
  for (int j = 0; j < kN / 8; ++j)
    for (int e = 0; e < 4; ++e) d[j][e] = kRegisters ? 0.0f : 12345.0f;  // what is not added to must not count
  if (kRegisters)
    for (int k = 0; k < kK / 16; ++k) load_a(a[k], g_a, k);
  qf::hold(d);
  qf::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    if constexpr (kRegisters)
      qf::Wgmma<Element, kN>::template multiply<kTransposed>(d, a[k], b(k));
    else
      qf::Wgmma<Element, kN>::template multiply<kTransposed>(d, a_rows.step(k), b(k), k > 0);
  }
  qf::wgmma_commit();
  qf::wgmma_wait<0>();
  qf::hold(d);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int j = 0; j < kN / 8; ++j)
    for (int e = 0; e < 4; ++e) g_out[(row + e / 2 * 8) * kN + 8 * j + lane % 4 * 2 + e % 2] = d[j][e];
}

namespace products {

template <class Element, int kN, bool kRegisters, bool kTransposed>
int run(const void* a, const void* b, void* out) {
  constexpr int kBytes = A::kBytes + B<kN, kTransposed>::kBytes + qf::kSwizzleBytes;  // the last for alignment
  return launch_one(128, kBytes, products_kernel<Element, kN, kRegisters, kTransposed>, static_cast<const uint16_t*>(a),
                    static_cast<const uint16_t*>(b), static_cast<float*>(out));
}

template <class Element, int kN>
int run(bool registers, bool transposed, const void* a, const void* b, void* out) {
  if (registers) return transposed ? run<Element, kN, true, true>(a, b, out) : run<Element, kN, true, false>(a, b, out);
  return transposed ? run<Element, kN, false, true>(a, b, out) : run<Element, kN, false, false>(a, b, out);
}

template <class Element>
int run(int n, bool registers, bool transposed, const void* a, const void* b, void* out) {
  if (n == 96) return run<Element, 96>(registers, transposed, a, b, out);
  if (n == 256) return run<Element, 256>(registers, transposed, a, b, out);
  return cudaErrorInvalidValue;
}

}  // namespace products

// a: [64][128]; b: [n][128] or, transposed, [128][n]; out: float32 [64][n]. dtype: QfDtype; n: 96 or 256.
QF_EXPORT int try_product(int dtype, int n, int registers, int transposed, const void* a, const void* b, void* out) {
  return dtype == QF_F16 ? products::run<qf::F16>(n, registers, transposed, a, b, out)
                         : products::run<qf::BF16>(n, registers, transposed, a, b, out);
}
