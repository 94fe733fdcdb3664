// ptx/tma.cuh on the way out, hopper/tensor_map.h of words: a warp writes boxes to two panels in turn, swizzled, and
// the copy engine stores them. Boxes may leave the tensor past its last row and column.
#include "hopper/tensor_map.h"
#include "launch_one.cuh"
#include "ptx/tma.cuh"

namespace stores {

constexpr int kRows = 16, kPanels = 2;
template <class Element>
using Tile = qf::Panels<kRows, 128 / int(sizeof(Element)), int(sizeof(Element))>;

struct Boxes {
  int first_column, first_row, across, down;
};

}  // namespace stores

// The box in row i and column j of boxes has 16-byte chunk c of its row r full of the number that says so.
template <class Element>
__global__ void __launch_bounds__(32)
    store_boxes(const __grid_constant__ CUtensorMap map, const __grid_constant__ stores::Boxes boxes) {
  using Tile = stores::Tile<Element>;
  extern __shared__ float4 s_memory[];
  char* const s_bytes = reinterpret_cast<char*>(s_memory);
  char* const s_panels =
      s_bytes + (qf::kSwizzleBytes - qf::shared_address(s_bytes) % qf::kSwizzleBytes) % qf::kSwizzleBytes;
  const int lane = int(threadIdx.x);
  for (int box = 0; box < boxes.across * boxes.down; ++box) {
    char* const s_panel = s_panels + box % stores::kPanels * Tile::kBytes;
    if (lane == 0) qf::wait_stores_read<stores::kPanels - 1>();
    __syncwarp();  // the panel may be written again
    for (int i = lane; i < stores::kRows * Tile::kChunks; i += 32) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      auto* const s_chunk = reinterpret_cast<Element*>(s_panel + row * Tile::kRowBytes + 16 * (chunk ^ row % 8));
      for (int e = 0; e < int(16 / sizeof(Element)); ++e) s_chunk[e] = Element(1000 * box + 10 * row + chunk);
    }
    qf::fence_proxy_async();  // the panel just written, to the copy engine
    __syncwarp();
    if (lane == 0) {
      qf::store_box(&map, boxes.first_column + box % boxes.across * Tile::kPanelColumns,
                    boxes.first_row + box / boxes.across * stores::kRows, 0, 0, s_panel);
      qf::commit_stores();
    }
  }
  if (lane == 0) qf::wait_stores_read<0>();
}

namespace stores {

template <class Element>
int run(void* out, const int32_t* shape, int64_t stride, const int32_t* boxes) {
  CUtensorMap map;
  if (const int error =
          qf::encode_tensor_map<Tile<Element>>(map, {out, {shape[1], shape[0], 1, 1}, {stride, 0, 0}}, kRows))
    return error;
  return launch_one(32, kPanels * Tile<Element>::kBytes + qf::kSwizzleBytes, store_boxes<Element>, map,
                    Boxes{boxes[0], boxes[1], boxes[2], boxes[3]});
}

}  // namespace stores

// out: [rows][columns] of uint16 or uint32, rows `stride` elements apart. boxes: the first column and row, how many
// across and down.
QF_EXPORT int try_stores(int bytes, void* out, const int32_t* shape, int stride, const int32_t* boxes) {
  return bytes == 2 ? stores::run<uint16_t>(out, shape, stride, boxes)
                    : stores::run<uint32_t>(out, shape, stride, boxes);
}
