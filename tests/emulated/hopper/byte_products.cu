// Products of bytes: WgmmaS8 and WgmmaE4m3 of ptx/wgmma.cuh, hopper/descriptor.cuh with rows of 128 bytes and of 64.
// 64 x 128 by 128 x N; tiles are written swizzled by ordinary stores.
#include "hopper/descriptor.cuh"
#include "launch_one.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace byte_products {

constexpr int kM = 64, kK = 128;

template <int kN, int kRowBytes>
struct Tiles {
  using A = qf::Panels<kM, kK, 1, kRowBytes>;
  using B = qf::Panels<kN, kK, 1, kRowBytes>;
  static constexpr int kBytes = A::kBytes + B::kBytes + qf::kSwizzleBytes;  // the last for alignment
};

__device__ inline char* aligned(char* s_bytes) {
  return s_bytes + (qf::kSwizzleBytes - qf::shared_address(s_bytes) % qf::kSwizzleBytes) % qf::kSwizzleBytes;
}

// [rows][kK] in global memory to swizzled panels.
template <class Tile>
__device__ void store_panels(char* s_tile, const char* g_x) {
  constexpr int kRows = Tile::kPanelBytes / Tile::kRowBytes, kRowsAlike = 8 / Tile::kChunks;
  for (int i = int(threadIdx.x); i < kRows * kK; i += 128) {
    const int row = i / kK, column = i % kK, panel = column / Tile::kRowBytes, byte = column % Tile::kRowBytes;
    const int chunk = byte / 16 ^ row / kRowsAlike % Tile::kChunks;
    s_tile[panel * Tile::kPanelBytes + row * Tile::kRowBytes + 16 * chunk + byte % 16] = g_x[i];
  }
}

template <int kN, class Sum>
__device__ void write(const Sum (&d)[kN / 8][4], Sum* g_out) {
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
  for (int j = 0; j < kN / 8; ++j)
    for (int e = 0; e < 4; ++e) g_out[(row + e / 2 * 8) * kN + 8 * j + lane % 4 * 2 + e % 2] = d[j][e];
}

template <int kN, int kRowBytes>
__device__ void multiply_s8(char* s_bytes, const char* g_a, const char* g_b, int32_t* g_out) {
  using A = typename Tiles<kN, kRowBytes>::A;
  using B = typename Tiles<kN, kRowBytes>::B;
  char* const s_a = aligned(s_bytes);
  store_panels<A>(s_a, g_a);
  store_panels<B>(s_a + A::kBytes, g_b);
  qf::fence_proxy_async();  // the tiles just written, to wgmma
  __syncthreads();
  const qf::AlongRows<A> a(s_a);
  const qf::AlongRows<B> b(s_a + A::kBytes);
  int32_t d[kN / 8][4];
  for (int j = 0; j < kN / 8; ++j)
    for (int e = 0; e < 4; ++e) d[j][e] = 12345;  // what is not added to must not count
  qf::hold(d);
  qf::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 32; ++k) qf::WgmmaS8<kN>::multiply(d, a.step(k), b.step(k), k > 0);
  qf::wgmma_commit();
  qf::wgmma_wait<0>();
  qf::hold(d);
  write<kN>(d, g_out);
}

// A comes in registers: bytes 32 k + 4 t .. + 3 and the same 16 further of two rows, t = lane % 4.
template <int kN, int kRowBytes>
__device__ void multiply_e4m3(char* s_bytes, const char* g_a, const char* g_b, float* g_out) {
  using B = typename Tiles<kN, kRowBytes>::B;
  char* const s_b = aligned(s_bytes);
  store_panels<B>(s_b, g_b);
  qf::fence_proxy_async();  // the tile just written, to wgmma
  __syncthreads();
  const qf::AlongRows<B> b(s_b);
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
  uint32_t a[kK / 32][4];
  for (int k = 0; k < kK / 32; ++k)
    for (int i = 0; i < 4; ++i)
      a[k][i] = *reinterpret_cast<const uint32_t*>(g_a + (row + i % 2 * 8) * kK + 32 * k + lane % 4 * 4 + i / 2 * 16);
  float d[kN / 8][4];
  for (int j = 0; j < kN / 8; ++j)
    for (int e = 0; e < 4; ++e) d[j][e] = 0.5f;  // added to
  qf::hold(d);
  qf::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 32; ++k) qf::WgmmaE4m3<kN>::multiply(d, a[k], b.step(k));
  qf::wgmma_commit();
  qf::wgmma_wait<0>();
  qf::hold(d);
  write<kN>(d, g_out);
}

}  // namespace byte_products

template <int kN, int kRowBytes>
__global__ void __launch_bounds__(128) s8_kernel(const char* g_a, const char* g_b, int32_t* g_out) {
  extern __shared__ float4 s_memory[];
  byte_products::multiply_s8<kN, kRowBytes>(reinterpret_cast<char*>(s_memory), g_a, g_b, g_out);
}
template <int kN, int kRowBytes>
__global__ void __launch_bounds__(128) e4m3_kernel(const char* g_a, const char* g_b, float* g_out) {
  extern __shared__ float4 s_memory[];
  byte_products::multiply_e4m3<kN, kRowBytes>(reinterpret_cast<char*>(s_memory), g_a, g_b, g_out);
}

// Every N and width of rows there is a test of.
#define QF_EACH_S8(DO) DO(64, 64) DO(64, 128) DO(128, 64) DO(128, 128) DO(256, 64) DO(256, 128)
#define QF_EACH_E4M3(DO) DO(64, 64) DO(64, 128) DO(128, 64) DO(128, 128) DO(256, 64) DO(256, 128)

#define QF_RUN(KERNEL, N, ROW)    \
  if (n == N && row_bytes == ROW) \
    return launch_one(128, byte_products::Tiles<N, ROW>::kBytes, KERNEL<N, ROW>, a, b, out);
#define QF_RUN_S8(N, ROW) QF_RUN(s8_kernel, N, ROW)
#define QF_RUN_E4M3(N, ROW) QF_RUN(e4m3_kernel, N, ROW)

// a: [64][128] bytes; b: [n][128]; out: [64][n] of int32, or of float32: the product and 0.5.
QF_EXPORT int try_s8(int n, int row_bytes, const char* a, const char* b, int32_t* out) {
  QF_EACH_S8(QF_RUN_S8)
  return cudaErrorInvalidValue;
}
QF_EXPORT int try_e4m3(int n, int row_bytes, const char* a, const char* b, float* out) {
  QF_EACH_E4M3(QF_RUN_E4M3)
  return cudaErrorInvalidValue;
}
