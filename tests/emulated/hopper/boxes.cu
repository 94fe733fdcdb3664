// ptx/tma.cuh, ptx/mbarrier.cuh, hopper/ring.cuh, hopper/tensor_map.h: boxes of a tensor through a ring of two stages,
// written back byte by byte as they stood in shared memory.
#include "hopper/ring.cuh"
#include "hopper/tensor_map.h"
#include "launch_one.cuh"
#include "ptx/tma.cuh"

namespace boxes {

constexpr int kStages = 2, kReaders = 96;
// Two panels each.
using Halves = qf::Panels<24, 128>;
using Bytes = qf::Panels<48, 128, 1, 64>;

struct Boxes {
  int first_row, count, head, sequence;
};

template <class Tile>
constexpr int kRows = Tile::kPanelBytes / Tile::kRowBytes;
// The tiles, room to align them, the ring.
template <class Tile>
constexpr int kSharedBytes = kStages * Tile::kBytes + qf::kSwizzleBytes + int(sizeof(qf::Ring<kStages>));

__device__ inline char* aligned(char* s_bytes) {
  return s_bytes + (qf::kSwizzleBytes - qf::shared_address(s_bytes) % qf::kSwizzleBytes) % qf::kSwizzleBytes;
}

}  // namespace boxes

// Warp 0 copies, three warps read: more boxes than stages, so that every barrier goes through both of its phases.
template <class Tile>
__global__ void copy_boxes(const __grid_constant__ CUtensorMap map, const boxes::Boxes wanted, char* g_out) {
  using namespace boxes;
  extern __shared__ float4 s_memory[];
  char* const s_tiles = boxes::aligned(reinterpret_cast<char*>(s_memory));
  auto& s_ring = *reinterpret_cast<qf::Ring<kStages>*>(s_tiles + kStages * Tile::kBytes);
  if (threadIdx.x == 0) {
    s_ring.init(kReaders / 32);
    qf::fence_mbarrier_init();
    qf::prefetch_tensor_map(&map);
  }
  __syncthreads();
  qf::RingPosition<kStages> place;
  for (int i = 0; i < wanted.count; ++i, place.advance()) {
    char* const s_tile = s_tiles + place.stage() * Tile::kBytes;
    if (threadIdx.x == 0) {
      qf::Mbarrier* const full = &s_ring.full[place.stage()];
      place.wait_empty(s_ring);
      qf::mbarrier_arrive_expect(full, Tile::kBytes);
      for (int panel = 0; panel < Tile::kCount; ++panel)
        qf::copy_box(s_tile + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelColumns,
                     wanted.first_row + i * kRows<Tile>, wanted.head, wanted.sequence, full);
    }
    if (threadIdx.x < 32) continue;
    place.wait_full(s_ring);
    for (int byte = threadIdx.x - 32; byte < Tile::kBytes; byte += kReaders)
      g_out[i * Tile::kBytes + byte] = s_tile[byte];
    __syncwarp();  // every lane has read
    if (threadIdx.x % 32 == 0) place.release(s_ring);
  }
}

namespace boxes {

template <class Tile>
int run(const qf::TensorExtents& x, const int32_t* which, void* out) {
  CUtensorMap map;
  if (const int error = qf::encode_tensor_map<Tile>(map, x, kRows<Tile>)) return error;
  const Boxes wanted = {which[0], which[1], which[2], which[3]};
  return launch_one(32 + kReaders, kSharedBytes<Tile>, copy_boxes<Tile>, map, wanted, static_cast<char*>(out));
}

// strides: of batch, rows and heads.
qf::TensorExtents extents_of(void* x, const int64_t* strides, const int32_t* shape) {
  return {x, {shape[3], shape[1], shape[2], shape[0]}, {strides[1], strides[2], strides[0]}};
}

}  // namespace boxes

// x: [batch, rows, heads, columns] of float16, or of bytes, under any strides of whole 16 bytes. out: [count][2 panels]
// [24][128 bytes], or [48][64 bytes].
QF_EXPORT int try_boxes(void* x, const int64_t* strides, const int32_t* shape, const int32_t* which, void* out) {
  const qf::TensorExtents extents = boxes::extents_of(x, strides, shape);
  if (!qf::strides_map(extents, 2)) return cudaErrorInvalidValue;
  return boxes::run<boxes::Halves>(extents, which, out);
}
QF_EXPORT int try_byte_boxes(void* x, const int64_t* strides, const int32_t* shape, const int32_t* which, void* out) {
  return boxes::run<boxes::Bytes>(boxes::extents_of(x, strides, shape), which, out);
}
