// ptx/cluster.cuh, copies to several blocks, arrivals at another block's barriers: two blocks share boxes of a tensor.
// Each copies its half of a stage to both, and fills it again when the readers of both are done.
#include "hopper/ring.cuh"
#include "hopper/tensor_map.h"
#include "launch_one.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace clusters {

constexpr int kBlocks = 2, kStages = 2, kReaders = 2, kRows = 16;  // readers: warps of a block
constexpr int kThreads = 32 * (1 + kReaders);
using Half = qf::Panels<kRows, 64>;
constexpr int kSharedBytes = kStages * kBlocks * Half::kBytes + qf::kSwizzleBytes + int(sizeof(qf::Ring<kStages>));

}  // namespace clusters

// out: [block][count][2 halves][16][128 bytes]. Every reader is to see what both blocks brought.
__global__ void __launch_bounds__(clusters::kThreads)
    share_boxes(const __grid_constant__ CUtensorMap map, int count, char* g_out) {
  using namespace clusters;
  extern __shared__ float4 s_memory[];
  char* const s_bytes = qf::own_shared(s_memory);
  char* const s_stages =
      s_bytes + (qf::kSwizzleBytes - qf::shared_address(s_bytes) % qf::kSwizzleBytes) % qf::kSwizzleBytes;
  auto& s_ring = *reinterpret_cast<qf::Ring<kStages>*>(s_stages + kStages * kBlocks * Half::kBytes);
  const int rank = int(qf::cluster_rank()), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    s_ring.init(kBlocks * kReaders);
    qf::fence_mbarrier_init();
  }
  qf::cluster_arrive();
  qf::cluster_wait();  // the barriers of both blocks are in place
  qf::RingPosition<kStages> at;
  for (int i = 0; i < count; ++i, at.advance()) {
    char* const s_stage = s_stages + at.stage() * kBlocks * Half::kBytes;
    if (threadIdx.x == 0) {
      qf::Mbarrier* const full = &s_ring.full[at.stage()];
      at.wait_empty(s_ring);
      qf::mbarrier_arrive_expect(full, kBlocks * Half::kBytes);
      qf::copy_box_to((1 << kBlocks) - 1, s_stage + rank * Half::kBytes, &map, 0, (kBlocks * i + rank) * kRows, 0, 0,
                      full);
    }
    if (warp == 0) continue;
    at.wait_full(s_ring);
    for (int byte = int(threadIdx.x) - 32; byte < kBlocks * Half::kBytes; byte += 32 * kReaders)
      g_out[(rank * count + i) * kBlocks * Half::kBytes + byte] = s_stage[byte];
    __syncwarp();  // every lane has read
    if (lane < kBlocks) qf::mbarrier_arrive_at(&s_ring.empty[at.stage()], uint32_t(lane));
  }
  __syncwarp();
  qf::cluster_arrive();
  qf::cluster_wait();  // nobody reaches into a block that has ended
}

// x: [32 count][64] of float16.
QF_EXPORT int try_clusters(int count, void* x, void* out) {
  using namespace clusters;
  CUtensorMap map;
  if (const int error = qf::encode_tensor_map<Half>(map, {x, {64, kBlocks * kRows * count, 1, 1}, {64, 0, 0}}, kRows))
    return error;
  const qf::Launch how = {kBlocks, kThreads, kSharedBytes, nullptr, false, kBlocks};
  if (const int status = qf::launch(how, share_boxes, map, count, static_cast<char*>(out))) return status;
  return cudaDeviceSynchronize();
}
