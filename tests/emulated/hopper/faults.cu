// One warpgroup that multiplies, rightly or with one fault: what the emulator says about it.
#include "hopper/descriptor.cuh"
#include "hopper/tensor_map.h"
#include "launch_one.cuh"
#include "ptx/cluster.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace {

enum Fault {
  kNone,
  kNoFence,
  kEarlyRead,
  kEarlyWrite,
  kOverwrittenA,
  kOtherProducts,
  kOtherCopy,
  kOtherGroups,
  kNoWait,
  kNoArrival,
  kSecondArrival,
  kNoInit,
  kOddBox,
  kNoCopy,
  kHalfTrade,
  kNoInitFence,
  kNoProxyFence,
  kNoStoreFence,
  kNoStoreWait,
  kOddStore,
  kEarlyStore,
  kEndedBlock,
  kNoMeeting,
};

constexpr int kRows = 16, kN = 64;
using Tile = qf::Panels<kRows, kN>;

}  // namespace

// The sum of B's column 0, ones, times A, ones: 16 in every thread if all is well.
__global__ void multiply(Fault fault, const __grid_constant__ CUtensorMap map, float* g_out) {
  extern __shared__ float4 s_memory[];
  char* const s_tile = reinterpret_cast<char*>(s_memory);
  auto* const s_full = reinterpret_cast<qf::Mbarrier*>(s_tile + Tile::kBytes);
  const int thread = threadIdx.x;
  if (thread == 0 && fault != kNoInit) qf::mbarrier_init(s_full, 1);
  if (thread == 0 && fault != kNoInitFence) qf::fence_mbarrier_init();
  __syncthreads();
  if (fault != kHalfTrade || thread < 64) qf::give_registers<40>();
  if (thread == 0) {
    if (fault != kNoArrival) qf::mbarrier_arrive_expect(s_full, Tile::kBytes);
    if (fault == kSecondArrival) qf::mbarrier_arrive(s_full);
    if (fault != kNoCopy) qf::copy_box(s_tile + (fault == kOddBox ? 512 : 0), &map, 0, 0, 0, 0, s_full);
  }
  qf::mbarrier_wait(s_full, 0);
  if (fault == kNoProxyFence && thread == 3) *reinterpret_cast<uint16_t*>(s_tile) = 0;
  __syncthreads();
  uint32_t a[4];
  float d[kN / 8][4] = {};
  for (uint32_t& pair : a) pair = 0x3c003c00;  // 1, 1
  const qf::AlongColumns<Tile> b(s_tile);
  const auto add = [&](int step) {
    qf::Wgmma<qf::F16, kN>::multiply<true>(d, a, b.step(fault == kOtherProducts && thread == 77 ? 1 : step));
  };
  if (fault == kOtherCopy && thread >= 96) qf::wgmma_copy(1);
  if (fault != kNoFence) qf::wgmma_fence();
  add(0);
  if (fault == kOtherGroups && thread < 32) qf::wgmma_commit();
  if (fault == kOtherGroups) add(0);
  qf::wgmma_commit();
  if (fault == kEarlyWrite) d[0][0] = 1.0f;
  if (fault == kOverwrittenA) a[1] = 0;
  if (fault == kEarlyRead) g_out[thread] = d[0][0];
  if (fault != kNoWait) qf::wgmma_wait<0>();
  if (fault != kEarlyRead) g_out[thread] = d[0][0];
}

// A thread has the copy engine store what it wrote.
__global__ void store(Fault fault, const __grid_constant__ CUtensorMap map, float* g_out) {
  extern __shared__ float4 s_memory[];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; ++i) s_memory[i] = make_float4(1, 1, 1, 1);
    if (fault != kNoStoreFence) qf::fence_proxy_async();
    qf::store_box(&map, fault == kEarlyStore ? -16 : 0, 0, 0, 0,
                  reinterpret_cast<char*>(s_memory) + (fault == kOddStore ? 512 : 0));
    qf::commit_stores();
    if (fault != kNoStoreWait) qf::wait_stores_read<0>();
  }
  g_out[threadIdx.x] = 16;
}

// Two blocks: the second arrives at a barrier of the first, which is to wait for it.
__global__ void reach(Fault fault, float* g_out) {
  extern __shared__ float4 s_memory[];
  auto* const s_barrier = reinterpret_cast<qf::Mbarrier*>(qf::own_shared(s_memory));
  if (threadIdx.x == 0) qf::mbarrier_init(s_barrier, 1);
  if (fault != kNoMeeting) {
    qf::cluster_arrive();
    qf::cluster_wait();  // the barriers of both are in place
  }
  if (qf::cluster_rank() == 1 && threadIdx.x == 0) qf::mbarrier_arrive_at(s_barrier, 0);
  if (qf::cluster_rank() == 0 && fault != kEndedBlock) qf::mbarrier_wait(s_barrier, 0);
  g_out[threadIdx.x] = 16;
}

// out: float32 [128]. Returns a cudaError_t.
QF_EXPORT int try_fault(int fault, float* out) {
  alignas(16) uint16_t x[kRows * kN];
  std::fill_n(x, kRows * kN, uint16_t(0x3c00));
  CUtensorMap map{};
  if (const int error = qf::encode_tensor_map<Tile>(map, {x, {kN, kRows, 1, 1}, {kN, 0, 0}}, kRows)) return error;
  if (fault == kEndedBlock || fault == kNoMeeting)
    return qf::launch({2, 128, 4096, nullptr, false, 2}, reach, Fault(fault), out);
  if (fault >= kNoStoreFence) return launch_one(128, 4096, store, Fault(fault), map, out);
  return launch_one(128, 4096, multiply, Fault(fault), map, out);
}
