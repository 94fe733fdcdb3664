// ptx/tma.cuh, ptx/mbarrier.cuh, hopper/ring.cuh, hopper/tensor_map.h: boxes of a tensor through a ring of two stages,
// written back byte by byte as they stood in shared memory.
#include "hopper/ring.cuh"
#include "hopper/tensor_map.h"
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

// Warp 0 copies, three warps read: more boxes than stages, so that every barrier goes through both of its phases.
template <class Tile>
__global__ void copy_boxes(const __grid_constant__ CUtensorMap map, const Boxes boxes, char* g_out) {
  __shared__ alignas(qf::kSwizzleBytes) char s_tiles[kStages][Tile::kBytes];
  __shared__ qf::Ring<kStages> s_ring;
  if (threadIdx.x == 0) {
    s_ring.init(kReaders / 32);
    qf::fence_mbarrier_init();
    qf::prefetch_tensor_map(&map);
  }
  __syncthreads();
  qf::Place<kStages> place;
  for (int i = 0; i < boxes.count; ++i, place.advance()) {
    char* const s_tile = s_tiles[place.stage()];
    if (threadIdx.x == 0) {
      qf::Mbarrier* const full = &s_ring.full[place.stage()];
      place.wait_empty(s_ring);
      qf::mbarrier_arrive_expect(full, Tile::kBytes);
      for (int panel = 0; panel < Tile::kCount; ++panel)
        qf::copy_box(s_tile + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelColumns,
                     boxes.first_row + i * kRows<Tile>, boxes.head, boxes.sequence, full);
    }
    if (threadIdx.x < 32) continue;
    place.wait_full(s_ring);
    for (int byte = threadIdx.x - 32; byte < Tile::kBytes; byte += kReaders)
      g_out[i * Tile::kBytes + byte] = s_tile[byte];
    __syncwarp();  // every lane has read
    if (threadIdx.x % 32 == 0) place.release(s_ring);
  }
}

template <class Tile>
int run(const QfTensor& x, const int32_t* shape, const int32_t* which, void* out) {
  const int batch = shape[0], rows = shape[1], heads = shape[2], columns = shape[3];
  CUtensorMap map;
  if (const int error = qf::encode_tensor_map<Tile>(map, x, columns, rows, heads, batch, kRows<Tile>)) return error;
  const Boxes wanted = {which[0], which[1], which[2], which[3]};
  copy_boxes<Tile><<<1, 32 + kReaders>>>(map, wanted, static_cast<char*>(out));
  if (const cudaError_t error = cudaGetLastError()) return error;
  return cudaDeviceSynchronize();
}

}  // namespace boxes

// x: [batch, rows, heads, columns] of float16, or of bytes, under any strides of whole 16 bytes. out: [count][2 panels]
// [24][128 bytes], or [48][64 bytes].
extern "C" __attribute__((visibility("default"))) int try_boxes(void* x, const int64_t* strides, const int32_t* shape,
                                                                const int32_t* which, void* out) {
  const QfTensor tensor = {x, strides[0], strides[1], strides[2]};
  if (!qf::strides_map(tensor, shape[1], shape[2], shape[0])) return cudaErrorInvalidValue;
  return boxes::run<boxes::Halves>(tensor, shape, which, out);
}
extern "C" __attribute__((visibility("default"))) int try_byte_boxes(void* x, const int64_t* strides,
                                                                     const int32_t* shape, const int32_t* which,
                                                                     void* out) {
  return boxes::run<boxes::Bytes>({x, strides[0], strides[1], strides[2]}, shape, which, out);
}
